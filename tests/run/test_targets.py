"""Several labels, values and sample weights: what plain torch trains, on any number of ranks."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from torch.nn import functional as F

import rowmesh
from rowmesh.cli.report import write_page
from rowmesh.data import Batch, Loader
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.placement import Plan
from rowmesh.run.build import build
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.config import Config
from rowmesh.run.evaluation import Evaluation
from rowmesh.run.job import Job
from rowmesh.run.own_model import ModelError
from rowmesh.run.placement import Placement, shapes_of
from rowmesh.run.resolve import resolve
from rowmesh.run.tasks import task_of
from rowmesh.run.trainer import Trainer
from rowmesh.run.value_metrics import ValueMetrics
from rowmesh.sparse import SparseBatch
from tests.support.clicks import write_config
from tests.support.labelled import BUY, CLICK, RATING, prepare_labelled

LR = 0.05
SGD = ['tables.optimizer.name="sgd"', f"tables.optimizer.lr={LR}", 'optimizer.name="sgd"', f"optimizer.lr={LR}"]


def configured(folder: Path, *options: str) -> Config:
    path = write_config(folder / "labels.toml", folder / "run", folder / "prepared", batch_size=64)
    return resolve(path, ["tables.dtype=float64", "data.shuffle=false", "train.epochs=2", *SGD, *options])


class Reference:
    """DLRM in plain torch, started from a job: `nn.Embedding` tables, bags summed by a loop, SGD."""

    def __init__(self, job: Job) -> None:
        self.features = job.data.features
        self.table_of = job.data.schema.table_of
        self.rows = {self.table_of(name): rows.requires_grad_() for name, rows in all_rows(job).items()}
        self.network = type(job.network)(
            num_dense=2, num_features=3, dim=4, bottom=[8], top=[16], num_labels=len(job.targets)
        ).double()
        self.network.load_state_dict(job.network.state_dict())

    def outputs(self, batch: Batch) -> torch.Tensor:
        vectors = []
        for place, name in enumerate(self.features):
            bags = batch.sparse.offsets[place * len(batch.labels) : (place + 1) * len(batch.labels) + 1].tolist()
            ids = batch.sparse.ids
            found = [self.rows[self.table_of(name)][ids[low:high]].sum(0) for low, high in pairwise(bags)]
            vectors.append(torch.stack(found))
        return self.network(batch.dense.double(), torch.stack(vectors, 1)).reshape(len(batch.labels), -1)

    def step(self, loss: torch.Tensor) -> None:
        parameters = [*self.rows.values(), *self.network.parameters()]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter -= LR * gradient


def all_rows(job: Job) -> dict[str, torch.Tensor]:
    """Every row of every table, looked up one by one."""
    size = max(table.num_rows for table in job.data.tables)
    ids = [torch.arange(size).clamp(max=table.num_rows - 1) for table in job.data.tables]
    with torch.no_grad():
        vectors = job.embeddings(SparseBatch.from_dense(job.data.features, torch.stack(ids)))
    return {table.name: vectors[table.name][: table.num_rows].clone() for table in job.data.tables}


def drawn(seed: int) -> tuple[Sequence[object], str | None, list[str]]:
    """Labels, a weight column, and options, at random."""
    draw = random.Random(seed)
    labels = draw.sample([CLICK, BUY, RATING], k=1 + seed % 3)
    options = ["train.loss=mse"] if draw.random() < 0.3 else []
    names = [label if isinstance(label, str) else label["name"] for label in labels]
    if draw.random() < 0.7:
        options.append(f"train.loss_weights.{draw.choice(names)}=0.3")
    return labels, draw.choice([None, "weight"]), options


@pytest.mark.parametrize("seed", range(9))
def test_plain_torch_trains_the_same(tmp_path, seed):
    """Σ_l factor_l Σ_b w_b loss_l(b) / Σ_b w_b, over each global batch, the last of which is smaller.

    With every second seed two features share a table.
    """
    labels, weight, options = drawn(seed)
    data = prepare_labelled(tmp_path, labels, weight, seed=seed, shared=seed % 2 == 1)
    task, _ = task_of(configured(tmp_path, *options), data)
    placement = Placement(Plan.cyclic(shapes_of(task.config, data), 1, 1), "for a test")
    job = build(task, Mesh(), placement)
    reference, trainer = Reference(job), Trainer(job, task)
    for batch in Loader(data, "train", batch_size=64):
        targets = batch.labels.double().reshape(len(batch.labels), -1)
        weights = torch.ones(len(targets), dtype=torch.float64) if batch.weights is None else batch.weights.double()
        outputs, loss = reference.outputs(batch), torch.zeros((), dtype=torch.float64)
        for number, target in enumerate(job.targets):
            is_mse = target.name == "rating" or "train.loss=mse" in options
            z, y = outputs[:, number], targets[:, number]
            each = (z - y) ** 2 if is_mse else F.softplus(z) - y * z
            loss = loss + task.config.train.loss_weights.get(target.name, 1.0) * (weights * each).sum() / weights.sum()
        reference.step(loss)
        found = trainer.train_step(batch)
        assert found == pytest.approx(float(loss.detach() * weights.sum()), rel=1e-10)
    for name, rows in all_rows(job).items():
        torch.testing.assert_close(rows, reference.rows[reference.table_of(name)].detach(), rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(job.network.parameters(), reference.network.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    job.embeddings.close()


@pytest.mark.parametrize(
    ("labels", "weight", "options"),
    [
        (CLICK, "weight", []),
        (CLICK, "weight", ["pipeline.depth=1", "pipeline.micro_batches=3"]),
        ([CLICK, BUY], None, []),
        ([BUY, RATING], "weight", ["train.loss_weights.rating=0.2"]),
        (RATING, None, ["pipeline.depth=1", "pipeline.micro_batches=2"]),
    ],
    ids=["weighted", "weighted pipeline", "two labels", "all of it", "values in a pipeline"],
)
def test_two_ranks_train_what_one_does(tmp_path, command, labels, weight, options):
    """Without a shuffle the first of two ranks has nearly all the weight; the last batch has one sample, of rank 1."""
    prepare_labelled(tmp_path, labels, weight, train=3 * 64 + 1)
    path = write_config(tmp_path / "labels.toml", tmp_path / "run", tmp_path / "prepared", batch_size=64)
    found = {}
    for ranks in (1, 2):
        run = tmp_path / f"ranks{ranks}"
        more = ["tables.dtype=float64", "data.shuffle=false", "train.epochs=2", "train.log_every=1"]
        done = command(["train", str(path), *more, f"run.folder={run}", *options], ranks=ranks)
        assert done.status == 0, done.err
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found[ranks] = json.loads((run / "evaluation" / "test.json").read_text()), [line["loss"] for line in lines]
    numbers = [dict(flat(found[ranks][0])) for ranks in (1, 2)]
    assert numbers[0] == pytest.approx(numbers[1], abs=1e-9, nan_ok=True)
    assert found[1][1] == pytest.approx(found[2][1], abs=1e-9)


def flat(values, path=""):
    """The numbers of a record, but for the score bins."""
    for key, value in values.items():
        if isinstance(value, dict) and key != "score_bins":
            yield from flat(value, f"{path}{key}.")
        elif isinstance(value, int | float):
            yield path + key, value


def test_every_label_is_named_wherever_it_is_shown(tmp_path, capsys):
    data = prepare_labelled(tmp_path, [CLICK, RATING], "weight")
    config = configured(tmp_path, "train.eval_every=4", "train.log_every=4", "train.patience=2")
    trained = run_training(config)
    out = capsys.readouterr().out
    assert "loss      binary cross entropy of 'click' + squared error of 'rating', samples weighted by 'weight'" in out
    assert "test, click: 90 samples, base rate" in out
    assert "test, rating: 90 samples, mean " in out
    assert trained is not None
    assert list(trained.labels) == ["click", "rating"]
    rating = trained.labels["rating"]
    assert isinstance(rating, ValueMetrics)
    assert trained.loss == pytest.approx(trained.log_loss + rating.loss)
    line = next(
        line
        for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "validation"
    )
    assert {"loss", "auc/click", "log_loss/click", "calibration/click", "rmse/rating", "mae/rating"} <= line.keys()
    assert "validation_loss" in json.loads((tmp_path / "run" / "model" / "manifest.json").read_text())["metadata"]
    assert run_evaluation(tmp_path / "run") == trained
    assert data.splits["train"].label_means == pytest.approx(weighted_means(tmp_path / "train.csv"), rel=1e-6)


def weighted_means(path: Path) -> dict[str, float]:
    rows = np.genfromtxt(path, delimiter=",", names=True, usecols=(0, 2, 3))
    return {name: float(np.average(rows[name], weights=rows["weight"])) for name in ("click", "rating")}


def test_predict_writes_a_column_for_each_label(tmp_path, command):
    prepare_labelled(tmp_path, [CLICK, RATING], "weight")
    expected = run_training(configured(tmp_path))
    assert expected is not None
    scores = tmp_path / "scores.parquet"
    done = command(["predict", str(tmp_path / "run"), str(tmp_path / "test.csv"), "--out", str(scores)], ranks=1)
    assert done.status == 0, done.err
    table = pq.read_table(scores)
    assert table.column_names == ["line", "score_click", "score_rating"]
    rows = np.genfromtxt(tmp_path / "test.csv", delimiter=",", names=True, usecols=(0, 2, 3))
    errors = (table["score_rating"].to_numpy() - rows["rating"]) ** 2
    assert np.sqrt(np.average(errors, weights=rows["weight"])) == pytest.approx(rating_of(expected).rmse)
    p = table["score_click"].to_numpy()
    losses = -np.log(np.where(rows["click"] == 1, p, 1 - p))
    assert np.average(losses, weights=rows["weight"]) == pytest.approx(expected.log_loss)
    found = rowmesh.load_run(tmp_path / "run")(
        {"price": [0.0], "age": [0.0], "user": ["u1"], "item": ["i2"], "tags": [["1", "2"]]}
    )
    assert found.shape == (1, 2)


def test_a_single_value_is_the_score(tmp_path, command):
    prepare_labelled(tmp_path, RATING)
    expected = run_training(configured(tmp_path))
    assert expected is not None
    done = command(["predict", str(tmp_path / "run"), str(tmp_path / "test.csv")], ranks=1)
    assert done.status == 0, done.err
    table = pq.read_table(tmp_path / "test.csv.scores.parquet")
    assert table.column_names == ["line", "score"]
    rating = rating_of(expected)
    assert table["score"].to_numpy().mean() == pytest.approx(rating.mean_prediction)  # pyright: ignore
    with pytest.raises(rowmesh.RowmeshError, match="label 'rating' is predicted as a value"):
        _ = expected.auc


def rating_of(evaluation: Evaluation) -> ValueMetrics:
    metrics = evaluation.labels["rating"]
    assert isinstance(metrics, ValueMetrics)
    return metrics


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.loss=binary", r'train.loss = "binary" is for labels of 0 and 1, and label \'rating\' of .*prepared is'),
        ("train.loss_weights.ratign=2.0", r"train.loss_weights.ratign: .* has no label of this name; did you mean"),
        ("train.loss_weights.rating=0.0", "train.loss_weights are all 0"),
    ],
)
def test_a_loss_that_does_not_fit_is_refused(tmp_path, option, message):
    prepare_labelled(tmp_path, RATING)
    with pytest.raises(ConfigurationError, match=message):
        run_training(configured(tmp_path, option))
    assert not (tmp_path / "run").exists()


def own_file(folder: Path) -> Path:
    """A configuration without the widths of DLRM."""
    path = write_config(folder / "labels.toml", folder / "run", folder / "prepared", "[train]", "epochs = 2")
    path.write_text(path.read_text().replace("bottom = [8]\ntop = [16]\n", ""))
    return path


def test_own_models_train_alike_with_a_loss_of_their_own_and_on_two_ranks(tmp_path, command):
    """The last batch leaves the first of two ranks without samples."""
    prepare_labelled(tmp_path, [CLICK, BUY], "weight", train=2 * 64 + 1)
    path, found = own_file(tmp_path), []
    for name, ranks in (("Shared", 1), ("SharedLoss", 1), ("SharedLoss", 2)):
        run = tmp_path / f"{name}{ranks}"
        options = [f"model.name=tests.support.own_models:{name}", f"run.folder={run}", "data.batch_size=64"]
        done = command(["train", str(path), "tables.dtype=float64", *options], ranks=ranks)
        assert done.status == 0, done.err
        found.append(dict(flat(json.loads((run / "evaluation" / "test.json").read_text()))))
    assert found[1] == pytest.approx(found[0], abs=1e-9)
    assert found[2] == pytest.approx(found[0], abs=1e-9)


@pytest.mark.parametrize(
    ("name", "label", "options", "message"),
    [
        ("MeanLoss", CLICK, ["model.options.bottom=[4]", "model.options.top=[4]"], "a mean, which cannot be weighted"),
        ("Wide", [CLICK, BUY], [], "is made with dims, num_dense, labels .*unexpected keyword argument 'labels'"),
        ("Shared", CLICK, ['model.options.labels=["a"]'], r"must return logits \[B\] = \[2\], got a tensor \[2, 1\]"),
    ],
)
def test_mistakes_of_own_models_are_named(tmp_path, name, label, options, message):
    prepare_labelled(tmp_path, label, "weight")
    with pytest.raises(ModelError, match=message):
        run_training(resolve(own_file(tmp_path), [f"model.name=tests.support.own_models:{name}", *options]))


def test_the_page_of_a_run_shows_every_label(tmp_path):
    prepare_labelled(tmp_path, [CLICK, RATING])
    run_training(configured(tmp_path, "train.eval_every=4", "train.log_every=2"), at_end=write_page)
    page = (tmp_path / "run" / "report.html").read_text()
    for text in (
        "AUC, validation, click",
        "RMSE, validation, rating",
        "test, click",
        "test, rating",
        "RMSE of the mean",
    ):
        assert text in page
    assert "ROC, test, click" in page
