"""Pooling routes: what is filed for the backward, and when. Kernels are tested in tests/ops/test_pool.py."""

import pytest
import torch

from rowmesh import EmbeddingCollection, SparseBatch, TableSpec

BAGS = {"a": [[1, 2], [], [2]], "s": [[3], [4, 3], []]}


def a_collection():
    tables = [
        TableSpec(name="a", num_rows=9, dim=3, pooling="mean"),
        TableSpec(name="s", num_rows=9, dim=3, pooling="none"),
    ]
    return EmbeddingCollection(tables)


@pytest.mark.parametrize("is_early", [False, True])
def test_cells_are_filed_once_before_or_in_the_backward(is_early):
    embeddings = a_collection()
    route = embeddings.route(SparseBatch.from_bags(BAGS))
    if is_early:
        for group in route.groups:
            group.look_up.compress(group.layout)
    assert [group.look_up.is_filed for group in route.groups] == [is_early] * 2
    out = embeddings.pool(embeddings.fetch(route))
    (out.values.sum() + out["s"].values.sum()).backward()
    assert all(group.look_up.is_filed for group in route.groups)
    pooled, sequence = (group.look_up.summed for group in route.groups)
    assert pooled.tolist() == [[0.5] * 3, [1.5] * 3]  # row 1 in a bag of two; row 2 there and alone
    assert sequence.tolist() == [[2.0] * 3, [1.0] * 3]


def test_weights_of_a_mean_are_divided_by_the_bags_size():
    """So that weights of 1 change nothing; they are not normalized."""
    embeddings = a_collection()
    batch = SparseBatch.from_bags(BAGS)
    rows = embeddings.local_rows("a")[0].values
    weights = torch.tensor([2.0, 4.0, 6.0, 1.0, 1.0, 5.0])
    weighted = SparseBatch(batch.features, batch.ids, 3, jagged_offsets=batch.offsets, weights=weights)
    with torch.no_grad():
        out = embeddings(weighted)
    torch.testing.assert_close(out["a"], torch.stack([(2 * rows[1] + 4 * rows[2]) / 2, 0 * rows[0], 6 * rows[2]]))
    history = embeddings.local_rows("s")[0].values
    torch.testing.assert_close(out["s"].values, torch.stack([history[3], history[4], 5 * history[3]]))
