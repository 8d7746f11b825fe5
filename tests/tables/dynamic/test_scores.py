"""Scores of the caller: batches carry them, and the smallest leaves; `test_resolver` has them on ranks, to the bit."""

from dataclasses import replace

import pytest
import torch

from rowmesh import EmbeddingCollection, SparseBatch, TableSpec
from rowmesh.errors import DataError
from rowmesh.sparse import take
from tests.exchange.resolve.test_traps import bags, made, read


def scored(ids, scores):
    return replace(bags(ids), scores=torch.tensor(scores))


def test_the_smallest_score_leaves_and_an_id_has_the_largest_of_its_batch():
    embeddings = made(capacity=3, shards=1, eviction="score")
    embeddings(scored([1, 2, 3, 2], [5, -7, 4, 9]))
    assert embeddings.statistics("item", [1, 2, 3]).score.tolist() == [5, 9, 4]
    embeddings(scored([2, 4], [-1, 0]))
    found = embeddings.statistics("item", [1, 2, 3, 4])
    assert found.known.tolist() == [True, True, False, True]
    assert found.score.tolist() == [5, -1, 0, 0], "the latest, whatever it was before"
    embeddings(scored([5], [2**63 - 1]))
    assert embeddings.statistics("item", [1, 2, 4, 5]).known.tolist() == [True, False, True, True]


def test_evaluation_needs_none():
    embeddings = made(capacity=3, shards=1, eviction="score")
    embeddings(scored([1], [5]))
    read(embeddings, [1, 2])
    assert embeddings.statistics("item", [1]).score.tolist() == [5]


def test_they_go_where_their_ids_go():
    batch = replace(
        SparseBatch.from_bags({"a": [[1], [2, 3]], "b": [[4, 5], []]}), scores=torch.tensor([1, 2, 3, 4, 5])
    )
    assert batch.select(["b", "a"]).scores.tolist() == [4, 5, 1, 2, 3]
    assert take(batch, torch.tensor([1, 0])).scores.tolist() == [2, 3, 1, 4, 5]
    equal = replace(SparseBatch.from_dense(["a", "b"], torch.arange(4).view(2, 2)), scores=torch.arange(4))
    assert take(equal, torch.tensor([1])).scores.tolist() == [1, 3]


def test_mistakes_are_named():
    embeddings = made(capacity=3, shards=1, eviction="score")
    with pytest.raises(DataError, match=r"'item' evicts by scores of the caller, .* give SparseBatch\(…, scores=…\)"):
        embeddings(bags([1]))
    with pytest.raises(DataError, match=r"scores of 1 ids must be as many int64, got torch.float32 \(1,\)"):
        scored([1], [0.5])
    with pytest.raises(DataError, match=r"scores of 1 ids must be as many int64, got torch.int64 \(2,\)"):
        scored([1], [1, 2])
    plain = EmbeddingCollection([TableSpec(name="item", num_rows=9, dim=3)])
    with pytest.raises(DataError, match="the batch has scores, and no table evicts by them"):
        plain(scored([1], [1]))
