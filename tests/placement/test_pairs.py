"""Sums over pairs of ranks, against matrices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.placement.pairs import LinkKinds, Links, Pairs


@settings(max_examples=50)
@given(
    num_nodes=st.integers(1, 5),
    ranks_per_node=st.integers(1, 5),
    kinds=st.builds(LinkKinds, *[st.sampled_from([0.0, 0.5, 1.0, 4.21])] * 3),
    seed=st.integers(0, 99),
)
def test_links_are_summed_up_by_kind_as_by_matrix(num_nodes, ranks_per_node, kinds, seed):
    W = num_nodes * ranks_per_node
    rng = np.random.default_rng(seed)
    every, within, across = rng.exponential(size=(3, 2, W)) * rng.integers(0, 2, (3, 2, W))
    pairs = Pairs(ranks_per_node, every, within, across, rng.random(W))
    values = pairs.matrix() * kinds.matrix(W, ranks_per_node)
    between = values[~np.eye(W, dtype=bool)]
    for cost in (kinds, kinds.matrix(W, ranks_per_node)):
        links = Links.of(pairs, cost)
        assert links.received == pytest.approx(values.sum(axis=1))
        assert links.sent == pytest.approx(values.sum(axis=0))
        assert links.most == pytest.approx(values.max())
        assert links.least == pytest.approx(between.min() if W > 1 else 0.0)


@given(st.integers(1, 4), st.integers(1, 4), st.builds(LinkKinds, *[st.sampled_from([0.0, 1.0, 4.21])] * 3))
def test_a_matrix_of_kinds_is_known_as_such(num_nodes, ranks_per_node, kinds):
    matrix = kinds.matrix(num_nodes * ranks_per_node, ranks_per_node)
    found = LinkKinds.of(matrix, ranks_per_node)
    assert found is not None
    assert np.array_equal(found.matrix(len(matrix), ranks_per_node), matrix)
    if len(matrix) > 2:
        matrix[2, 0] += 0.25
        assert LinkKinds.of(matrix, ranks_per_node) is None
