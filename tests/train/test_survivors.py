"""Ranks that are left write a checkpoint when others die, so that no step is lost. Processes are killed by SIGKILL."""

from pathlib import Path

import pytest

from rowmesh.checkpoint.series import Series, verify
from rowmesh.observe.json_lines import last_step
from tests.support.killed_runs import model_of
from tests.support.lives import Lives
from tests.support.modes import TRANSPORTS, options_of, prepare_job

SELDOM = "checkpoint.every_steps=1000"


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    return Lives(prepare_job(tmp_path_factory.mktemp("job")))


@pytest.fixture(scope="module")
def untouched(lives, tmp_path_factory):
    """The folder of a run that nothing disturbed, by how many ranks it had and what transport."""
    folder, runs = tmp_path_factory.mktemp("untouched"), {}

    def run_of(ranks, transport):
        key = f"{ranks}-{transport}"
        if key not in runs:
            runs[key] = folder / key
            options = options_of("exact replicas", ranks, runs[key], transport)
            assert lives.train([*options, SELDOM], ranks=ranks).statuses == [0] * ranks
        return runs[key]

    return run_of


def check_lost(lives, run, ranks, transport, fault, step, *, saved=True):
    """One rank dies; the run goes on after a step, from what the others wrote. Returns what was said."""
    options = [*options_of("exact replicas", ranks, run, transport), SELDOM, "--resume", "auto"]
    life = lives.train(options, f"{fault}=kill", ranks=ranks)
    assert life.statuses.count(-9) == 1, life.said
    series = Series(run / "checkpoints")
    assert series.steps() == ([step] if saved else []), life.said
    for path in (each for each in (run / "checkpoints").iterdir()) if saved else ():
        verify(path)
    said = life.said
    life = lives.train(options, ranks=ranks)
    assert not any(life.statuses), life.said
    assert (f"resume    after step {step} of 30" in life.said) == saved
    return said


def test_no_step_is_lost_with_a_rank(lives, untouched, tmp_path):
    run = tmp_path / "run"
    said = check_lost(lives, run, 2, "collective", "engine.fetched@8,rank0", 7)
    assert "checkpoint after step 7 by ranks [1], which are all of a replica group; --resume loses no step, and" in said
    assert model_of(run) == model_of(untouched(2, "collective"))


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("point", ["engine.fetched@8", "engine.push@8", "engine.push@30"])
def test_a_replica_group_that_is_whole_writes_what_it_stands_at(lives, untouched, tmp_path, point, victim, transport):
    run, step = tmp_path / "run", int(point.partition("@")[2]) - 1
    check_lost(lives, run, 4, transport, f"{point},rank{victim}", step)
    assert model_of(run) == model_of(untouched(4, transport))


@pytest.mark.slow
def test_a_death_amid_what_follows_a_step_costs_the_steps_since_the_last_checkpoint(lives, untouched, tmp_path):
    """The line of step 10 was not written: rank 0 was to write it."""
    run = tmp_path / "run"
    said = check_lost(lives, run, 2, "collective", "loop.step@10,rank0", 0, saved=False)
    assert "no checkpoint by ranks [1]: rank 1 is amid the end of a step" in said
    assert model_of(run) == model_of(untouched(2, "collective"))


@pytest.mark.slow
def test_where_every_replica_group_lost_a_rank_nothing_is_written(lives, tmp_path):
    faults = "engine.fetched@8,rank0=kill; engine.fetched@8,rank3=kill"
    options = [*options_of("exact replicas", 4, tmp_path / "run", "collective"), SELDOM]
    life = lives.train(options, faults, ranks=4)
    assert life.statuses[0] == life.statuses[3] == -9
    assert Series(tmp_path / "run" / "checkpoints").steps() == []


def test_the_next_start_removes_what_ranks_that_die_while_they_write_leave(lives, tmp_path):
    run = tmp_path / "run"
    faults = "engine.fetched@8,rank0=kill; checkpoint.publish,rank1=kill"
    options = [*options_of("exact replicas", 2, run, "collective"), "checkpoint.every_steps=3", "--resume", "auto"]
    assert lives.train(options, faults, ranks=2).statuses == [-9, -9]
    series = Series(run / "checkpoints")
    assert series.steps() == [3, 6]
    assert [*series.folder.glob("step-000000007.survivors-of-*")]
    assert -9 in lives.train([*options, SELDOM], "loop.step@8=kill", ranks=2).statuses
    assert sorted(path.name for path in series.folder.iterdir()) == ["step-000000003", "step-000000006"]


@pytest.mark.slow
def test_a_rank_that_dies_while_they_write_leaves_nothing(lives, tmp_path):
    faults = "engine.fetched@8,rank0=kill; survivors.meet,rank2=kill"
    options = [*options_of("exact replicas", 4, tmp_path / "run", "collective"), SELDOM]
    life = lives.train(options, faults, ranks=4)
    assert life.statuses[0] == life.statuses[2] == -9
    assert Series(tmp_path / "run" / "checkpoints").steps() == []


def test_the_last_line_of_a_log_is_found(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    assert last_step(path) == 0
    path.write_text('{"step": 5}\n{"step": 10}\n{"step": 15')
    assert last_step(path) == 10
