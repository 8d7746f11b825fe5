"""Early stopping in a run: the best model is the one that is written, evaluated and exported, on any ranks."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from rowmesh import checkpoint
from rowmesh._support.faults import arm
from rowmesh.data import Prepared
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.export import export
from rowmesh.run.resolve import resolve
from rowmesh.run.run_folder import RunFolder
from tests.support.prepared import renew_checksums

OVERFITS = ["train.epochs=30", "train.patience=3", "train.eval_every=4", "optimizer.lr=0.02", "tables.optimizer.lr=0.3"]


def evaluations(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["log_loss"] for line in lines if line["kind"] == "validation"}


def test_the_best_model_is_kept_and_training_stops(config_file, tmp_path, capsys):
    metrics = run_training(resolve(config_file, OVERFITS))
    run = RunFolder(tmp_path / "run")
    losses = evaluations(run.path)
    best = min(losses, key=losses.__getitem__)
    metadata = checkpoint.read_manifest(run.model).metadata
    assert metadata["steps"] == best < metadata["trained_steps"] == max(losses) == best + 12
    assert metadata["is_best"]
    assert metadata["validation_log_loss"] == losses[best]
    assert not run.best.exists()
    out = capsys.readouterr().out
    line = f"the best of {best + 12} steps: after step {best}, validation log-loss {losses[best]:.5f}"
    assert line in out
    assert run_evaluation(run.path, split="validation").log_loss == losses[best]
    assert line in capsys.readouterr().out
    assert run_evaluation(run.path) == metrics
    lines = []
    export(run.path, tmp_path / "out", log=lines.append)
    assert any(line in each for each in lines)


def test_the_model_is_that_of_a_run_that_ends_there(config_file, tmp_path):
    run_training(resolve(config_file, OVERFITS))
    stopped = RunFolder(tmp_path / "run")
    steps = checkpoint.read_manifest(stopped.model).metadata["steps"]
    plain = [*OVERFITS, "train.patience=0", f"train.steps={steps}", f"run.folder={tmp_path / 'plain'}"]
    run_training(resolve(config_file, plain))
    for split in ("validation", "test"):
        assert run_evaluation(stopped.path, split=split) == run_evaluation(tmp_path / "plain", split=split)


@pytest.mark.parametrize(
    "options",
    [
        ["parallel.transport=collective"],
        ["pipeline.depth=2", "pipeline.micro_batches=2", "parallel.transport=collective"],
        ["tables.storage=tiered", "tiers.fast_rows=300"],
    ],
    ids=["collective", "pipeline", "tiered"],
)
def test_ranks_stop_at_the_same_step_with_the_same_model(config_file, tmp_path, command, options):
    wide = [*OVERFITS, "tables.dtype=float64"]
    alone = run_training(resolve(config_file, [*wide, f"run.folder={tmp_path / 'alone'}"]))
    done = command(["train", str(config_file), *wide, *options], ranks=2)
    assert done.status == 0, done.err
    steps = [checkpoint.read_manifest(tmp_path / name / "model").metadata["steps"] for name in ("alone", "run")]
    assert steps[0] == steps[1]
    found = json.loads((tmp_path / "run" / "evaluation" / "test.json").read_text())
    assert found["log_loss"] == pytest.approx(alone.log_loss, rel=1e-9)


def test_without_a_validation_split_the_last_samples_are_it(config_file, clicks, tmp_path):
    folder = shutil.copytree(clicks.folder, tmp_path / "none")
    prepared = Prepared.open(folder)
    splits = {name: split for name, split in prepared.splits.items() if name != "validation"}
    replace(prepared, splits=splits).save()
    renew_checksums(folder)
    run_training(resolve(config_file, [*OVERFITS, f"data.folder={folder}"]))
    assert len(evaluations(tmp_path / "run")) >= 4
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["samples"] for line in lines if line["kind"] == "validation"} == {179}  # a tenth of 1,793


def test_a_disk_without_room_for_the_best_ends_no_run(config_file, tmp_path, capsys):
    with arm("checkpoint.prepare@1=ENOSPC"):  # once: the model has room at the end
        run_training(resolve(config_file, [*OVERFITS, "train.epochs=1"]))
    assert "the best model, of step 4, cannot be written, none is kept" in capsys.readouterr().out
    assert checkpoint.read_manifest(tmp_path / "run" / "model").metadata["steps"] == 8


def test_the_state_of_early_stopping_is_in_the_checkpoint(config_file, tmp_path, monkeypatch):
    """A run that continues from a checkpoint takes the same decisions."""
    run_training(resolve(config_file, OVERFITS))
    model = RunFolder(tmp_path / "run").model
    manifest = checkpoint.read_manifest(model)
    state = torch.load(model / manifest.folder / "dense.pt")
    losses = evaluations(tmp_path / "run")
    assert state["early_stopping"]["best_step"] == manifest.metadata["steps"]
    assert state["early_stopping"]["losses"] == losses
