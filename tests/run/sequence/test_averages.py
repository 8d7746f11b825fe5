"""Averaged replicas under sequence models: Algorithm 1 of two-dimensional sparse parallelism, in plain torch."""

from __future__ import annotations

import copy
import json
from contextlib import closing

import pytest
import torch

from rowmesh.data.events import SequenceLoader
from rowmesh.mesh import Mesh
from rowmesh.mesh.grid import Grid
from rowmesh.models.sequence.losses import binary_cross_entropy, cosine, full_softmax, sampled_softmax
from rowmesh.run.build import build
from rowmesh.run.placement import configured_placement
from rowmesh.run.resolve import resolve
from rowmesh.run.sequence.batches import Draws
from rowmesh.run.sequence.evaluation import vectors_of
from rowmesh.run.sequence.options import SequenceOptions
from rowmesh.run.tasks import open_data, task_of
from rowmesh.run.trainer import Trainer
from rowmesh.tables.update_rules import AdaGrad
from tests.support.algorithm_1 import Algorithm1
from tests.support.commands import run_on

LR, EVERY = 0.05, 3
ADAGRAD = ["tables.optimizer.name=adagrad", f"tables.optimizer.lr={LR}"]
AVERAGED = ["parallel.replicas=2", "parallel.synchronization=average", f"parallel.sync_every={EVERY}"]
DYNAMIC = ["tables.storage=dynamic", "tables.dynamic.shards=4", "tables.dynamic.capacity=800"]
LOSSES = {
    "full": ["model.options.loss=full_softmax"],
    "sampled": ["model.options.loss=sampled_softmax", "model.options.negatives=20"],
    "sampled, dynamic": ["model.options.loss=sampled_softmax", "model.options.negatives=20", *DYNAMIC],
    "own": ["model.options.loss=binary_cross_entropy", "model.options.negatives=2"],
}
PLAIN = SequenceOptions(seen="keep")  # vectors as they are


def made(mesh, file, options):
    config = resolve(file, options)
    task, _ = task_of(config, open_data(config))
    return build(task, mesh, configured_placement(task, mesh)), task


def all_items(job):
    with torch.no_grad():
        return vectors_of(job, torch.arange(job.data.sequences.num_items), PLAIN).clone()


def trained(mesh, file, options):
    """Losses of an epoch, rows after one more average, and parameters of the network."""
    torch.set_num_threads(1)
    job, task = made(mesh, file, options)
    trainer = Trainer(job, task)
    with closing(trainer.batches()) as batches:
        losses = [trainer.train_step(next(batches)) for _ in range(trainer.loader.num_batches or 0)]
    job.embeddings.synchronize()
    found = losses, all_items(job), [each.detach().clone() for each in job.network.parameters()]
    job.embeddings.close()
    return found


def losses_of(options, drawn, queries, targets, items):
    if options.loss == "full_softmax":
        return full_softmax(queries, targets, items)
    if options.loss == "sampled_softmax":
        queries, items = cosine(queries, items, options.temperature)
        return sampled_softmax(queries, items[targets], items[drawn], targets, drawn)
    return binary_cross_entropy(queries, items[targets], items[drawn], targets, drawn)


def reference(job, events, world_size):
    """Each group sees its own rows, and steps on the gradient of M / P times the sum of its positions' losses."""
    options, network = job.config.model.sequence, copy.deepcopy(job.network)
    table = Algorithm1(all_items(job), AdaGrad(lr=LR), 2, EVERY)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    loaders = [
        SequenceLoader(
            events, "train", batch_size=32, max_length=16, shuffle=True, rank=rank, world_size=world_size, prefetch=0
        )
        for rank in range(world_size)
    ]
    draws = Draws(options, events.popularity("validation"), 0) if options.samples else None
    losses, groups = [], Grid(world_size, 2).groups
    for step, batches in enumerate(zip(*loaders, strict=True)):
        num_positions, total = sum(len(batch.targets) for batch in batches), 0.0
        touched = [torch.full((events.num_items,), draws is None) for _ in groups]
        optimizer.zero_grad()
        for group, w, mark in zip(groups, table.weights, touched, strict=True):
            for batch in (batches[rank] for rank in group):
                drawn = None if draws is None else draws.ids(batch, step, 0)
                queries = network(w[batch.items], batch.offsets, batch.times, batch.request_times)
                loss = losses_of(options, drawn, queries, batch.targets, w).sum()
                loss.backward()
                total += float(loss.detach())
                mark[torch.cat([batch.items, batch.targets, *([] if drawn is None else [drawn.flatten()])])] = True
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad /= num_positions
        optimizer.step()
        scale = len(groups) / num_positions
        table.iterate([scale * w.grad for w in table.weights if w.grad is not None], touched)
        for w in table.weights:
            w.grad = None
        losses.append(total)
    table.synchronize()
    return losses, table.weights[0].detach(), list(network.parameters())


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", LOSSES)
def test_it_is_algorithm_1(ranks, sequence_file, events, loss, world_size):
    """Of four ranks two share a replica: each scores a half of it."""
    options = [*LOSSES[loss], *ADAGRAD, "parallel.transport=collective"]
    job, _ = made(Mesh(), sequence_file, options)
    losses, items, parameters = reference(job, events, world_size)
    job.embeddings.close()
    found = ranks.run(trained, sequence_file, [*options, *AVERAGED], world_size=world_size)
    assert [sum(each) for each in zip(*(of[0] for of in found), strict=True)] == pytest.approx(losses, rel=1e-9)
    for _, rows, of_network in found:
        torch.testing.assert_close(rows, items, rtol=1e-7, atol=1e-9)
        for one, other in zip(of_network, parameters, strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=1e-7, atol=1e-9)


WAYS = {
    "depth 2": ("full", ["parallel.transport=collective", "pipeline.depth=2"], {"rel": 0, "abs": 0}),
    "micro-batches": ("full", ["parallel.transport=collective", "pipeline.micro_batches=3"], {"rel": 1e-8}),
    "one-sided": ("sampled", ["parallel.transport=one_sided"], {"rel": 0, "abs": 0}),
}


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.slow] * (way != "depth 2")) for way in WAYS])
def test_ways_train_alike(ranks, sequence_file, tmp_path, way):
    """And evaluations, which come after an average, find the same on all ranks."""
    loss, options, tolerance = WAYS[way]
    found = []
    for name, more in (("plain", ["parallel.transport=collective"]), ("way", options)):
        own = [*LOSSES[loss], *ADAGRAD, *AVERAGED, *more, f"run.folder={tmp_path / name}"]
        done = run_on(ranks, ["train", str(sequence_file), *own], ranks=2)
        assert done.status == 0, done.err
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        scores = json.loads((tmp_path / name / "evaluation" / "test.json").read_text())
        found.append([*(line["loss"] for line in lines), scores["ndcg@10"], scores["mrr"]])
    assert found[1] == pytest.approx(found[0], **tolerance)
