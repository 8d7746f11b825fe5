"""What may be wrong where a run is resumed: files of checkpoints, other models, another run in the folder, clocks."""

import errno
import itertools
import os
import re
import shutil

import pytest

from rowmesh import checkpoint
from rowmesh.checkpoint.manifest import MANIFEST
from rowmesh.checkpoint.series import BEST, Series
from rowmesh.errors import ConfigurationError, RowmeshError, UnreadableError
from rowmesh.faults import arm
from rowmesh.observe import json_lines
from rowmesh.train import checkpoints
from rowmesh.train.commands import run_training
from rowmesh.train.resolve import resolve
from tests.support.killed_runs import model_of
from tests.support.lives import Lives
from tests.support.modes import options_of, prepare_job

SHORT = ["train.steps=6", "checkpoint.every_steps=2", "train.log_every=2"]


def train(config_file, *options, resume="no", **arguments):
    return run_training(resolve(config_file, [*SHORT, *options]), resume=resume, **arguments)


def killed(config_file, at, *options, resume="no"):
    with arm(f"loop.step@{at}=raise"), pytest.raises(RuntimeError, match="injected"):
        train(config_file, *options, resume=resume)


def files_of(folder):
    return folder / checkpoint.read_manifest(folder).folder


def swap(series):
    """Two files of one table and one size: the rows of another step."""
    older, newer = (files_of(series.at(step)) / "C1.0.values.npy" for step in (2, 4))
    assert older.stat().st_size == newer.stat().st_size
    shutil.copy(older, newer)


def swap_names(series):
    """Values and state of one table change places."""
    folder = files_of(series.at(4))
    values, state = folder / "C1.0.values.npy", next(folder.glob("C1.0.*sum*"))
    values.rename(folder / "between")
    state.rename(values)
    (folder / "between").rename(state)


def truncate(series):
    path = files_of(series.at(4)) / "C1.0.values.npy"
    os.truncate(path, path.stat().st_size - 4)


def remove(series):
    (files_of(series.at(4)) / "dense.pt").unlink()


def empty(series):
    (files_of(series.at(4)) / "C2.0.values.npy").write_bytes(b"")


def flip_a_bit_of_the_manifest(series):
    path = series.at(4) / MANIFEST
    path.write_bytes(path.read_bytes().replace(b'"tables"', b'"tablds"', 1))


@pytest.mark.parametrize("damage", [swap, swap_names, truncate, remove, empty, flip_a_bit_of_the_manifest])
def test_a_checkpoint_with_other_files_is_said_and_the_one_before_taken(config_file, tmp_path, capsys, damage):
    killed(config_file, 5)
    damage(Series(tmp_path / "run" / "checkpoints"))
    assert train(config_file, resume="auto")
    out = capsys.readouterr().out
    assert "resume    not from step 4: " in out
    assert "resume    after step 2 of 6" in out


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_best_model_is_found_before_training(config_file, tmp_path, capsys, damage):
    options = ["train.patience=3", "train.eval_every=1"]
    killed(config_file, 5, *options)
    best = Series(tmp_path / "run" / "checkpoints").at(4) / BEST
    path = files_of(best) / "C1.0.values.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()  # it may be linked
    path.write_bytes(content)
    if damage == "missing":
        shutil.rmtree(best)
    assert train(config_file, *options, resume="auto")
    assert "resume    not from step 4: " in capsys.readouterr().out


def test_a_checkpoint_that_the_system_refuses_to_read_stays(config_file, tmp_path, monkeypatch):
    killed(config_file, 5)
    series, opened = Series(tmp_path / "run" / "checkpoints"), os.open

    def refuse(path, *arguments, **options):
        if str(path).startswith(str(series.at(4))) and str(path).endswith(".npy"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnreadableError, match=r"Too many open files.*start again"):
        train(config_file, resume="auto")
    monkeypatch.undo()
    assert series.steps() == [2, 4]
    assert train(config_file, resume="auto")


@pytest.mark.parametrize(
    "option",
    ['tables.optimizer.name="sgd"', "tables.dim=8", 'optimizer.name="sgd"', "model.top=[32]", "tables.dtype=float64"],
)
def test_a_checkpoint_of_another_model_is_refused_with_the_key(config_file, tmp_path, option):
    killed(config_file, 3)
    with pytest.raises(ConfigurationError, match=f"another model: {option.partition('=')[0]}"):
        train(config_file, option, resume="auto")
    assert Series(tmp_path / "run" / "checkpoints").steps() == [2]


