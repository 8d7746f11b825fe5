"""What the `tiered` benchmark counts; nothing here is timed."""

import json

from benchmarks import tiered
from benchmarks.workload import Workload


def test_distinct_slots_are_those_of_all_tables():
    workload = Workload(max_rows=5000, global_batch=64)
    (slots,) = tiered.distinct_slots(workload, 1)
    assert 26 <= len(slots) <= 26 * 64
    assert int(slots[-1]) < sum(workload.table_rows)
    assert len(set(slots.tolist())) == len(slots)


def test_lines(capsys, tmp_path):
    tiered.main(
        [
            "--dim",
            "4",
            "--global-batch",
            "50",
            "--steps",
            "2",
            "--warmup",
            "1",
            "--repeats",
            "1",
            "--max-rows",
            "2000",
            "--rows",
            "500",
            "--threads",
            "2",
            "--ahead",
            "0,2",
            "--samples",
            "32",
            "--batches",
            "6",
            "--step-ms",
            "1",
            "--folder",
            str(tmp_path),
        ]
    )
    *lines, summary = map(json.loads, capsys.readouterr().out.splitlines())
    by_case = {(line["case"], line["contestant"]): line for line in lines if "contestant" in line}
    assert {name for case, name in by_case if case == "found, dim 4"} == {"table", "pin", "unpin"}
    assert ("read, dim 4, memory", "pin") in by_case
    found = {(line["contestant"], line["ahead"]): line["found_share"] for line in lines if line["case"] == "ahead"}
    assert found["evicted", 0] <= found["evicted", 2] <= found["retained", 2]
    assert 0 < found["retained", 0] < 1
    assert len(summary["summary"]) >= 9
    assert list(tmp_path.iterdir()) == []
