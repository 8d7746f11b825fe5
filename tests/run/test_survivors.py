"""Ranks that are left write a checkpoint when others die, so that no step is lost. Processes are killed by SIGKILL."""

from itertools import product
from pathlib import Path

import pytest

from rowmesh._support.json_lines import last_step
from rowmesh.checkpoint import read_manifest
from rowmesh.checkpoint.manifest import DENSE
from rowmesh.checkpoint.series import Series, verify
from tests.support.killed_runs import lines_of, model_of
from tests.support.lives import Lives
from tests.support.modes import TRANSPORTS, options_of, prepare_job

SELDOM = "checkpoint.every_steps=1000"
OWN_MODEL = ["model.name=tests.support.own_models:Wide", "model.bottom=[512, 256, 64]", "model.top=[512, 256]"]
MORE = {
    "exact replicas": [],
    "dynamic, demoting": ["tables.dynamic.store_capacity=90"],
    "dynamic, ages": ["tables.dynamic.ttl_steps=4", "tables.dynamic.eviction=lfu"],
    "running means": OWN_MODEL,
}
"""What modes get beside two replicas."""
OWN_MODES = {"dynamic, ages": "dynamic", "running means": "plain"}
"""Modes that the support does not have, and which of its they are else."""


def options_in(mode: str, ranks, run, transport):
    """The options of a run with exact replicas that is else in a mode."""
    base = OWN_MODES.get(mode, mode)
    return [*options_of(base, ranks, run, transport), *MORE.get(mode, []), "parallel.replicas=2", SELDOM]


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    return Lives(prepare_job(tmp_path_factory.mktemp("job")))


@pytest.fixture(scope="module")
def untouched(lives, tmp_path_factory):
    """The folder of a run that nothing disturbed, by how many ranks it had and what transport."""
    folder, runs = tmp_path_factory.mktemp("untouched"), {}

    def run_of(ranks, transport, mode="exact replicas"):
        key = f"{mode}-{ranks}-{transport}"
        if key not in runs:
            runs[key] = folder / key.replace(" ", "_")
            life = lives.train(options_in(mode, ranks, runs[key], transport), ranks=ranks)
            assert life.statuses == [0] * ranks, life.said
        return runs[key]

    return run_of


def check_lost(lives, run, ranks, transport, fault, step, *, saved=True, mode="exact replicas"):
    """One rank dies; the run goes on after a step, from what the others wrote. Returns what was said."""
    options = [*options_in(mode, ranks, run, transport), "--resume", "auto"]
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


def check_same(run, untouched, step):
    """The model is that of the untouched run, and so are its logs, but for the line that was under way."""
    assert model_of(run) == model_of(untouched)
    under_way = -(-(step + 1) // 5) * 5
    mine, theirs = (
        [{**line, "hit_rate": 0} for line in lines_of(each, "metrics.jsonl") if line["step"] != under_way]
        for each in (run, untouched)
    )
    assert mine == theirs


IN_MODES = [
    *product(["dynamic"], ["engine.fetched@8", "loop.backward@8", "engine.push@8", "loop.step@7", "engine.push@30"]),
    *product(["dynamic, demoting"], ["engine.fetched@8", "engine.push@8", "loop.step@7", "engine.push@30"]),
    *product(["dynamic, ages", "dynamic, incremental, sketch"], ["loop.backward@8", "loop.step@7"]),
    *product(["tensor-train"], ["loop.backward@8", "engine.push@8", "engine.push@30"]),
    *product(["pipelined, depth 1", "pipelined, depth 2"], ["loop.backward@8", "loop.backward@30"]),
    ("pipelined, micro-batches", "loop.backward@15"),
    *product(["dynamic, pipelined, asynchronous"], ["loop.backward@8", "loop.backward@30"]),
    ("dynamic, demoting, pipelined, incremental, asynchronous", "loop.backward@8"),
    *product(["dropout", "running means"], ["loop.backward@8", "engine.push@8"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode, point", IN_MODES)
def test_no_step_is_lost_in_any_mode(lives, untouched, tmp_path, mode, point, ranks):
    name, _, number = point.partition("@")
    step = (int(number) + 1) // 2 - 1 if "micro" in mode else int(number) - (name != "loop.step")
    transport = TRANSPORTS[(step + ranks // 2) % 2]
    check_lost(lives, tmp_path / "run", ranks, transport, f"{point},rank{ranks - 1}", step, mode=mode)
    check_same(tmp_path / "run", untouched(ranks, transport, mode), step)


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
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["pipelined, depth 2", "dynamic, demoting, pipelined, incremental, asynchronous"])
@pytest.mark.parametrize("point", ["engine.push@8", "loop.step@7", "loop.step@9"])
def test_wherever_a_pipeline_loses_a_rank_the_model_stays(lives, untouched, tmp_path, point, mode, ranks):
    """Threads of the other ranks may be before an update or behind it, so that nobody knows whether they may write."""
    run, transport = tmp_path / "run", TRANSPORTS[ranks // 4]
    options = [*options_in(mode, ranks, run, transport), "--resume", "auto"]
    life = lives.train(options, f"{point},rank{ranks - 1}=kill", ranks=ranks)
    assert life.statuses.count(-9) == 1, life.said
    steps = Series(run / "checkpoints").steps()
    assert set(steps) <= {7, 8, 9}
    assert ("loses no step" if steps else "no checkpoint by ranks") in life.said
    assert not any(lives.train(options, ranks=ranks).statuses)
    check_same(run, untouched(ranks, transport, mode), steps[0] if steps else -1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dynamic, demoting", "dynamic, ages", "dynamic, incremental, sketch", "tensor-train"])
def test_what_is_written_is_the_checkpoint_of_that_step(lives, tmp_path, mode):
    """File by file: dynamic tables and cores are written by rank 0 either way."""
    faults = {"lost": ("loop.backward@8,rank1=kill", []), "whole": ("", ["checkpoint.every_steps=7", "train.steps=7"])}
    found = {}
    for name, (fault, more) in faults.items():
        lives.train([*options_in(mode, 2, tmp_path / name, "collective"), *more], fault, ranks=2)
        manifest = read_manifest(Series(tmp_path / name / "checkpoints").at(7))
        files = [file for file in manifest.checksums if "core" in file or ("dynamic" in mode and file != DENSE)]
        found[name] = {file: manifest.checksums[file].blocks for file in files}
    assert len(found["lost"]) > 5
    assert found["lost"] == found["whole"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dynamic, demoting", "tensor-train"])
def test_a_run_that_loses_a_rank_again_and_again_loses_no_step(lives, untouched, tmp_path, mode):
    run = tmp_path / "run"
    options = [*options_in(mode, 2, run, "collective"), "--resume", "auto"]
    for number, (step, victim) in enumerate([(7, 0), (8, 1), (11, 0)]):
        since = step - [0, 7, 8][number]
        life = lives.train(options, f"loop.backward@{since + 1},rank{victim}=kill", ranks=2)
        assert f"checkpoint after step {step} by ranks [{1 - victim}]" in life.said
    assert not any(lives.train(options, ranks=2).statuses)
    assert model_of(run) == model_of(untouched(2, "collective", mode))


@pytest.mark.slow
def test_running_means_of_rank_0_are_lost_with_it(lives, untouched, tmp_path):
    run = tmp_path / "run"
    said = check_lost(lives, run, 2, "collective", "loop.backward@8,rank0", 0, saved=False, mode="running means")
    assert "no checkpoint by ranks [1]: rank 1 has running means of its own, and a checkpoint has those of" in said
    assert model_of(run) == model_of(untouched(2, "collective", "running means"))


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
