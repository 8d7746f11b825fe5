"""Rows that are not pooled, beside pooled ones: against plain nn.Embedding, wherever rows are and however they travel.

Tensor-train tables are in tests/test_tensor_train_tables.py, devices in tests/test_device*.py and tests/pipeline.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, Mesh, Pipeline, SparseBatch, TableSpec, Tiers
from rowmesh.tables import Normal
from tests.support.plans import with_copies
from tests.support.training import Item

NUM_ROWS, DIM = {"page": 12, "user": 5}, 3
FEATURES = {"clicked": "page", "bought": "page", "user": "user"}
COMMON = {"dim": DIM, "dtype": torch.float64, "optimizer": SGD(lr=1.0), "initializer": Normal()}
TABLES = (
    TableSpec(name="page", num_rows=NUM_ROWS["page"], features=("clicked", "bought"), pooling="none", **COMMON),
    TableSpec(name="user", num_rows=NUM_ROWS["user"], **COMMON),
)
TIERS = Tiers(fast_share=0.001, fast_rows=60, verify=True, poison=True, timeout_s=20.0)
PATHS = {
    "one-sided": {"transport": "one_sided"},
    "collective": {"transport": "collective"},
    "copies": {"plan": with_copies(TABLES, 2)},
    "replicas": {"replicas": 2},
    "tiers": {"tiers": TIERS, "tables": [replace(each, storage="tiered") for each in TABLES]},
    "pipeline": {"depth": 1},
    "micro-batches": {"transport": "collective", "depth": 2, "micro_batches": 3},
    "micro-batches of tiers": {
        "tiers": TIERS,
        "tables": [replace(each, storage="tiered") for each in TABLES],
        "micro_batches": 2,
    },
}


def loss_of(user, sequences):
    """Of `[B, D]`, and of padded rows and masks; depends on the order of a sample's rows."""
    total = user.sum()
    for padded, mask in sequences:
        scores = (padded * user.unsqueeze(1)).sum(2).sigmoid() * mask
        place = torch.arange(1.0, padded.shape[1] + 1, dtype=padded.dtype)
        total = total + (scores * place).unsqueeze(2).mul(padded.tanh()).sum()
    return total


def train(mesh, options, bags, num_samples):
    """Two steps; the rows that this rank owns, and every loss."""
    options = dict(options)
    piped = {name: options.pop(name) for name in ("depth", "micro_batches") if name in options}
    embeddings = EmbeddingCollection(options.pop("tables", TABLES), mesh=mesh, seed=3, **options)
    optimizer, losses = EmbeddingOptimizer(embeddings), []

    def compute(found):
        sequences = [found[name].padded() for name in ("clicked", "bought")]
        loss = loss_of(found["user"], sequences) * mesh.world_size / num_samples
        loss.backward()
        return float(loss.detach())

    items = [Item(SparseBatch.from_bags(given[mesh.rank]), torch.zeros(0)) for given in bags]
    if piped:
        with Pipeline(embeddings, **piped) as pipeline:
            for window in pipeline.windows(items):
                losses.append(sum(compute(part.embeddings) for part in window))
                optimizer.step()
    else:
        for item in items:
            losses.append(compute(embeddings(item.sparse)))
            optimizer.step()
    rows = {}
    for name in NUM_ROWS:
        pieces = embeddings.local_rows(name)
        rows[name] = [(list(piece.rows), piece.values.clone()) for piece in pieces]
    embeddings.close()
    return rows, losses


def train_reference(bags, num_samples):
    """Plain torch, one process; the losses of each rank's samples, and all rows."""
    fresh = EmbeddingCollection(TABLES, seed=3)
    tables = {
        name: nn.Embedding.from_pretrained(fresh.local_rows(name)[0].values.clone(), freeze=False) for name in NUM_ROWS
    }
    optimizer = torch.optim.SGD([table.weight for table in tables.values()], lr=1.0)
    losses = []
    for step in bags:
        of_ranks = []
        for of_rank in step:
            looked_up = {
                name: [tables[FEATURES[name]](torch.tensor(ids, dtype=torch.int64)) for ids in of_rank[name]]
                for name in FEATURES
            }
            user = torch.stack([rows.sum(0) for rows in looked_up["user"]])
            sequences = []
            for name in ("clicked", "bought"):
                padded = pad_sequence(looked_up[name], batch_first=True)
                lengths = torch.tensor([len(rows) for rows in looked_up[name]])
                sequences.append((padded, torch.arange(padded.shape[1]) < lengths.unsqueeze(1)))
            of_ranks.append(loss_of(user, sequences) / num_samples)
        optimizer.zero_grad()
        sum(of_ranks).backward()
        optimizer.step()
        losses.append([float(loss.detach()) * len(step) for loss in of_ranks])
    return {name: table.weight.detach() for name, table in tables.items()}, losses


@st.composite
def batches(draw, world_size):
    """Bags of two steps, by rank."""

    def of_feature(name, size):
        ids = st.lists(st.integers(0, NUM_ROWS[FEATURES[name]] - 1), max_size=4)
        return draw(st.lists(ids, min_size=size, max_size=size))

    sizes = draw(st.lists(st.integers(1, 4), min_size=world_size, max_size=world_size))
    return [[{name: of_feature(name, size) for name in FEATURES} for size in sizes] for _ in range(2)]


def check(ranks, world_size, options, bags):
    num_samples = sum(len(given["user"]) for given in bags[0])
    expected, losses = train_reference(bags, num_samples)
    if world_size == 1:
        options = {name: value for name, value in options.items() if name not in ("plan", "replicas", "transport")}
        found = [train(Mesh(), options, bags, num_samples)]
    else:
        found = ranks.run(train, options, bags, num_samples, world_size=world_size)
    for rank, (rows, mine) in enumerate(found):
        torch.testing.assert_close(mine, [step[rank] for step in losses], rtol=1e-12, atol=1e-12)
        for name, pieces in rows.items():
            for numbers, values in pieces:
                torch.testing.assert_close(values, expected[name][numbers], rtol=1e-12, atol=1e-12)
    for name, count in NUM_ROWS.items():
        assert sum(len(numbers) for rows, _ in found for numbers, _ in rows[name]) == count


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=4)
@given(bags=batches(2))
def test_two_ranks_train_what_plain_torch_does(ranks, path, bags):
    check(ranks, 2, PATHS[path], bags)


@pytest.mark.parametrize("path", ["one-sided", "tiers", "micro-batches"])
@settings(max_examples=15)
@given(bags=batches(1))
def test_one_rank_trains_what_plain_torch_does(path, bags):
    check(None, 1, PATHS[path], bags)


def test_rows_come_in_the_order_of_the_ids():
    embeddings = EmbeddingCollection(TABLES)
    table = embeddings.local_rows("page")[0].values
    bags = {"clicked": [[7, 3, 7], [], [0]], "bought": [[], [1, 1], [11]], "user": [[0], [1], [2]]}
    found = embeddings(SparseBatch.from_bags(bags))
    for name in ("clicked", "bought"):
        rows = found[name]
        assert rows.lengths.tolist() == [len(bag) for bag in bags[name]]
        assert torch.equal(rows.values, F.embedding(torch.tensor([i for bag in bags[name] for i in bag]), table))
    assert found.features == ("user",)
    assert tuple(found) == ("user", "clicked", "bought")
