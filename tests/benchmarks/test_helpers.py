"""The parts that turn runs into numbers; nothing here is timed."""

import inspect
import json

import pytest

from benchmarks import segment_unique
from benchmarks.command import Report, parse
from benchmarks.contestant import Contestant, connect_all
from benchmarks.embedding_step import target
from benchmarks.measure import slowest, summarize
from benchmarks.phases import PhaseClock
from benchmarks.ranks.embedding_step import PHASES
from benchmarks.workload import Workload


def test_a_step_lasts_as_long_as_its_slowest_rank():
    answers = [{"seconds": {"step": [1.0, 4.0]}}, {"seconds": {"step": [2.0, 3.0]}}]
    assert slowest(answers, "step") == [2.0, 4.0]


def test_summary_has_median_and_percentiles_in_milliseconds():
    summary = summarize([i / 1000 for i in range(101)], "call")
    assert summary == {"call_ms": 50.0, "call_ms_p10": 10.0, "call_ms_p90": 90.0, "timed_steps": 101}
    assert summarize([0.002])["step_ms_p90"] == 2.0


def test_lists_make_every_combination():
    options = parse("", ["--dim", "16,64", "--global-batch", "8,32", "--pooling", "2"])
    assert [(w.dim, w.global_batch, w.pooling) for w in options.workloads] == [
        (16, 8, 2),
        (16, 32, 2),
        (64, 8, 2),
        (64, 32, 2),
    ]


def test_quick_keeps_what_was_asked_for():
    (workload,) = parse("", ["--quick", "--dim", "32"], {"dim": [16, 64]}).workloads
    assert workload.dim == 32
    assert workload.max_rows < Workload().max_rows


def test_a_batch_that_ranks_cannot_share_is_refused(capsys):
    with pytest.raises(SystemExit):
        parse("", ["--global-batch", "9"])
    assert "--global-batch 9 does not divide by 2 ranks" in capsys.readouterr().err


def test_lines_are_printed_and_appended(tmp_path, capsys):
    path = tmp_path / "results" / "lines.jsonl"
    for _ in range(2):
        report = Report("name", path)
        report.ratio("case", 2.0)
        report.finish()
    expected = {"benchmark": "name", "summary": {"case": 2.0}}
    assert [json.loads(line) for line in path.read_text().splitlines()] == [expected] * 2
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == expected


def test_the_innermost_phase_pays(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])  # step, outer, inner, inner ends, outer ends, step ends
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    clock = PhaseClock()
    inner = clock.wrap("inner", lambda: None)
    with clock.step():
        clock.wrap("outer", inner)()
    assert clock.medians_ms() == {"outer": 6000.0, "inner": 3000.0, "other": 6000.0}


def test_watched_functions_exist_and_are_put_back():
    before = [getattr(owner, name) for owner, name, _ in PHASES]
    with PhaseClock().watching(PHASES):
        assert all(getattr(owner, name) not in before for owner, name, _ in PHASES)
    assert [getattr(owner, name) for owner, name, _ in PHASES] == before
    assert all(inspect.isfunction(function) for function in before)


def test_targets_are_those_of_the_named_cases():
    assert target(Workload(dim=64, global_batch=4096), "one_sided") == 10.0
    assert target(Workload(dim=64, global_batch=4096, pooling=10), "collective") == 2.0
    assert target(Workload(dim=64, global_batch=512), "one_sided") is None
    assert target(Workload(dim=128, bags="mlperf"), "collective") == 2.5


def test_segment_unique_reports_every_contestant(capsys):
    segment_unique.main(["--quick", "--global-batch", "256", "--steps", "2"])
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["contestant"] for line in lines} == {
        "torch.unique per_segment",
        "torch.unique combined",
        "rowmesh SegmentHash",
        "rowmesh segment_unique",
    }
    assert all(line["call_ms"] > 0 for line in lines)
    assert len(last["summary"]) == 4


def test_a_peer_whose_python_is_not_there_is_absent():
    with Contestant("peer", "no.module", Workload(), ranks=2, python="/nowhere/python") as peer:
        ready, absent = connect_all([peer], deadline_s=0)
    assert ready == []
    assert "peer did not start" in absent["peer"]
    assert "/nowhere/python" in absent["peer"]
