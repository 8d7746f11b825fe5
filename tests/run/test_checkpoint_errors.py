"""A checkpoint of a run that cannot be written, for whatever reason: `checkpoint.on_failure` says what comes of it."""

import errno
import os
import time
from types import SimpleNamespace

import pytest

from rowmesh import EmbeddingCollection, TableSpec
from rowmesh._support.faults import arm
from rowmesh._support.files import advice
from rowmesh.checkpoint.series import Series
from rowmesh.errors import CheckpointWriteError
from rowmesh.mesh import Mesh
from rowmesh.run.checkpoints import Checkpoints
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from rowmesh.run.run_folder import RunFolder

NUMBERS = sorted({*advice._ADVICE, *advice._FINAL})
POINTS = ["checkpoint.begin", "checkpoint.prepare", "checkpoint.write_dense", "checkpoint.sync", "checkpoint.publish"]
ERRORS = {
    **{errno.errorcode[number]: OSError(number, os.strerror(number)) for number in NUMBERS},
    "MemoryError": MemoryError(),
    "KeyError": KeyError("of rowmesh"),
}


def checkpoints_of(config_file, tmp_path, lines, *options):
    """Of a run whose loop is this test."""
    config = resolve(config_file, ["checkpoint.every_steps=1", *options])
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
    data = SimpleNamespace(place="", identity="")
    job = SimpleNamespace(config=config, mesh=Mesh(), embeddings=embeddings, data=data)
    (tmp_path / "run").mkdir(exist_ok=True)
    return Checkpoints(job, RunFolder(tmp_path / "run"), lines.append)  # pyright: ignore[reportArgumentType]


def fail_with(error):
    raise error


def write_and_poll(checkpoints, step):
    """Whether the loop is told that the run is to stop."""
    checkpoints.write(step, {}, has_best=False)
    while checkpoints._writer.under_way is not None and not checkpoints._writer.is_done:
        time.sleep(0.001)
    return checkpoints.poll()


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize("point", POINTS)
def test_errors_of_every_kind_are_a_line_each_and_training_goes_on(config_file, tmp_path, point, asynchronous):
    lines = []
    errors = {name: error for name, error in ERRORS.items() if point != "checkpoint.begin" or name != "KeyError"}
    with checkpoints_of(config_file, tmp_path, lines, f"checkpoint.asynchronous={asynchronous}") as checkpoints:
        for step, (name, error) in enumerate(errors.items(), start=1):
            with arm(point=point, action=lambda error=error: fail_with(error)):
                assert not write_and_poll(checkpoints, step)
            reason = str(error) if name == "KeyError" else advice.as_refusal(error).strerror
            assert len(lines) == step
            assert f"checkpoint after step {step} cannot be written, there is none yet: " in lines[-1]
            assert f"{reason}" in lines[-1]
            assert lines[-1].endswith("; training goes on")
        assert Series(tmp_path / "run" / "checkpoints").steps() == []
        assert not write_and_poll(checkpoints, step + 1)
        assert checkpoints.last == step + 1


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_every_kind_end_the_run_where_that_is_asked_for(config_file, tmp_path, name, asynchronous):
    options = ["checkpoint.on_failure=stop", f"checkpoint.asynchronous={asynchronous}"]
    with checkpoints_of(config_file, tmp_path, [], *options) as checkpoints:
        with arm(point="checkpoint.prepare", action=lambda: fail_with(ERRORS[name])):
            if asynchronous == "true":
                assert write_and_poll(checkpoints, 1)
            call = checkpoints.wait if asynchronous == "true" else lambda: write_and_poll(checkpoints, 1)
            with pytest.raises(CheckpointWriteError, match=r"after step 1 cannot be .*on_failure is stop"):
                call()
        assert not write_and_poll(checkpoints, 2)


def a_file(folder):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("mine")


def a_file_in_place_of_all(folder):
    a_file(folder.parent)


def a_foreign_manifest(folder):
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"name": "mine"}')


def a_link_that_leads_nowhere(folder):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to("nowhere")


@pytest.mark.parametrize("asynchronous", ["false", "true"])
@pytest.mark.parametrize("obstacle", [a_file, a_file_in_place_of_all, a_foreign_manifest, a_link_that_leads_nowhere])
def test_what_is_in_the_way_stays_and_ends_no_run(config_file, tmp_path, obstacle, asynchronous, capsys):
    series, seen = Series(tmp_path / "elsewhere"), []

    def put():
        if not seen:
            obstacle(series.at(2))
        seen.append(1)

    options = ["train.steps=4", "checkpoint.every_steps=2", f"checkpoint.asynchronous={asynchronous}"]
    if obstacle is a_file_in_place_of_all:
        series = Series(tmp_path / "run" / "checkpoints")
    else:
        options.append(f"checkpoint.folder={series.folder}")
    with arm(point="loop.step", action=put):
        assert run_training(resolve(config_file, options))
    assert (tmp_path / "run" / "model" / "manifest.json").exists()
    assert "the checkpoint after step 2 cannot be written, there is none yet: " in capsys.readouterr().out
    if obstacle is a_file_in_place_of_all:
        assert series.folder.read_text() == "mine"
        return
    assert series.steps() == [4]
    place = series.at(2)
    if obstacle is a_foreign_manifest:
        assert [path.name for path in place.iterdir()] == ["manifest.json"]
    elif obstacle is a_file:
        assert place.read_text() == "mine"
    else:
        assert place.is_symlink()
