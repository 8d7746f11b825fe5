"""How a run multiplies matrices: chosen once, said, and kept with the model."""

import pytest

import rowmesh
from rowmesh.models import linear_layers
from rowmesh.ops.linear import cpu
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.resolve import resolve

needs_onednn = pytest.mark.skipif(cpu.obstacle() is not None, reason=str(cpu.obstacle()))


def train(config_file, *options):
    metrics = run_training(resolve(config_file, ["train.epochs=1", *options]), overwrite=True)
    assert metrics is not None
    return metrics


@needs_onednn
def test_a_model_is_evaluated_as_it_was_trained(config_file, capsys, monkeypatch):
    trained = train(config_file, "train.linear=onednn")
    assert "linear    by oneDNN, all 4 shapes, unmeasured" in capsys.readouterr().out
    run = config_file.parent / "run"
    monkeypatch.setattr(linear_layers, "measure", None)  # nothing is measured any more
    assert run_evaluation(run).log_loss == trained.log_loss
    assert "linear    as in the training of the model\n" in capsys.readouterr().out
    assert len(rowmesh.load_run(run).job.linear.choices.passes) == 4
    assert run_evaluation(run, ["train.linear=torch"]).log_loss == pytest.approx(trained.log_loss, rel=1e-5)
    assert "linear    by torch\n" in capsys.readouterr().out


@needs_onednn
@pytest.mark.parametrize("linear", ["torch", "onednn", "auto"])
def test_every_choice_trains_the_same_model(config_file, linear):
    expected = train(config_file, "train.linear=torch")
    assert train(config_file, f"train.linear={linear}").log_loss == pytest.approx(expected.log_loss, rel=1e-5)


@pytest.mark.parametrize("linear", ["onednn", "auto"])
def test_a_build_without_it_says_so(config_file, capsys, monkeypatch, linear):
    monkeypatch.setattr(linear_layers, "obstacle", lambda: "this build of torch has no oneDNN")
    train(config_file, f"train.linear={linear}")
    assert "linear    by torch: this build of torch has no oneDNN\n" in capsys.readouterr().out