@pytest.mark.parametrize("resume", ["no", "auto"])
def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(config_file, tmp_path, resume):
    expected, refused = train(config_file, f"run.folder={tmp_path / 'other'}"), []

    def begin_another():
        with pytest.raises(RowmeshError, match="another run is writing") as error:
            train(config_file, resume=resume)
        refused.append(str(error.value))

    with arm(point="loop.step", action=once(begin_another)):
        assert train(config_file) == expected
    assert len(refused) == 1
    assert model_of(tmp_path / "run") == model_of(tmp_path / "other")


@pytest.mark.parametrize("resume", ["no", "auto"])
def test_two_runs_share_no_folder_of_checkpoints(config_file, tmp_path, resume):
    """The second one, begun before the first has a whole checkpoint, would remove what that writes."""
    shared, refused = f"checkpoint.folder={tmp_path / 'checkpoints'}", []

    def begin_another():
        with pytest.raises(RowmeshError, match=r"another run or loop has its .*checkpoints; wait for it"):
            train(config_file, shared, f"run.folder={tmp_path / 'other'}", resume=resume)
        refused.append((tmp_path / "other").exists())

    with arm(point="loop.step", action=once(begin_another)):
        assert train(config_file, shared)
    assert refused == [False]
    assert Series(tmp_path / "checkpoints").steps() == [4, 6]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


def test_a_folder_of_checkpoints_that_cannot_be_made_is_an_error_of_one_line(config_file, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RowmeshError, match=r"cannot write in checkpoint.folder .*file/checkpoints: Not a directory"):
        train(config_file, f"checkpoint.folder={tmp_path / 'file' / 'checkpoints'}")
    assert not (tmp_path / "run").exists()


def once(action):
    """Calls it the third time alone."""
    calls = itertools.count(1)
    return lambda: action() if next(calls) == 3 else None


def test_clocks_that_jump_change_nothing(config_file, tmp_path, monkeypatch):
    """The newest checkpoint is that of the last step, whatever its date; steps and logs have no use for the clock."""
    train(config_file, f"run.folder={tmp_path / 'other'}")
    years = itertools.count(2039, -1)
    for module in (checkpoints, json_lines):
        monkeypatch.setattr(module, "utc_text", lambda: f"{next(years)}-01-01T00:00:00+00:00")
    killed(config_file, 5, "checkpoint.every_minutes=1e6")
    series = Series(tmp_path / "run" / "checkpoints")
    os.utime(series.at(4), (0, 0))
    os.utime(series.at(2), (4e9, 4e9))
    train(config_file, "checkpoint.every_minutes=1e6", resume="latest")
    assert series.steps() == [4, 6]
    assert model_of(tmp_path / "run") == model_of(tmp_path / "other")


@pytest.mark.slow
def test_an_export_or_evaluation_that_is_killed_is_done_by_the_next(tmp_path):
    """By SIGKILL, which no `finally` survives."""
    config, run = prepare_job(tmp_path), tmp_path / "run"
    lives = Lives(config)
    assert lives.train(options_of("plain", 1, run), ranks=1).statuses == [0]
    model = model_of(run)
    for command, points in {
        ("export", run, "--out", tmp_path / "exported"): [
            "files.write",
            "files.folder.sync",
            "files.folder.renamed_old",
        ],
        ("evaluate", run, "--split", "validation"): ["evaluate.batch@2", "files.write"],
    }.items():
        words = [*map(str, command)]
        for point in points:
            assert lives.run(words, f"{point}=kill", ranks=1).statuses == [-9], point
        life = lives.run(words, ranks=1)
        assert life.statuses == [0], life
    assert model_of(run) == model
    assert (tmp_path / "exported" / "manifest.json").exists()
    names = {path.name for path in (*tmp_path.iterdir(), *run.iterdir(), *(run / "evaluation").iterdir())}
    assert not [name for name in names if name.startswith(".exported") or name.endswith(".old")], names


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, point, where",
    [
        ("plain", "loop.step@8", "while exchanging counts"),
        ("pipelined, depth 2", "loop.step@8", r"in stage '\w+' of batch \d+"),
        ("plain", "checkpoint.sync@2", "while writing a checkpoint"),
        ("asynchronous", "checkpoint.sync@10", "while writing a checkpoint"),
    ],
)
def test_a_rank_that_is_stopped_for_ever_is_named(tmp_path, mode, point, where):
    config, run = prepare_job(tmp_path), tmp_path / "run"
    options = [*options_of(mode, 2, run, "collective"), "checkpoint.every_steps=3", "parallel.timeout_s=2"]
    lives = Lives(config)
    life = lives.run(["train", str(config), *options], f"{point},rank1=stop", ranks=2, grace_s=1.0)
    assert life.statuses == [2, -9]
    said = " ".join(life.said.split())
    assert "waited in vain for rank 1 (process" in said
    assert ", stopped: `kill -CONT" in said
    assert re.search(where, said), said
    assert lives.train([*options, "--resume"], ranks=2).statuses == [0, 0]
