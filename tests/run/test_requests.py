"""Signals and clocks: what one rank asks for, all ranks do after the same step."""

import signal
import threading

import pytest

from rowmesh._support.faults import arm
from rowmesh.checkpoint.series import Series
from rowmesh.errors import Preempted, Terminated
from rowmesh.mesh import Mesh
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.support.killed_runs import model_of, train_once, train_untouched

SELDOM = "checkpoint.every_steps=1000"
PREEMPTED, TERMINATED = "Preempted: 75", "Terminated: 143"
TIERED = [
    "tables.storage=tiered",
    "tiers.fast_rows=140",
    "tiers.fast_share=0.01",
    "data.batch_size=64",
    "train.steps=16",
]
AVERAGED = ["parallel.replicas=2", "parallel.synchronization=average", "parallel.sync_every=4"]


def steps_of(run):
    return Series(run / "checkpoints").steps()


def train(config_file, *options, resume="no"):
    return run_training(resolve(config_file, ["train.steps=6", "train.log_every=2", SELDOM, *options]), resume=resume)


@pytest.mark.parametrize(
    "options, fault, step",
    [
        ([], "loop.step@4,rank1=SIGUSR1", 5),
        pytest.param([], "loop.step@16,rank1=SIGTERM", 16, marks=pytest.mark.slow),  # the last
        (["parallel.transport=collective", "pipeline.depth=2"], "loop.step@4,rank0=SIGTERM", 5),
        pytest.param(
            ["tables.storage=tiered", "tiers.fast_rows=300"], "loop.step@4=SIGTERM", 5, marks=pytest.mark.slow
        ),
        pytest.param(
            ["tables.storage=tiered", "tiers.fast_rows=300", "parallel.transport=collective", "pipeline.depth=2"],
            "loop.step@4,rank1=SIGTERM",
            5,
            marks=pytest.mark.slow,
        ),
        pytest.param(AVERAGED, "loop.step@5,rank1=SIGTERM", 8, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(ranks, config_file, tmp_path, options, fault, step):
    options = [*options, SELDOM]
    train_untouched(ranks, config_file, [*options, f"run.folder={tmp_path / 'untouched'}"], 2)
    assert ranks.run(train_once, config_file, options, "no", fault, world_size=2) == [PREEMPTED] * 2
    assert steps_of(tmp_path / "run") == [step]
    assert ranks.run(train_once, config_file, options, "latest", "", world_size=2) == ["", ""]
    assert model_of(tmp_path / "run") == model_of(tmp_path / "untouched")


def test_a_signal_says_what_to_do(config_file, tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with arm("loop.step@3=SIGTERM; loop.step@3=SIGTERM"), pytest.raises(Preempted):  # a launcher sends it too
        train(config_file)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    said = "stopped   by SIGTERM after step 4; the same command with --resume goes on from there"
    assert said in capsys.readouterr().out
    assert steps_of(tmp_path / "run") == [4]
    assert train(config_file, resume="latest")


def test_where_no_checkpoint_can_be_written_the_last_stays(config_file, tmp_path, capsys):
    faults = "loop.step@4=SIGTERM; checkpoint.publish@2=ENOSPC"
    with arm(faults), pytest.raises(Terminated, match="143"):
        train(config_file, "checkpoint.every_steps=3")
    out = capsys.readouterr().out
    assert "the checkpoint after step 5 cannot be written, the last is of step 3" in out
    assert "stopped   by SIGTERM after step 5 without a checkpoint of it; --resume goes on from step 3" in out
    assert steps_of(tmp_path / "run") == [3]


def test_when_the_time_is_over_the_run_ends_where_it_is(config_file, tmp_path):
    def hang():
        signal.raise_signal(signal.SIGTERM)
        assert not threading.Event().wait(60)
        raise AssertionError("nothing ended it")

    with arm(point="loop.step", action=hang), pytest.raises(Terminated, match="143"):
        train(config_file, "checkpoint.grace_s=0.01")
    assert steps_of(tmp_path / "run") == []


def test_where_a_rank_has_died_a_signal_ends_the_run_at_once(config_file, monkeypatch):
    monkeypatch.setattr(Mesh, "dead_ranks", lambda self: [0])
    with arm("loop.step@1=SIGTERM"), pytest.raises(RuntimeError, match="died while training"):
        train(config_file)


def test_without_checkpoints_signals_are_left_alone(config_file):
    got = []
    before = signal.signal(signal.SIGTERM, lambda *of: got.append(of[0]))
    try:
        with arm("loop.step@1=SIGTERM"):
            assert train(config_file, "checkpoint.every_steps=0")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]


def test_the_clock_of_rank_0_asks_for_checkpoints(ranks, config_file, tmp_path):
    options = ["train.steps=4", "checkpoint.every_minutes=1e-9", "checkpoint.keep_last=9"]
    train_untouched(ranks, config_file, options, 2)
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
