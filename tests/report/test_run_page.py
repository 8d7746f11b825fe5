import re
from dataclasses import replace
from pathlib import Path

import pytest

from rowmesh.cli.__main__ import main
from rowmesh.errors import RowmeshError
from rowmesh.observe.trace import Event, write_trace
from rowmesh.report.run_page import run_report, write_run_report
from rowmesh.report.run_record import read_run
from rowmesh.run.run_folder import RunFolder
from tests.report.test_plan_page import Page
from tests.support.chromium import Chromium, find_chromium
from tests.support.written_runs import ABOUT, write_run


def texts(path):
    return " ".join(Page(Path(path).read_text()).texts)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "clicks")


def test_it_is_one_file_that_asks_for_nothing(run):
    text = run_report([read_run(run)])
    page = Page(text)
    assert not {name for _, name, _ in page.attributes} & {"src", "href", "srcset", "action", "onload"}
    assert not re.search(r"url\(|@import|<script|<link|https?://", text)
    assert len(text) < 250_000


def test_it_shows_all_that_a_run_recorded(run):
    text = " ".join(Page(run_report([read_run(run)])).texts)
    for heading in ("What to do next", "Over the steps", "Quality", "Where a step's time goes", "Bytes between ranks"):
        assert heading in text
    for heading in ("Memory by rank", "Tables", "Configuration and environment"):
        assert heading in text
    assert (
        "AUC 0.75000 on test, of 0.79000 that can be reached; 40 of 40 steps, 2,000 samples a second on 2 ranks."
        in text
    )
    assert "10 ms a step" in text  # the sum of its stages
    assert "50.0 %" in text  # the network's
    assert "90.0 %" in text  # found in fast memory
    assert "train.epochs" in text
    assert "What is missing here" in text  # the plan of this run


def test_it_escapes_names(tmp_path):
    run = write_run(tmp_path / "<b>clicks")
    page = Page(run_report([read_run(run)]))
    assert "<b>clicks" in page.texts


def test_two_runs_are_side_by_side(run, tmp_path):
    other = write_run(tmp_path / "other" / "clicks", auc=0.76, config={"train": {"epochs": 3}})
    text = " ".join(Page(run_report([read_run(run), read_run(other)])).texts)
    assert f"{tmp_path.name}/clicks" in text
    assert "other/clicks" in text
    assert "+0.01000" in text
    assert "What differs" in text


@pytest.mark.parametrize("missing", ["about.json", "metrics.jsonl", "counters.jsonl", "environment.json", "evaluation"])
def test_what_is_missing_is_named(run, missing, tmp_path):
    path = run / missing
    path.rename(tmp_path / "gone")
    text = " ".join(Page(run_report([read_run(run)])).texts)
    assert {"evaluation": "there is no evaluation"}.get(missing, missing) in text.partition("What is missing here")[2]


def test_damaged_files_are_named(run):
    (run / "environment.json").write_text("[1]")
    (run / "trace.json").write_text("{")
    (run / "evaluation" / "test.json").write_text('{"auc": 0.5, "score_bins": {"samples": [1]}}')
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "tr\n[]\n')
    missing = " ".join(read_run(run).missing)
    for text in ("environment.json cannot", "trace.json cannot", "test.json: score bins", "2 line(s) are no records"):
        assert text in missing
    Page(run_report([read_run(run)]))


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(RowmeshError, match="is no run"):
        read_run(tmp_path)


def test_many_ranks_and_many_steps_stay_small(tmp_path):
    about = dict(ABOUT, ranks=64, memory_bytes=ABOUT["memory_bytes"] * 32)
    run = write_run(tmp_path / "big", steps=1_000, every=1, about=about, by_rank=64)
    text = run_report([read_run(run)])
    Page(text)
    assert len(text) < 300_000


def test_a_timeline_shows_the_last_batches_in_a_row(run):
    # The second loop counts from its first batch again.
    events = [Event("compute", "compute", b, 0, t + b, t + b + 0.5) for t in (0, 100) for b in range(6)]
    write_trace(run / "trace.json", [events, [Event("rows", "rows", 3, 0, 103.0, 103.1)]])
    timeline = read_run(run).timeline
    assert timeline.batches == (2, 5)
    assert timeline.length_ms == pytest.approx(3500)
    assert [(lane.rank, lane.name, len(lane.spans)) for lane in timeline.lanes] == [(0, "compute", 4), (1, "rows", 1)]
    assert "Pipeline: batches 2 to 5" in " ".join(Page(run_report([read_run(run)])).texts)


def test_the_command_writes_the_page_where_it_is_told(run, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["report", str(run)])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"wrote {run / 'report.html'}\n"
    assert "AUC 0.75000" in texts(run / "report.html")
    with pytest.raises(SystemExit):
        main(["report", str(run), str(write_run(tmp_path / "b"))])
    assert "clicks and b" in texts(run / "comparison.html")
    with pytest.raises(SystemExit):
        main(["report", str(run), "--out", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").exists()


def test_means_leave_out_the_beginning_and_weigh_lines_by_their_steps(run):
    record = read_run(run)
    lines = [{"step": 1, "x": 100.0}, {"step": 2, "x": 1.0}, {"step": 5, "x": 2.0}]
    assert replace(record, train=lines).mean("x") == (1.0 + 3 * 2.0) / 4
    assert replace(record, train=lines).mean("y") is None


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="Chromium is not installed: apt-get install chromium")
def test_in_a_browser_nothing_is_asked_for_said_or_too_wide(run, tmp_path):
    events = [Event("compute", "compute", batch, 0, batch, batch + 0.5) for batch in range(6)]
    write_trace(RunFolder(run).trace, [events])
    other = write_run(tmp_path / "another run with a long name of its own", auc=0.76)
    write_run_report([run], tmp_path / "one.html")
    write_run_report([run, other], tmp_path / "two.html")
    chromium = Chromium(find_chromium())
    try:
        for page in (tmp_path / "one.html", tmp_path / "two.html"):
            for width, dark in ((400, False), (400, True), (1400, False), (1400, True)):
                visit = chromium.visit(page, width=width, dark=dark)
                assert visit.requests == [page.as_uri()]
                assert visit.complaints == []
                assert visit.page_width <= visit.window_width == width
    finally:
        chromium.close()
