import json

import pytest

from rowmesh.cli.__main__ import main
from rowmesh.doctor import step
from rowmesh.doctor.step import Failed
from tests.doctor.test_advice import STEP, TWO


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command where steps end as given, by number of ranks; returns status, output and errors."""
    monkeypatch.delenv("RANK", raising=False)

    def run_doctor(*arguments, ends):
        monkeypatch.setattr(step, "run_step", lambda count: ends[count])
        with pytest.raises(SystemExit) as end:
            main(["doctor", *arguments])
        return end.value.code, *capsys.readouterr()

    return run_doctor


def test_a_step_alone(run):
    status, out, err = run(ends={1: STEP})
    assert (status, err) == (0, "")
    assert "1 rank    10.0 ms a step of 2,048 samples, 204,800 a second" in out


def test_ranks_and_json(run):
    status, out, _ = run("--ranks", "2", "--json", ends={1: STEP, 2: TWO})
    report = json.loads(out)
    assert status == 0
    assert [each["ranks"] for each in report["steps"]] == [1, 2]
    assert {"name", "level", "text", "advice"} == set(report["findings"][0])


def test_a_step_that_fails_is_the_status(run):
    status, out, err = run("--ranks", "2", ends={1: STEP, 2: Failed(2, "rank 1: it broke")})
    assert status == 2
    assert "failed  2 ranks     rank 1: it broke" in out
    assert "the step on 2 rank(s) failed" in err


def test_what_cannot_be(run, monkeypatch):
    assert run("--ranks", "0", ends={})[0] == 2
    monkeypatch.setenv("RANK", "0")
    status, _, err = run(ends={})
    assert status == 2
    assert "without torchrun, with --ranks N" in err
