"""What `embedding_step --equal-bags` counts."""

import json

import numpy as np

from benchmarks.command import Report, parse
from benchmarks.equal_bags import NO_ID, run, visits, ways
from benchmarks.workload import Workload

ITEM, USER = 8, 1


def test_what_travels_of_a_table():
    """Two of three samples have the same bag; four ids, three rows."""
    rows, sums, distinct = ways(np.array([[1, 2], [1, 2], [3, NO_ID]]), dim=8)
    assert rows == (3 * (4 + 32), 3 * 32)
    assert sums == (5 * 4 + 3 * 32, 3 * 32)
    assert distinct == (3 * 4 + 2 * 32, 3 * (32 + 4))


def events(tmp_path):
    """A user likes item 8, pauses, likes 9 and sees 7, and pauses again; the first half of the events is no sample."""
    minutes = [0, 40, 41, 80, 81, 82]
    items, liked = [8, 9, 7, 6, 5, 4], [1, 1, 0, 1, 0, 1]
    lines = ["user_id\tvideo_id\ttime_ms\tlabel"]
    lines += [f"{USER}\t{item}\t{60_000 * m}\t{label}" for m, item, label in zip(minutes, items, liked, strict=True)]
    path = tmp_path / "events.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_events_of_a_visit_share_the_history_before_it(tmp_path):
    workload = Workload(pooling=3, global_batch=6)
    ((history, users, items),) = visits(events(tmp_path), workload, ranks=2, shuffled=False)
    assert history.tolist() == [[8, 9, NO_ID]] * 3
    assert users.tolist() == [[USER]] * 3
    assert items.tolist() == [[6], [5], [4]]


def test_lines(tmp_path, capsys):
    common = ["--global-batch", "6", "--dim", "8", "--equal-bags"]
    extra = {"bags": "", "construction": "drawn", "equal_bags": False, "events": ""}
    for arguments in (["--events", str(events(tmp_path)), "--pooling", "3"], ["--max-rows", "50", "--steps", "2"]):
        report = Report("embedding_step", None)
        run(parse("", [*common, *arguments], **extra), report)
        report.finish()
    in_time, shuffled, summary, drawn, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert in_time["distinct_bags"] == shuffled["distinct_bags"] == 0.333
    # Half of everything is at the other rank: of 2 rows of the history, 1 of the user, 3 of items, or of sums.
    assert in_time["bytes"]["rows"] == (2 + 1 + 3) * 68 / 2
    assert in_time["bytes"]["sums"] == ((6 + 3 + 3) * 4 + 3 * 3 * 64) / 2
    assert summary["summary"]["dim8_batch6_pooling3_visits_time: forward bytes"] == 1.0
    assert drawn["tables_that_send_sums"] == 0
