"""Runs with incremental checkpoints: killed and resumed they end as untouched ones, and say which are increments."""

import shutil

import pytest

from rowmesh._support.faults import arm
from rowmesh.checkpoint import read_manifest
from rowmesh.checkpoint.series import Series
from rowmesh.cli.__main__ import main
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.run.test_resume import MODES
from tests.support.killed_runs import model_of, train_killed, train_untouched

STEPS = ["train.steps=10", "checkpoint.every_steps=2", "checkpoint.keep_last=9", "tiers.fast_rows=300"]
INCREMENTAL = "checkpoint.incremental=2"


def series(tmp_path):
    return Series(tmp_path / "run" / "checkpoints")


def depths(tmp_path):
    found = series(tmp_path)
    return [read_manifest(found.at(step)).depth for step in found.steps()]


@pytest.mark.parametrize(
    "mode, world_size, more",
    [
        ("pipelined", 2, ["checkpoint.asynchronous=true"]),
        ("tiered", 1, []),
        ("exact replicas", 2, []),
        ("averaged replicas", 2, ["parallel.sync_every=2"]),
        *(
            pytest.param(mode, world_size, more, marks=pytest.mark.slow)
            for world_size in (1, 2)
            for mode in ("plain", "one-sided", "tiered, pipelined", "copies", "cores", "adam", "early stopping")
            for more in ([], ["checkpoint.asynchronous=true"])
        ),
    ],
)
def test_a_killed_run_goes_on_from_an_increment(ranks, config_file, tmp_path, mode, world_size, more):
    options = [*MODES[mode], *STEPS]
    own = [option for option in more if not option.startswith("checkpoint.")]
    train_untouched(ranks, config_file, [*options, *own, f"run.folder={tmp_path / 'untouched'}"], world_size)
    kills = ["loop.step@7=raise", "loop.step@2=raise"]
    train_killed(ranks, config_file, [*options, INCREMENTAL, *more], world_size, kills)
    assert model_of(tmp_path / "run") == model_of(tmp_path / "untouched")
    assert max(depths(tmp_path)) > 0


def train(config_file, *options, resume="no"):
    return run_training(resolve(config_file, [*STEPS, INCREMENTAL, *options]), resume=resume)


def test_a_chain_ends_after_so_many(config_file, tmp_path):
    train(config_file)
    assert depths(tmp_path) == [0, 1, 2, 0, 1]


def test_what_the_last_one_needs_stays(config_file, tmp_path):
    train(config_file, "checkpoint.keep_last=1", "train.steps=6")
    assert series(tmp_path).steps() == [2, 4, 6]


def test_after_one_that_could_not_be_written_the_next_is_full(config_file, tmp_path):
    with arm("checkpoint.publish@2=ENOSPC"):
        train(config_file, "train.steps=8")
    assert series(tmp_path).steps() == [2, 6, 8]
    assert depths(tmp_path) == [0, 0, 1]


def test_a_damaged_parent_costs_what_adds_to_it(config_file, tmp_path, capsys):
    with arm("loop.step@9=raise"), pytest.raises(RuntimeError):
        train(config_file, "checkpoint.incremental=3")
    found = series(tmp_path)
    shutil.rmtree(found.at(6))
    train(config_file, resume="latest")
    out = capsys.readouterr().out
    assert "resume    not from step 8: " in out
    assert "is an increment of step 6, and " in out
    assert found.steps() == [2, 4, 6, 8, 10]


def test_commands_know_chains(config_file, tmp_path, capsys):
    train(config_file, "train.steps=6")
    run, found = tmp_path / "run", series(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(["checkpoint", *map(str, arguments)])
        return stop.value.code, "".join(capsys.readouterr())

    status, out = call("list", run)
    assert status == 0
    kinds = (" full ", " adds to 2 ", " adds to 4 ")
    assert all(kind in line for kind, line in zip(kinds, out.splitlines(), strict=True))
    assert "adds to     4, 2, which is full" in call("show", run)[1]
    assert call("verify", run)[0] == 0
    assert "has no checkpoint after step 3, only: step-000000002" in call("compact", run, 3)[1]
    assert "was a full checkpoint before" in call("compact", run, 2)[1]
    assert "is a full checkpoint now" in call("compact", run, 4)[1]
    assert depths(tmp_path) == [0, 0, 2]
    shutil.rmtree(found.at(2))
    assert call("verify", run)[0] == 0
    path = next(found.at(4).glob("*/dense.pt"))
    path.write_bytes(path.read_bytes()[:-1])
    status, out = call("verify", run)
    assert status == 2
    assert "it adds to step-000000004, which is damaged: " in out
