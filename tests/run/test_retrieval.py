"""Two towers under the softmax over the items of a batch: plain torch trains the same, on any number of ranks."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from rowmesh._support.faults import arm
from rowmesh.data import Batch, Loader, Prepared
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.mesh import Mesh
from rowmesh.models import TwoTower
from rowmesh.placement import Plan
from rowmesh.run.build import build
from rowmesh.run.commands import run_evaluation, run_training
from rowmesh.run.job import Job
from rowmesh.run.placement import Placement, shapes_of
from rowmesh.run.predict import predict
from rowmesh.run.resolve import resolve
from rowmesh.run.retrieval import item_ids, towers
from rowmesh.run.task import Task
from rowmesh.run.tasks import open_data, task_of
from rowmesh.run.trainer import Trainer
from rowmesh.sparse import SparseBatch
from tests.support.clicks import write_config
from tests.support.labelled import RATING, prepare_labelled
from tests.support.raw_runs import TABLES, write_raw_run

LR, TEMPERATURE, RATE = 0.3, 0.2, 0.01
ITEM, ITEMS = "C1", ["C1", "C5"]
SOFTMAX = [
    "model.name=two_tower",
    'model.options.item=["C1", "C5"]',
    "model.options.widths=[6, 4]",
    f"model.options.temperature={TEMPERATURE}",
    "model.options.loss=in_batch_softmax",
    "tables.dtype=float64",
    "train.linear=torch",
]
SGD = ['tables.optimizer.name="sgd"', f"tables.optimizer.lr={LR}", 'optimizer.name="sgd"', f"optimizer.lr={LR}"]
SLOW = ("collective", "tiers")
WAYS = {
    "collective": ["parallel.transport=collective"],
    "one-sided, plan": ["parallel.transport=one_sided", "placement.strategy=auto", "placement.extra_memory=0.3"],
    "replicas": ["parallel.transport=collective", "parallel.replicas=2"],
    "tiers": ["parallel.transport=collective", "tables.storage=tiered", "tiers.fast_rows=150", "pipeline.depth=1"],
    "depth 2": ["parallel.transport=collective", "pipeline.depth=2"],
}


@pytest.fixture
def file(clicks, tmp_path):
    path = write_config(tmp_path / "towers.toml", tmp_path / "run", clicks.folder, "[train]", "epochs = 1")
    path.write_text(path.read_text().replace("bottom = [8]\ntop = [16]\n", "") + "log_every = 2\n")
    return path


class Reference:
    """Two towers in plain torch, started from a job: sums of rows, linear layers, Algorithm 2 with dictionaries."""

    def __init__(self, job: Job) -> None:
        self.features = job.data.features
        self.rows = {name: rows.requires_grad_() for name, rows in all_rows(job).items()}
        self.layers = {name: each.clone().detach().requires_grad_() for name, each in job.network.named_parameters()}
        self.step_number, self.last, self.gap = 0, {}, {}

    def tower(self, name: str, x: Tensor) -> Tensor:
        layers = [each for key, each in self.layers.items() if key.startswith(f"{name}_tower")]
        for number, (weight, bias) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
            x = x @ weight.T + bias
            x = x.relu() if 2 * number + 2 < len(layers) else x
        return x / x.norm(dim=1, keepdim=True)

    def vectors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = {}
        for place, name in enumerate(self.features):
            ends = batch.sparse.offsets[place * len(batch.labels) : (place + 1) * len(batch.labels) + 1].tolist()
            bags = [batch.sparse.ids[low:high] for low, high in pairwise(ends)]
            found[name] = torch.stack([self.rows[name][bag].sum(0) for bag in bags])
        query = [batch.dense.double(), *(found[name] for name in self.features if name not in ITEMS)]
        return self.tower("query", torch.cat(query, 1)), self.tower("item", torch.cat([found[n] for n in ITEMS], 1))

    def loss(self, batch: Batch) -> Tensor:
        """Yi et al., equations 4 to 6: Σ_b r_b loss_b / B."""
        u, v = self.vectors(batch)
        ids = item_ids(batch.sparse, ITEM).tolist()
        self.step_number += 1
        for one in set(ids):
            passed = self.step_number - self.last.get(one, 0)
            self.gap[one] = (1 - RATE) * self.gap[one] + RATE * passed if one in self.gap else passed
            self.last[one] = self.step_number
        log_q = torch.tensor([-math.log(max(self.gap[one], 1.0)) for one in ids], dtype=torch.float64)
        items = torch.tensor(ids)
        others = (items[:, None] != items[None, :]) | torch.eye(len(ids), dtype=torch.bool)
        scores = u @ v.T / TEMPERATURE - log_q
        losses = scores.masked_fill(~others, -torch.inf).logsumexp(1) - scores.diagonal()
        return (batch.labels * losses).sum() / len(ids)

    def step(self, loss: Tensor) -> None:
        parameters = [*self.rows.values(), *self.layers.values()]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= LR * gradient

    def ranks(self, batches: list[Batch]) -> list[int]:
        """Of the item of each sample with a label, among the distinct items, each as its first sample has it."""
        items: dict[int, Tensor] = {}
        with torch.no_grad():
            for batch in batches:
                for one, vector in zip(item_ids(batch.sparse, ITEM).tolist(), self.vectors(batch)[1], strict=True):
                    items.setdefault(one, vector)
            every, found = torch.stack(list(items.values())), []
            for batch in batches:
                for u, one, label in zip(
                    self.vectors(batch)[0], item_ids(batch.sparse, ITEM).tolist(), batch.labels, strict=True
                ):
                    scores = every @ u
                    found += [1 + int((scores > scores[list(items).index(one)]).sum())] * bool(label > 0)
        return found


def all_rows(job: Job) -> dict[str, Tensor]:
    """Every row of every table. Collective."""
    size = max(table.num_rows for table in job.data.tables)
    ids = [torch.arange(size).clamp(max=table.num_rows - 1) for table in job.data.tables]
    with torch.no_grad():
        vectors = job.embeddings(SparseBatch.from_dense(job.data.features, torch.stack(ids)))
    return {table.name: vectors[table.name][: table.num_rows].clone() for table in job.data.tables}


def made(mesh, path, options) -> tuple[Job, Task]:
    config = resolve(path, options)
    task, _ = task_of(config, open_data(config))
    plan = Plan.cyclic(shapes_of(task.config, task.data), mesh.world_size, mesh.world_size)
    return build(task, mesh, Placement(plan, "for a test")), task


def trained(mesh, path, options, steps):
    """Losses of this rank, rows, parameters of the network and metrics of the test split, after some steps."""
    torch.set_num_threads(1)
    job, task = made(mesh, path, options)
    trainer = Trainer(job, task)
    with closing(trainer.batches()) as batches:
        losses = [trainer.train_step(next(batches)) for _ in range(steps)]
    scores = task.evaluate(job, "test", lambda number: None).as_record()
    found = (
        losses,
        all_rows(job),
        {name: each.detach().clone() for name, each in job.network.named_parameters()},
        scores,
    )
    job.embeddings.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_and_metrics_are_those_of_plain_torch(ranks, file, clicks: Prepared, world_size):
    """On two ranks the last batch, of one sample, leaves one of them none."""
    options, steps = [*SOFTMAX, *SGD, "data.shuffle=false"], 8
    job, _ = made(Mesh(), file, options)
    reference = Reference(job)
    job.embeddings.close()
    losses = []
    for batch, _ in zip(Loader(clicks, "train", batch_size=256), range(steps), strict=False):
        loss = reference.loss(batch)
        reference.step(loss)
        losses.append(float(loss.detach()) * len(batch.labels))
    found = ranks.run(trained, file, options, steps, world_size=world_size)
    assert [sum(each) for each in zip(*(of[0] for of in found), strict=True)] == pytest.approx(losses, rel=1e-9)
    for _, rows, parameters, scores in found:
        for name, each in rows.items():
            torch.testing.assert_close(each, reference.rows[name].detach(), rtol=1e-9, atol=1e-11)
        for name, each in parameters.items():
            torch.testing.assert_close(each, reference.layers[name].detach(), rtol=1e-9, atol=1e-11)
        standings = reference.ranks(list(Loader(clicks, "test", batch_size=256)))
        assert scores["samples"] == len(standings)
        assert scores["hr@10"] == pytest.approx(sum(rank <= 10 for rank in standings) / len(standings), rel=1e-12)
        assert scores["mrr"] == pytest.approx(sum(1 / rank for rank in standings) / len(standings), rel=1e-9)


def test_labels_and_sample_weights_weigh(tmp_path):
    """Ratings of 1 to 5; the loss is Σ w r loss / Σ w, of which a step returns the numerator."""
    data = prepare_labelled(tmp_path, RATING, "weight")
    file = write_config(tmp_path / "ratings.toml", tmp_path / "run", data.folder, batch_size=64)
    file.write_text(file.read_text().replace("bottom = [8]\ntop = [16]\n", ""))
    options = ['model.options.item=["item"]', "data.shuffle=false", "model.options.log_q=false", *SGD]
    job, task = made(Mesh(), file, [*SOFTMAX, *options])
    trainer, batch = Trainer(job, task), next(iter(Loader(data, "train", batch_size=64)))
    with torch.no_grad():
        u, v = towers(job, batch, job.embeddings(batch.sparse))
    ids = item_ids(batch.sparse, "item")
    others = (ids[:, None] != ids[None, :]) | torch.eye(len(ids), dtype=torch.bool)
    scores = (u @ v.T / TEMPERATURE).masked_fill(~others, -torch.inf)
    assert batch.weights is not None
    expected = (batch.weights * batch.labels * (scores.logsumexp(1) - scores.diagonal())).sum()
    assert trainer.train_step(batch) == pytest.approx(float(expected), rel=1e-9)
    job.embeddings.close()
    wrong = replace(batch, labels=batch.labels - 3)
    with pytest.raises(DataError, match=r"here: \d+ of 64 labels are below 0, the first of them -[12]"):
        task.check_batch(wrong, "here")


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way in SLOW)) for way in WAYS])
def test_two_ranks_train_what_one_does(file, tmp_path, command, way):
    found = {}
    for count, options in ((1, []), (2, WAYS[way])):
        run = tmp_path / str(count)
        done = command(["train", str(file), *SOFTMAX, *options, f"run.folder={run}", "train.eval_every=3"], ranks=count)
        assert done.status == 0, done.err
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        scores = json.loads((run / "evaluation" / "test.json").read_text())
        found[count] = [line["loss"] for line in lines], {k: v for k, v in scores.items() if isinstance(v, float)}
    assert found[2][0] == pytest.approx(found[1][0], rel=1e-9)
    assert found[2][1] == pytest.approx(found[1][1], rel=1e-9)


def test_a_run_that_is_resumed_ends_as_one_that_was_not(file, tmp_path, capsys):
    options = [*SOFTMAX, "checkpoint.every_steps=3", "train.epochs=2"]
    untouched = run_training(resolve(file, [*options, f"run.folder={tmp_path / 'untouched'}"]))
    assert "loss      softmax over the items of a batch, corrected for how often they are in one (log Q)" in (
        out := capsys.readouterr().out
    )
    assert "items of the split are ranked" in out
    with arm("loop.step@5=raise"), pytest.raises(RuntimeError, match="injected"):
        run_training(resolve(file, options))
    assert run_training(resolve(file, options), resume="latest") == untouched
    assert run_evaluation(tmp_path / "run") == untouched


def test_it_learns_and_scores_are_products(file, clicks, tmp_path):
    """The planted clicks depend on pairs of query and item; scores are no probabilities."""
    first = run_training(resolve(file, [*SOFTMAX, "optimizer.lr=0", "tables.optimizer.lr=0"]), overwrite=True)
    last = run_training(resolve(file, [*SOFTMAX, "train.epochs=4", "optimizer.lr=0.01"]), overwrite=True)
    assert first is not None
    assert last is not None
    assert last.loss < first.loss - 0.02
    raw = clicks.folder.parent / "raw"
    predict(tmp_path / "run", next(raw.glob("test*")), out := tmp_path / "scores.parquet")
    scores = torch.tensor(pq.read_table(out)["score"].to_pylist())
    assert scores.min() < 0
    assert scores.abs().max() <= 1 / TEMPERATURE + 1e-6


def test_raw_rows_with_dynamic_tables(tmp_path, command):
    """Items that come later than others are items like all of them."""
    path, found = write_raw_run(tmp_path), []
    tables = [option for option in TABLES if not option.startswith("model.")]
    options = [*tables, "model.name=two_tower", 'model.options.item=["item"]', "model.options.loss=in_batch_softmax"]
    options += ["model.options.widths=[4]", f"data.test={tmp_path / 'test'}", "train.progressive_every=0"]
    for count in (1, 2):
        run = tmp_path / str(count)
        done = command(["train", str(path), *options, f"run.folder={run}"], ranks=count)
        assert done.status == 0, done.err
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        scores = json.loads((run / "evaluation" / "test.json").read_text())
        found.append(([line["loss"] for line in lines], scores["hr@10"], scores["mrr"]))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-9)
    assert found[1][1:] == pytest.approx(found[0][1:], rel=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["pipeline.micro_batches=2"], "pipeline.micro_batches=2 cannot be: the softmax is over all items of a batch"),
        (["train.loss=mse"], "train.loss is of predicted labels and cannot be given"),
        (["train.progressive_every=5"], "train.progressive_every is of predicted labels"),
        (["parallel.synchronization=average"], "the negatives of a replica would be rows of the others"),
        (["model.options.loss=softmax"], "loss should be one of binary_cross_entropy, in_batch_softmax, got 'softmax'"),
    ],
)
def test_what_cannot_be_is_refused_by_its_keys(file, options, message):
    with pytest.raises(ConfigurationError, match=message):
        run_training(resolve(file, [*SOFTMAX, *options]))


def test_an_items_id_is_one(file):
    with pytest.raises(DataError, match=r"sample \d+ of a batch has \d ids of 'C3', the first of model.options.item"):
        run_training(resolve(file, [*SOFTMAX, 'model.options.item=["C3"]']))


def test_log_q_is_of_the_softmax():
    with pytest.raises(ConfigurationError, match="log_q is for in_batch_softmax, and loss is binary_cross_entropy"):
        TwoTower(dims={"user": 4, "item": 2}, num_dense=0, item=["item"], log_q=True)
    model = TwoTower(dims={"user": 4, "item": 2}, num_dense=0, item=["item"], loss="in_batch_softmax", log_q=False)
    assert model.softmax is not None
    assert model.softmax.frequency is None
