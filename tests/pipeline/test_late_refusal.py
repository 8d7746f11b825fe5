"""A window whose update is refused by a later shard group has changed no row of an earlier one."""

import pytest
import torch

from rowmesh import AdaGrad, EmbeddingCollection, EmbeddingOptimizer, TableSpec
from rowmesh.data import Batch
from rowmesh.errors import RefusedError
from rowmesh.exchange.cores import CoreShardGroup
from rowmesh.pipeline import Pipeline
from rowmesh.sparse import SparseBatch


def refuse(self, routes, step):
    raise RefusedError("not this step", refused=[0])


def train(embeddings, batch):
    optimizer = EmbeddingOptimizer(embeddings)
    with Pipeline(embeddings, depth=0, overlap=False) as pipeline:
        for window in pipeline.windows([batch]):
            for part in window:
                part.embeddings.values.sum().backward()
            optimizer.step()


def test_rows_of_the_first_shard_group_stay(monkeypatch):
    cores = TableSpec(name="user", num_rows=1000, dim=8, storage="tensor_train", optimizer=AdaGrad())
    embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4), cores])
    before = [part.values.clone() for part in embeddings.local_rows("item")]
    monkeypatch.setattr(CoreShardGroup, "collect", refuse)
    sparse = SparseBatch.from_dense(["item", "user"], torch.tensor([[1, 2, 3], [4, 5, 6]]))
    with pytest.raises(RefusedError, match="not this step"):
        train(embeddings, Batch(torch.zeros(3, 0), sparse, torch.zeros(3)))
    after = [part.values for part in embeddings.local_rows("item")]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert embeddings.engine.step_count == 0
    assert not embeddings.engine.failure.text
