"""Disks that are full, or folders that are gone, while a run trains: nothing trained is lost."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rowmesh._support.faults import arm
from rowmesh.checkpoint import CheckpointError, CheckpointWriteError
from rowmesh.cli.__main__ import main
from rowmesh.errors import RowmeshError
from rowmesh.run import saving
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.config import RunConfig
from rowmesh.run.resolve import resolve
from rowmesh.run.run_folder import RunFolder
from tests.run import conftest as shared
from tests.support.commands import run_command

clicks, config_file, command = shared.clicks, shared.config_file, shared.command
_one_thread = shared._one_thread

WRITES = ["run.settle", "checkpoint.prepare", "checkpoint.write_rows", "checkpoint.write_dense", "checkpoint.publish"]


def train(config_file, *options, **arguments):
    return run_training(resolve(config_file, ["train.steps=4", "train.log_every=1", *options]), **arguments)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("point", WRITES)
def test_a_model_that_finds_no_room_is_written_when_there_is(config_file, tmp_path, capsys, point):
    expected = train(config_file, f"run.folder={tmp_path / 'other'}")
    with arm(f"{point}@1=ENOSPC; {point}@2=ENOSPC"):
        assert train(config_file) == expected
    out = capsys.readouterr().out
    assert out.count("cannot be written") == 1, out
    assert "No space left on device" in out
    assert "tried again for 3,600 s (run.retry_s); Ctrl-C gives it up" in out
    assert run_evaluation(tmp_path / "run") == expected


def test_a_model_that_finds_no_room_goes_elsewhere(config_file, tmp_path, capsys):
    with arm("checkpoint.write_rows@1=ENOSPC"):
        metrics = train(config_file, f"run.fallback_folder={tmp_path / 'large'}")
    place = tmp_path / "large" / "run"
    out = capsys.readouterr().out
    assert "model     goes to run.fallback_folder: rank 0 cannot write the checkpoint in" in out
    assert f"model     {place}/model, after 4 steps" in out
    assert not (tmp_path / "run" / "model").exists()
    assert run_evaluation(place) == metrics
    assert (place / "evaluation" / "test.json").exists()
    with arm("checkpoint.write_rows@1=ENOSPC"):  # what is there is not replaced
        train(config_file, f"run.fallback_folder={tmp_path / 'large'}", overwrite=True)
    assert RunFolder(tmp_path / "large" / "run-2").is_whole


def test_a_model_whose_place_is_taken_goes_elsewhere(config_file, tmp_path, capsys):
    place = tmp_path / "run" / "model"
    with arm(point="run.saving", action=lambda: None if place.exists() else place.write_text("mine")):
        train(config_file, f"run.fallback_folder={tmp_path / 'large'}")
    assert "Not a directory" in capsys.readouterr().out
    assert place.read_text() == "mine"
    assert RunFolder(tmp_path / "large" / "run").is_whole


def test_a_full_fallback_is_tried_again_too_and_leaves_nothing_in_the_end(config_file, tmp_path):
    options = [f"run.fallback_folder={tmp_path / 'large'}", "run.retry_s=0.01"]
    with (
        arm("checkpoint.write_dense=ENOSPC"),
        pytest.raises(
            CheckpointError, match=r"the model is not written, tried for 0.01 s.*/run/model.*/large/run/model"
        ),
    ):
        train(config_file, *options)
    assert list((tmp_path / "large").iterdir()) == []
    with arm("; ".join(f"checkpoint.write_dense@{number}=ENOSPC" for number in (1, 2, 3))):
        train(config_file, *options, overwrite=True)
    assert RunFolder(tmp_path / "large" / "run").is_whole


def test_without_patience_a_full_disk_ends_a_run(config_file, tmp_path):
    with arm("checkpoint.publish=ENOSPC"), pytest.raises(CheckpointError, match="the model is not written: rank 0"):
        train(config_file, "run.retry_s=0")
    assert records(tmp_path / "run" / "metrics.jsonl")


def test_a_mistake_is_not_waited_for(config_file):
    with arm("checkpoint.write_rows=raise"), pytest.raises(CheckpointError, match="injected fault"):
        train(config_file)


def train_with_faults(mesh, arguments, faults):
    """A command on one of several ranks, of which those that are named find no room."""
    with arm(faults.get(mesh.rank, "")):
        return run_command(mesh, arguments)


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_wait_where_one_finds_no_room(config_file, tmp_path, ranks, rank):
    arguments = ["train", str(config_file), "train.steps=4"]
    faults = {rank: "checkpoint.write_rows@2=ENOSPC; checkpoint.write_rows@3=EDQUOT"}
    ends = ranks.run(train_with_faults, arguments, faults, world_size=2)
    assert [end.status for end in ends] == [0, 0], ends
    assert f"rank {rank} cannot write the checkpoint" in ends[0].out
    assert run_evaluation(tmp_path / "run").samples == 501
    assert RunFolder(tmp_path / "run").is_whole


def test_rank_0_looks_for_room_more_often_than_the_others_lose_patience(monkeypatch):
    """They wait in a collective meanwhile, for `timeout_s`."""
    clock, sleeps = [0.0], []

    def sleep(seconds):
        sleeps.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    patience = saving._Patience(RunConfig(retry_s=60.0), lambda text: None, timeout_s=2.0)
    reasons = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/model")]
    while clock[0] < 60.0:
        patience.wait(reasons)
    with pytest.raises(CheckpointWriteError, match=r"tried for 60 s .*No space left"):
        patience.wait(reasons)
    assert sleeps[:3] == [0.1, 0.2, 0.4]
    assert max(sleeps) == 0.5
    assert sum(sleeps) == pytest.approx(60.0)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_a_terminal_ends_the_wait(config_file, capsys):
    with (
        arm("checkpoint.prepare=ENOSPC"),
        arm(point="run.wait", action=lambda: signal.raise_signal(signal.SIGINT)),
        pytest.raises(SystemExit, match="130"),
    ):
        main(["train", str(config_file), "train.steps=1"])
    said = capsys.readouterr()
    assert "Ctrl-C gives it up" in said.out
    assert said.err == "rowmesh: interrupted\n"


def test_lines_that_find_no_room_do_not_end_a_run(config_file, tmp_path, capsys):
    with arm("; ".join(f"observe.write@{number}=ENOSPC" for number in (3, 4, 5))):
        train(config_file, 'run.trackers=["tensorboard"]')
    out = capsys.readouterr().out
    assert "training goes on without" in out
    assert "records before are lost" in out
    lines = [len(records(tmp_path / "run" / f"{name}.jsonl")) for name in ("metrics", "counters")]
    assert sum(lines) in range(4 + 4 - 3, 4 + 4 + 1)  # some of those that are lost are of TensorBoard
    assert run_evaluation(tmp_path / "run").samples == 501


def test_a_trace_that_cannot_be_written_does_not_end_a_run(config_file, tmp_path, capsys):
    path = tmp_path / "run" / "trace.json"
    with arm(point="observe.write", action=lambda: path.mkdir(exist_ok=True)):
        train(config_file, "pipeline.trace=true", "pipeline.depth=1")
    assert f"cannot write {path}: Is a directory; there is no trace of this run" in capsys.readouterr().out
    assert RunFolder(tmp_path / "run").is_whole


@pytest.mark.parametrize("what", ["removed", "renamed", "configuration removed"])
def test_a_folder_that_is_gone_at_the_end_is_made_again(config_file, tmp_path, capsys, what):
    run = tmp_path / "run"

    def strike():
        if what == "removed":
            shutil.rmtree(run)
        elif what == "renamed":
            run.rename(tmp_path / "renamed")
        else:
            (run / "config.toml").unlink()
            (run / "plan.json").unlink()

    struck = []
    with arm(point="run.settle", action=lambda: struck or (struck.append(strike()), None)):
        metrics = train(config_file)
    out = capsys.readouterr().out
    assert ("written again" if what == "configuration removed" else "was removed or renamed while the run") in out
    assert run_evaluation(run) == metrics
    assert not (run / ".lock").exists()
    with pytest.raises(RowmeshError, match="holds a run"):
        train(config_file)


@pytest.mark.parametrize(
    "faults", ["checkpoint.write_rows=ENOSPC", "checkpoint.published=ENOSPC", "observe.write=raise", "run.settle=EIO"]
)
def test_the_former_model_stays_where_the_new_one_fails(config_file, tmp_path, faults):
    former = train(config_file, "tables.dim=3")
    with arm(faults), pytest.raises((RowmeshError, RuntimeError)):
        train(config_file, "train.seed=5", "run.retry_s=0", overwrite=True)
    assert resolve(tmp_path / "run" / "config.toml").tables.dim == 3
    assert run_evaluation(tmp_path / "run") == former
    assert len(records(tmp_path / "run" / "metrics.jsonl")) == 4
    later = train(config_file, "train.seed=5", overwrite=True)
    assert run_evaluation(tmp_path / "run") == later != former
    assert not (tmp_path / "run" / "unfinished").exists()


@pytest.mark.parametrize("point", ["run.settle@2", "run.exchange@4"])
def test_a_run_takes_the_place_of_another_when_the_disk_lets_it(config_file, tmp_path, point):
    train(config_file, "tables.dim=3")
    with arm(f"{point}=ENOSPC"):
        metrics = train(config_file, overwrite=True)
    assert run_evaluation(tmp_path / "run") == metrics
    assert not (tmp_path / "run" / "unfinished").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        *("observe.write@3", "checkpoint.write_rows@2", "checkpoint.publish", "checkpoint.published"),
        *("run.settle@2", "run.exchange@4", "run.exchanged"),
    ],
)
def test_a_killed_run_leaves_one_that_can_be_loaded(config_file, tmp_path, point):
    former = train(config_file, "tables.dim=3")
    done = subprocess.run(
        [sys.executable, "-m", "rowmesh.cli", "train", str(config_file), "train.steps=4", "--overwrite"],
        env=os.environ | {"ROWMESH_FAULTS": f"{point}=kill", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    found = run_evaluation(tmp_path / "run")
    assert (found == former) == ("run.exchange" not in point)
    train(config_file, overwrite=True)
    assert not (tmp_path / "run" / "unfinished").exists()


def test_too_little_room_is_said_and_takes_nothing_away(config_file, tmp_path, capsys, monkeypatch):
    train(config_file)
    before = sorted(path for path in (tmp_path / "run").rglob("*") if "evaluation" not in path.parts)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 12})())
    with arm("checkpoint.write_rows=ENOSPC"), pytest.raises(CheckpointError):
        train(config_file, "run.retry_s=0", overwrite=True)
    assert "the model needs" in capsys.readouterr().out
    left = {path for path in (tmp_path / "run").rglob("*") if "unfinished" not in path.parts}
    assert left >= set(before)
    assert Path(tmp_path / "run" / "unfinished" / "metrics.jsonl").exists()
