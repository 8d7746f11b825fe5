"""Warnings: said where a model is worse than it should be, and only there."""

import numpy as np
import pytest

from rowmesh.data import Schema, prepare
from rowmesh.run.advice import bias_auc
from rowmesh.run.commands import run_training
from rowmesh.run.resolve import resolve


@pytest.fixture
def warned(config_file, capsys):
    """Trains, and gives the warnings of the run."""

    def run(*options):
        run_training(resolve(config_file, options), overwrite=True)
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]

    return run


def test_worse_than_the_base_rate(warned):
    found = warned("optimizer.lr=0.3", "train.epochs=5")
    assert any("worse than the base rate alone (normalized entropy" in line for line in found)
    assert any("lower optimizer.lr (0.3)" in line and "rare or unseen in training" in line for line in found)
    assert any("give train.patience so that training stops in time, and see" in line for line in found)
    (line,) = [line for line in warned("optimizer.lr=0.3", "train.steps=3") if "the base rate alone" in line]
    assert "change train.steps (3) or give train.patience so that" in line
    assert "train.epochs" not in line


def test_overfitting_is_said_where_nothing_prevents_it(warned):
    options = ["train.eval_every=8", "train.epochs=20", "optimizer.lr=0.02", "tables.optimizer.lr=0.3"]
    assert any("the model overfits" in line and "give train.patience" in line for line in warned(*options))
    assert not any("overfits" in line for line in warned(*options, "train.patience=3"))


def test_a_loss_that_still_falls(warned):
    options = ["train.eval_every=4", "train.epochs=1", "tables.optimizer.lr=0.05", "optimizer.lr=0.001"]
    (line,) = [line for line in warned(*options) if "still falling" in line]
    assert line.endswith("give train.epochs above 1")
    assert any(
        "give train.steps above 4" in line for line in warned(*options[1:], "train.eval_every=2", "train.steps=4")
    )


def test_biases_of_ids_are_a_floor(tmp_path, warned):
    """Labels that follow from the ids alone."""
    random = np.random.default_rng(0)
    users, items = random.integers(0, 50, 6000), random.integers(0, 40, 6000)
    logits = random.normal(0, 1.5, 50)[users] + random.normal(0, 1, 40)[items]
    labels = random.random(6000) < 1 / (1 + np.exp(-logits))
    rows = [f"{int(y)},{u},{i},a|b" for y, u, i in zip(labels, users, items, strict=True)]
    (tmp_path / "train.csv").write_text("\n".join(["y,user,item,tags", *rows[:5000]]) + "\n")
    (tmp_path / "test.csv").write_text("\n".join(["y,user,item,tags", *rows[5000:]]) + "\n")
    columns = {"label": "y", "categorical": ["user", "item", {"name": "tags", "separator": "|"}]}
    files = {name: [tmp_path / f"{name}.csv"] for name in ("train", "test")}
    data = prepare(files, tmp_path / "ids", Schema.parse(columns))
    held_out = logits[5000:][labels[5000:]], logits[5000:][~labels[5000:]]
    best = (held_out[0][:, None] > held_out[1][None]).mean()
    assert bias_auc(data, "train", "test") == pytest.approx(best, abs=0.01)
    found = warned(f"data.folder={data.folder}", "train.steps=1")
    (line,) = [line for line in found if "one number for each id, without any interaction, reaches AUC" in line]
    assert "leave out data.batch_size, train.steps and the learning rates" in line
    assert not warned(f"data.folder={data.folder}", "train.epochs=10", "optimizer.lr=0.005")
