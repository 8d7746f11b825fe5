"""Rows that move in a frozen window, as the benchmark counts them: against sets, and laws that any batch obeys."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from benchmarks.sample_clustering_window import count_window
from rowmesh.ops.cluster import cluster
from rowmesh.pipeline.cutter import BatchRows


@st.composite
def windows(draw):
    """Rows of a batch with bags of any size, sizes, and an order."""
    num_features, batch_size = draw(st.integers(1, 3)), draw(st.integers(0, 20))
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    lengths = generator.integers(0, 4, num_features * batch_size)
    ids = torch.from_numpy(generator.integers(0, draw(st.sampled_from([1, 5, 100])), lengths.sum()))
    _, keys, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    bags = torch.tensor([0, *lengths.cumsum().tolist()])
    rows = BatchRows(keys.int(), counts.int(), bags, batch_size)
    bounds = sorted(draw(st.lists(st.integers(0, batch_size), max_size=5)))
    sizes = [end - begin for begin, end in itertools.pairwise([0, *bounds, batch_size])]
    return rows, sizes, torch.from_numpy(generator.permutation(batch_size))


def sets(rows, sizes, order):
    """The rows of each micro-batch."""
    bags = [rows.keys[begin:end].tolist() for begin, end in itertools.pairwise(rows.bags.tolist())]
    parts = order.split(sizes)
    return [{key for s in part.tolist() for bag in bags[s :: rows.batch_size] for key in bag} for part in parts]


@given(windows())
def test_counts_are_those_of_sets(case):
    rows, sizes, order = case
    own = sets(*case)
    window = count_window(rows, sizes, order)
    assert window.own == tuple(map(len, own))
    assert window.first == tuple(len(part - set().union(*own[:m])) for m, part in enumerate(own))
    assert window.last == tuple(len(part - set().union(*own[m + 1 :])) for m, part in enumerate(own))


@given(windows())
def test_delta_moves_what_the_unsplit_batch_moves(case):
    rows, sizes, order = case
    window = count_window(rows, sizes, order)
    for exchange in ("delta", "unsplit"):
        assert sum(window.fetched(exchange)) == sum(window.pushed(exchange)) == rows.num_rows == window.num_rows
    assert window.fetched("naive") == window.pushed("naive") == window.own
    assert rows.num_rows <= sum(window.own) <= rows.num_rows * len(sizes)
    assert all(first <= own and last <= own for own, first, last in zip(*vars(window).values(), strict=True))
    assert window.first[0] == window.own[0]
    assert window.last[-1] == window.own[-1]


def test_unsplit_moves_all_before_and_after():
    rows = BatchRows(torch.tensor([0, 1, 0]).int(), torch.tensor([2, 1]).int(), 1, 3)
    window = count_window(rows, [1, 1, 1])
    assert (window.fetched("unsplit"), window.pushed("unsplit")) == ((2, 0, 0), (0, 0, 2))
    assert (window.fetched("delta"), window.pushed("delta")) == ((1, 1, 0), (0, 1, 1))


def test_clusters_and_light_ends_move_less():
    """Zipf's ids, columns apart: greedy lowers what naive moves, light ends what the first and the last have."""
    generator = np.random.default_rng(0)
    ids = np.minimum(generator.zipf(1.2, (8, 1024)), 10**6) + np.arange(8)[:, None] * 10**7
    _, keys, counts = np.unique(ids, return_inverse=True, return_counts=True)
    rows = BatchRows(torch.from_numpy(keys.ravel()).int(), torch.from_numpy(counts).int(), 1, 1024)
    sizes = [64, 192, 256, 256, 192, 64]
    plain = count_window(rows, sizes)
    clustered = count_window(rows, sizes, cluster(rows.keys, rows.bags, rows.counts, sizes))
    light = count_window(rows, sizes, cluster(rows.keys, rows.bags, rows.counts, sizes, light_ends=True))
    assert sum(clustered.own) < 0.95 * sum(plain.own)
    assert max(light.first[0], light.last[-1]) < 0.8 * min(plain.first[0], plain.last[-1])


def test_refuses_other_numbers_of_samples():
    rows = BatchRows(torch.tensor([0, 1]).int(), torch.tensor([1, 1]).int(), 1, 2)
    with pytest.raises(ValueError, match=r"sizes \[1, 2\] add up to 3; the batch has 2"):
        count_window(rows, [1, 2])
    for order in (torch.arange(3), torch.tensor([1, 1])):
        with pytest.raises(ValueError, match="each of the 2 samples once"):
            count_window(rows, [1, 1], order)
