"""Stages that sleep take as long as they are told, in the order of their schedule."""

import json

import pytest

from benchmarks import pipeline
from benchmarks.pipeline_stages import ALL, seconds_of, sleep
from rowmesh.pipeline.schedule import make_schedule


@pytest.mark.parametrize("depth", [0, 2])
def test_the_driver_does_all_of_its_tasks(depth):
    schedule = make_schedule(depth, 3, is_tiered=True, copies=True)
    spans = sleep(schedule, seconds_of(schedule, dict.fromkeys(ALL, 1.0)), 4)
    assert [span.task for span in spans] == [task for turn in range(4) for task in schedule.tasks("compute", turn)]
    for span in spans:
        assert span.end_s - span.start_s >= (1e-3 / 3 if span.task.stage == "compute" else 0.0)
    rows = [span for span in spans if span.task.stage == "dense"]
    assert rows[-1].end_s - rows[0].start_s >= 3e-3  # compute alone


def test_lines_have_what_is_predicted(capsys):
    arguments = ["--stages", "read=1,compute=2,copy=1", "--stages-depth", "0,1", "--stages-micro-batches", "1,2"]
    pipeline.main([*arguments, "--stages-steps", "4", "--stages-repeats", "1"])
    *lines, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["depth"], line["micro_batches"]) for line in lines] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    for line in lines:
        assert line["mix"] == "given"
        assert line["step_ms"] >= 2.0
        assert line["predicted_ms"] >= 2.0
        assert line["ratio"] == pytest.approx(line["step_ms"] / line["predicted_ms"], rel=1e-2)
    assert len(last["summary"]) == 1


@pytest.mark.parametrize("mix", ["reed=20", "read", "read=fast", "read=-1"])
def test_mistakes_are_named(capsys, mix):
    with pytest.raises(SystemExit):
        pipeline.main(["--stages", mix])
    assert mix.partition("=")[0] in capsys.readouterr().err
