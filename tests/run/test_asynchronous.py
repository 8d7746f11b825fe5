"""Checkpoints that are written while a run trains are those that it would have stopped for."""

import re
import signal
import threading

import pytest

from rowmesh._support.faults import arm
from rowmesh.checkpoint.series import Series
from rowmesh.errors import CheckpointWriteError, Preempted
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.run.test_resume import MODES
from tests.support.killed_runs import model_of, train_killed, train_once, train_untouched
from tests.support.slowed import slowed, sums_of

ASYNCHRONOUS = "checkpoint.asynchronous=true"
STEPS = ["train.steps=10", "checkpoint.every_steps=3", "checkpoint.keep_last=9", "tiers.fast_rows=300"]


def train_slowed(mesh, config, options):
    """Trains on a rank with writers that read a shard a step; returns what failed, and how many shards waited."""
    with slowed("snapshot.copied", shard_rows=64) as gate:
        failure = train_once(mesh, config, options, "no", "")
    assert not any(thread.name.startswith("rowmesh checkpoint") for thread in threading.enumerate())
    return failure, gate.num_slowed


def train(config_file, *options, resume="no"):
    return run_training(resolve(config_file, [*STEPS, ASYNCHRONOUS, *options]), resume=resume)


def series(run):
    return Series(run / "checkpoints")


@pytest.mark.parametrize(
    "mode, world_size",
    [
        ("pipelined", 2),
        ("tiered, pipelined", 1),
        ("copies", 2),  # the plan migrates while one is written
        ("exact replicas", 2),
        ("averaged replicas", 2),
        *(
            pytest.param(mode, world_size, marks=pytest.mark.slow)
            for world_size in (1, 2)
            for mode in ("plain", "one-sided", "pipelined, one-sided", "tiered", "cores", "early stopping", "adam")
        ),
    ],
)
def test_checkpoints_are_those_of_a_run_that_stops_for_them(ranks, config_file, tmp_path, mode, world_size):
    options = [*MODES[mode], *STEPS]
    train_untouched(ranks, config_file, [*options, f"run.folder={tmp_path / 'sync'}"], world_size)
    found = ranks.run(
        train_slowed, config_file, [*options, ASYNCHRONOUS, f"run.folder={tmp_path / 'async'}"], world_size=world_size
    )
    assert [failure for failure, _ in found] == [""] * world_size
    assert all(num_slowed >= 3 for _, num_slowed in found)
    expected = series(tmp_path / "sync")
    assert series(tmp_path / "async").steps() == expected.steps()
    for step in expected.steps():
        assert sums_of(series(tmp_path / "async").at(step)) == sums_of(expected.at(step))
    assert model_of(tmp_path / "async") == model_of(tmp_path / "sync")


def test_a_run_that_fails_amid_a_write_goes_on_from_there(ranks, config_file, tmp_path):
    options = [*STEPS, ASYNCHRONOUS]
    train_untouched(ranks, config_file, [*options, f"run.folder={tmp_path / 'untouched'}"], 2)
    train_killed(ranks, config_file, options, 2, ["loop.step@7=raise", "loop.step@3=raise"])
    assert model_of(tmp_path / "run") == model_of(tmp_path / "untouched")


@pytest.mark.parametrize("copy_bytes, is_short", [("0", True), ("auto", False), ("1000000000", False)])
def test_a_line_says_where_memory_for_copies_is_short(config_file, tmp_path, capsys, copy_bytes, is_short):
    with slowed("snapshot.read", shard_rows=64):
        train(config_file, f"checkpoint.copy_bytes={copy_bytes}")
    said = re.findall(
        r"s, (\S+ \S+) not copied at once \(checkpoint.copy_bytes\): steps saved [1-9]", capsys.readouterr().out
    )
    assert bool(said) == is_short
    assert series(tmp_path / "run").steps() == [3, 6, 9]


def test_steps_do_not_wait_while_older_ones_are_removed(config_file):
    threads: list[str] = []
    with arm(point="checkpoint.prune", action=lambda: threads.append(threading.current_thread().name)):
        assert train(config_file, "checkpoint.keep_last=1")
    assert threads
    assert set(threads) == {"rowmesh checkpoint"}


def test_a_full_disk_costs_the_checkpoint_alone(config_file, tmp_path, capsys):
    with arm("checkpoint.write_rows@13=ENOSPC"):
        train(config_file)
    out = capsys.readouterr().out
    assert "the checkpoint after step 6 cannot be written, the last is of step 3: " in out
    assert out.count("; training goes on") == 1
    assert series(tmp_path / "run").steps() == [3, 9]
    assert not (tmp_path / "run" / "checkpoints" / "step-000000006").exists()


def test_a_full_disk_ends_the_run_where_that_is_asked_for(config_file, tmp_path):
    steps = []
    with (
        arm("checkpoint.publish=ENOSPC"),
        arm(point="loop.step", action=lambda: steps.append(0)),
        pytest.raises(CheckpointWriteError, match=r"after step 3 cannot be written, there is none yet: .*is stop"),
    ):
        train(config_file, "checkpoint.on_failure=stop")
    assert len(steps) <= 10
    assert series(tmp_path / "run").steps() == []


def test_a_signal_waits_for_its_checkpoint(config_file, tmp_path):
    with slowed("snapshot.read"), arm("loop.step@4=SIGUSR1"), pytest.raises(Preempted):
        train(config_file)
    assert series(tmp_path / "run").steps() == [3, 5]
    assert train(config_file, resume="latest")


def test_a_signal_is_heeded_while_the_last_one_is_waited_for(config_file, tmp_path, capsys):
    """No step follows with which ranks could agree on it."""
    steps = []

    def signal_after_the_last_step():
        if len(steps) == 10:
            signal.raise_signal(signal.SIGTERM)

    with (
        slowed("snapshot.read"),
        arm(point="loop.step", action=lambda: steps.append(0)),
        arm(point="checkpoint.wait", action=signal_after_the_last_step),
        pytest.raises(Preempted),
    ):
        train(config_file)
    assert "stopped   by SIGTERM after step 10; the same command with --resume goes on" in capsys.readouterr().out
    assert series(tmp_path / "run").steps() == [3, 6, 9, 10]
    assert train(config_file, resume="latest")
