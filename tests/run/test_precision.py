"""Networks in bfloat16: what is computed in it, and what is not."""

import pytest
import torch
from torch import nn

import rowmesh
from rowmesh.errors import ConfigurationError
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.job import Job
from rowmesh.run.precision import computing_in
from rowmesh.run.resolve import resolve
from tests.support.own_models import OwnDLRM

BFLOAT16 = "train.precision=bfloat16"


@pytest.fixture
def seen(monkeypatch):
    """The dtypes that linear layers gave, and those of the logits of batches."""
    dtypes, forward, predict = set(), nn.Linear.forward, Job.predict

    def listen(layer, x):
        y = forward(layer, x)
        dtypes.add(("layer", y.dtype))
        return y

    def listen_to_job(job, *arguments):
        logits = predict(job, *arguments)
        dtypes.add(("logits", logits.dtype))
        return logits

    monkeypatch.setattr(nn.Linear, "forward", listen)
    monkeypatch.setattr(Job, "predict", listen_to_job)
    return dtypes


EXPECTED = {("layer", torch.bfloat16), ("logits", torch.float32)}
OPTIONS = {
    "plain": [],
    "pipeline": ["pipeline.depth=1", "pipeline.micro_batches=2"],
    "own": [f"model.name={OwnDLRM.__module__}:OwnDLRM", "model.options.bottom=[8]", "model.options.top=[16]"],
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_layers_compute_in_bfloat16_and_keep_float32(config_file, seen, kind):
    if kind == "own":
        config_file.write_text(config_file.read_text().replace("bottom = [8]\ntop = [16]\n", ""))
    metrics = run_training(resolve(config_file, [BFLOAT16, *OPTIONS[kind]]))
    tried = {("layer", torch.float32)} if kind == "own" else set()  # on zeros, before the training
    assert seen == EXPECTED | tried
    seen.clear()
    run = config_file.parent / "run"
    again = run_evaluation(run)
    assert metrics is not None
    assert again.log_loss == metrics.log_loss
    assert seen == EXPECTED | tried
    model = rowmesh.load_run(run)
    assert {parameter.dtype for parameter in model.network.parameters()} == {torch.float32}
    seen.clear()
    assert run_evaluation(run, ["train.precision=float32"]).log_loss == pytest.approx(metrics.log_loss, rel=0.01)
    assert ("layer", torch.float32) in seen


def test_a_run_says_what_it_computes_in(config_file, capsys):
    run_training(resolve(config_file, [BFLOAT16, "train.epochs=1"]))
    assert "linear    in bfloat16, by torch; rows, parameters and optimizer state are not" in capsys.readouterr().out


def test_float32_changes_nothing():
    with torch.autocast("cpu", torch.bfloat16), computing_in("float32"):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["tables.dtype=float64"], "cannot be combined with float64, which tables C1, C2, C3, C4, C5 are"),
        (["train.device=cuda"], "is for networks on a CPU, and train.device is cuda"),
    ],
)
def test_what_cannot_be_is_refused(config_file, options, why):
    with pytest.raises(ConfigurationError, match=f"train.precision=bfloat16 {why}"):
        run_training(resolve(config_file, [BFLOAT16, *options]))
