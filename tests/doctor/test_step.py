"""A step on ranks, and what is left of one that fails."""

from unittest import mock

import pytest

from rowmesh.doctor.step import RESULT, STEPS, Failed, StepTimes, measure, run_step
from rowmesh.mesh import Mesh


def measure_here(mesh):
    with mock.patch.object(Mesh, "connect", return_value=mesh):
        return measure(0.0)


@pytest.mark.parametrize("world_size", [1, 2])
def test_times_of_ranks(ranks, world_size):
    times = ranks.run(measure_here, world_size=world_size)
    assert [each.ranks for each in times] == [world_size] * world_size
    for each in times:
        assert each.transport == ("local" if world_size == 1 else "one_sided")
        assert each.threads == 1
        assert each.samples == 2048
        assert 0 < each.sparse_s <= each.step_s
        assert each.faults is None or each.faults * STEPS == int(each.faults * STEPS + 0.5)


def test_a_rank_that_fails_says_why(monkeypatch):
    monkeypatch.setenv("ROWMESH_FAULTS", "mesh.connect=raise")
    assert run_step(1) == Failed(1, "rank 0: RuntimeError: injected fault")


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_processes_of_their_own(monkeypatch, count):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    times = run_step(count)
    assert isinstance(times, StepTimes), times
    assert (times.ranks, times.threads) == (count, 1)
    assert times.compiled >= 0


def test_a_step_that_never_ends_is_ended(monkeypatch):
    monkeypatch.setattr("rowmesh.doctor.step.sys.executable", "sleep")
    monkeypatch.setattr("rowmesh.doctor.step.COMMAND", ["100"])
    assert run_step(1, timeout_s=0.05) == Failed(1, "no step within 0 s")


def test_a_step_that_says_nothing_has_failed(monkeypatch):
    monkeypatch.setattr("rowmesh.doctor.step.sys.executable", "true")
    assert run_step(1) == Failed(1, "ended with status 0")
    assert RESULT
