"""What may be wrong where a run is resumed: files of checkpoints, other models, another run in the folder, clocks."""

import errno
import itertools
import os
import re
import shutil

import pytest

from rowmesh import checkpoint
from rowmesh._support import json_lines
from rowmesh._support.faults import arm
from rowmesh.checkpoint.manifest import MANIFEST
from rowmesh.checkpoint.series import BEST, Series
from rowmesh.errors import CheckpointError, ConfigurationError, RowmeshError, UnreadableError
from rowmesh.run import checkpoints
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.support.killed_runs import model_of
from tests.support.lives import Lives
from tests.support.modes import options_of, prepare_job
from tests.support.prepared import change_manifest

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


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_checkpoint_that_the_system_refuses_to_read_stays(config_file, tmp_path, monkeypatch, number):
    killed(config_file, 5)
    series, opened = Series(tmp_path / "run" / "checkpoints"), os.open

    def refuse(path, *arguments, **options):
        if str(path).startswith(str(series.at(4))) and str(path).endswith(".npy"):
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UnreadableError, match=rf"{os.strerror(number)}.*start again"):
        train(config_file, resume="auto")
    monkeypatch.undo()
    assert series.steps() == [2, 4]
    assert train(config_file, resume="auto")


def of_a_later_version(series):
    change_manifest(series.at(4) / MANIFEST, lambda values: values.update(format=99))
    return r"step-000000004.* has format 99"


def without_an_optimizer_state(series):
    """Whole, and of no use to this model."""
    change_manifest(series.at(4) / MANIFEST, lambda values: values["tables"]["C1"]["parts"][0]["files"].pop("sum"))
    return r"cannot go on from .*step-000000004, .* has no state 'sum'. No checkpoint was removed"


@pytest.mark.parametrize("change", [of_a_later_version, without_an_optimizer_state])
def test_a_checkpoint_that_is_not_damaged_and_does_not_fit_stays(config_file, tmp_path, change):
    killed(config_file, 5)
    series = Series(tmp_path / "run" / "checkpoints")
    said = change(series)
    with pytest.raises(CheckpointError, match=said):
        train(config_file, resume="auto")
    assert series.steps() == [2, 4]


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


@pytest.mark.parametrize("step", [1, 2])
def test_what_no_run_wrote_stays_in_the_folder_of_checkpoints(config_file, tmp_path, step):
    series = Series(tmp_path / "mine")
    series.at(step).mkdir(parents=True)
    (series.at(step) / "precious.csv").write_text("1")
    options = [f"checkpoint.folder={series.folder}", "checkpoint.keep_last=1"]
    train(config_file, *options)
    train(config_file, *options, overwrite=True)
    assert series.steps() == [6]
    assert [path.name for path in series.at(step).iterdir()] == ["precious.csv"]


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
