"""Runs that begin with the model of another."""

import json
import shutil

import pytest
import torch

from rowmesh._support.faults import arm
from rowmesh.checkpoint import read_manifest
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve
from tests.support.clicks import write_config
from tests.support.killed_runs import KILLED, rows_of, train_once, train_untouched

ADAM = ['tables.optimizer.name="adam"', "data.shuffle=false", "train.linear=torch", "tables.dtype=float64"]


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.fixture
def file(clicks, tmp_path):
    return write_config(tmp_path / "clicks.toml", tmp_path / "run", clicks.folder, "[train]", "log_every = 1")


def test_one_epoch_after_another_is_two(file, tmp_path, command, capsys):
    """Rows, network, and the states of both optimizers; on one rank to the bit, on two to rounding."""
    run_training(resolve(file, [*ADAM, "train.epochs=2", f"run.folder={tmp_path / 'whole'}"]))
    run_training(resolve(file, [*ADAM, "train.epochs=1", f"run.folder={tmp_path / 'first'}"]))
    more = [*ADAM, "train.epochs=1", f"train.start_from={tmp_path / 'first'}"]
    capsys.readouterr()
    run_training(resolve(file, [*more, f"run.folder={tmp_path / 'second'}"]))
    assert f"start     from the model in {tmp_path / 'first'}, after 8 steps" in capsys.readouterr().out
    assert losses(tmp_path / "first") + losses(tmp_path / "second") == losses(tmp_path / "whole")
    found = rows_of(tmp_path / "second")
    assert all(torch.equal(found[name], rows) for name, rows in rows_of(tmp_path / "whole").items())
    done = command(["train", str(file), *more, f"run.folder={tmp_path / 'two'}"], ranks=2)
    assert done.status == 0, done.err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "second"), rel=1e-9)


@pytest.mark.slow
def test_a_run_that_is_resumed_needs_its_start_no_more(file, tmp_path):
    first, options = tmp_path / "first", [*ADAM, "train.epochs=1", "checkpoint.every_steps=3"]
    run_training(resolve(file, [*options, f"run.folder={first}"]))
    options.append(f"train.start_from={first}")
    run_training(resolve(file, [*options, f"run.folder={tmp_path / 'untouched'}"]))
    with arm("loop.step@5=raise"), pytest.raises(RuntimeError, match="injected"):
        run_training(resolve(file, options))
    shutil.rmtree(first)
    run_training(resolve(file, options), resume="latest")
    found = rows_of(tmp_path / "run")
    assert all(torch.equal(found[name], rows) for name, rows in rows_of(tmp_path / "untouched").items())


def test_what_cannot_be_gone_on_with_is_refused(file, clicks, tmp_path):
    first = tmp_path / "first"
    run_training(resolve(file, ["train.steps=1", f"run.folder={first}"]))
    start = f"train.start_from={first}"
    for options, message in [
        ([f"run.folder={first}"], "is the run's own folder; give another run.folder, or --resume"),
        (["optimizer.name=sgd"], "was trained by adam, and optimizer.name is sgd"),
        (["tables.dim=8"], "dim"),
        (["tables.storage=dynamic", "tables.initializer.bound=0.1", "tables.dynamic.capacity=64"], "dynamic here"),
        (["model.top=[8]"], "the network in .* is another"),
        (["train.start_from=/nowhere"], "/nowhere is no run"),
    ]:
        with pytest.raises(RowmeshError, match=message) as caught:
            run_training(resolve(file, [start, *options]), overwrite=options == [f"run.folder={first}"])
        assert isinstance(caught.value, RowmeshError | ConfigurationError)
        assert not (tmp_path / "run").exists(), "a run that ends before its first step leaves no folder"
    assert (first / "model").exists()


def test_dynamic_tables_grow(file, tmp_path):
    rules = ["tables.storage=dynamic", "tables.initializer.bound=0.1", "tables.dynamic.shards=1", "train.steps=2"]
    run_training(resolve(file, [*rules, "tables.dynamic.capacity=500", f"run.folder={tmp_path / 'first'}"]))
    start = [*rules, f"train.start_from={tmp_path / 'first'}"]
    with pytest.raises(RowmeshError, match="its capacity is 500 in the checkpoint and 499 here"):
        run_training(resolve(file, [*start, "tables.dynamic.capacity=499"]))
    run_training(resolve(file, [*start, "tables.dynamic.capacity=800"]))
    first, second = (read_manifest(tmp_path / name / "model").tables for name in ("first", "run"))
    assert {each.num_rows for each in second.values()} == {800}
    for name, entry in first.items():
        ids = sum(part.num_ids for part in entry.known.parts)
        assert ids <= sum(part.num_ids for part in second[name].known.parts)


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_fails_in_its_first_step_leaves_nothing(ranks, file, tmp_path, world_size, is_there):
    folder = tmp_path / "run"
    if is_there:
        folder.mkdir()
    failures = ranks.run(train_once, file, [], "no", "engine.fetched@1=raise", world_size=world_size)
    assert all(KILLED in each for each in failures), failures
    assert [*folder.iterdir()] == [] if is_there else not folder.exists()
    train_untouched(ranks, file, ["train.steps=1"], world_size)


def test_a_run_that_fails_in_its_second_step_leaves_its_folder(file, tmp_path):
    with arm("engine.fetched@2=raise"), pytest.raises(RuntimeError, match="injected"):
        run_training(resolve(file))
    assert losses(tmp_path / "run")


def test_a_run_that_would_replace_another_and_fails_in_its_first_step_leaves_that(file, tmp_path):
    run_training(resolve(file, ["train.steps=1"]))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with arm("engine.fetched@1=raise"), pytest.raises(RuntimeError, match="injected"):
        run_training(resolve(file), overwrite=True)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
