"""Pipelines over KeyedJaggedTensors, and over some features of batches: what the collection does in a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Pipeline, SparseBatch
from rowmesh.errors import DataError
from rowmesh.sparse import take
from tests.support.tables import table

STEPS = 4


@dataclass(frozen=True)
class Item:
    """As a program of TorchRec may have it."""

    sparse: Any
    labels: Tensor

    def take(self, samples: Tensor) -> Item:
        return Item(take(self.sparse, samples), self.labels[samples])


def collection(mesh, transport="auto"):
    tables = [
        table("user", 30, 3, "adam", features=("user", "friend"), dtype=torch.float64),
        table("seen", 20, 16, "adagrad", pooling="none", dtype=torch.float64),
        table("item", 9, 3, "sgd", dtype=torch.float64),
    ]
    return EmbeddingCollection(tables, mesh=mesh, transport=transport)


def keyed_jagged(names, ids, offsets):
    """What rowmesh reads of a KeyedJaggedTensor, with int32 ids."""
    parts = {"keys": names, "values": ids, "offsets": offsets, "weights_or_none": None}
    return SimpleNamespace(**{name: lambda part=part: part for name, part in parts.items()})


def batches(rank, features, keyed):
    """Batches of some features, and of one that no table has."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        names = (*features, "stranger") if len(features) < 4 else features
        lengths = torch.randint(0, 3, (5 * len(names),), generator=generator)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        ids = torch.randint(0, 9, (int(offsets[-1]),), generator=generator)
        sparse: Any = SparseBatch(names, ids, 5, jagged_offsets=offsets)
        if keyed:
            sparse = keyed_jagged(list(names), ids.int(), offsets.int())
        yield Item(sparse, torch.rand(5, generator=generator, dtype=torch.float64))


def loss_of(found, labels):
    """Of whatever was looked up."""
    parts = [found.values.sum(1)]
    parts += [found[name].padded()[0].tanh().sum((1, 2)) for name in found if name not in found.features]
    return ((sum(parts) - labels) ** 2).sum() / 10


def rows_of(embeddings):
    return [piece.values.clone() for spec in embeddings.tables for piece in embeddings.held_rows(spec.name)]


def train_plain(mesh, features, keyed, transport):
    embeddings = collection(mesh, transport)
    optimizer = EmbeddingOptimizer(embeddings)
    for item in batches(mesh.rank, features, keyed):
        loss_of(embeddings(item.sparse, features=features), item.labels).backward()
        optimizer.step()
    return rows_of(embeddings)


def train_pipelined(mesh, features, keyed, transport, options):
    embeddings = collection(mesh, transport)
    optimizer = EmbeddingOptimizer(embeddings)
    with Pipeline(embeddings, **options) as pipeline:
        for window in pipeline.windows(batches(mesh.rank, features, keyed), features=features):
            for part in window:
                assert tuple(part.embeddings) == tuple(sorted(features, key=lambda name: name == "seen"))
                loss_of(part.embeddings, window.item.labels[part.samples]).backward()
            optimizer.step()
    return rows_of(embeddings)


@pytest.mark.parametrize("features", [("item", "seen"), ("friend",), ("seen", "item", "friend", "user")])
@pytest.mark.parametrize("transport", ["one_sided", "collective"])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_pipeline_trains_what_the_plain_loop_does(ranks, features, transport, keyed):
    plain = ranks.run(train_plain, features, keyed, transport, world_size=2)
    whole = ranks.run(train_pipelined, features, keyed, transport, {"depth": 2}, world_size=2)
    cut = {"micro_batches": 3, "clustering": "greedy"}
    parts = ranks.run(train_pipelined, features, keyed, transport, cut, world_size=2)
    for mine, again, close in zip(plain, whole, parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))
        for a, b in zip(mine, close, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_rank_trains_what_the_plain_loop_does(ranks):
    features = ("user", "seen")
    (plain,) = ranks.run(train_plain, features, True, "auto", world_size=1)
    (piped,) = ranks.run(train_pipelined, features, True, "auto", {}, world_size=1)
    assert all(torch.equal(a, b) for a, b in zip(plain, piped, strict=True))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (["itme"], r"features \['itme'\] belong to no table; did you mean 'item'"),
        ("item", r"write features=\['item'\]"),
        (["item", "item"], "name one more than once"),
    ],
)
def test_wrong_features_are_refused_before_the_loop_begins(features: Sequence[str], message: str):
    embeddings = collection(None)
    with Pipeline(embeddings) as pipeline:
        with pytest.raises(DataError, match=message):
            next(pipeline.windows(batches(0, ("item",), False), features=features))
        next(pipeline.windows(batches(0, ("item",), False), features=["item"]))


def test_a_batch_that_lacks_a_feature_is_named():
    with Pipeline(collection(None)) as pipeline, pytest.raises(DataError, match=r"lacks features \['user'\]; it has"):
        next(pipeline.windows(batches(0, ("item",), True), features=["user"]))
