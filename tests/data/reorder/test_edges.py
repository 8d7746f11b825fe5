"""Edges: all pairs of Algorithm 2 where they fit, else pairs of it, the more alike the more often."""

from collections import Counter

import numpy as np
import pytest
import torch

from rowmesh.data.reorder import edges as module
from rowmesh.data.reorder.edges import alike_pairs, all_pairs, draw_edges, sign
from rowmesh.data.reorder.groups import Column
from tests.support.cooccurrence import BATCH, draw_batches, prepare_batches


def algorithm_2(batch_list, fre_order, table_length, hot_ratio):
    """EL-Rec's Algorithm 2, line by line; a batch is a set of indices (§IV-B)."""
    hot_thre = int(table_length * hot_ratio)
    edge_list = []
    for batch in batch_list:
        fre_batch = fre_order[batch].unique()
        fre_batch = (fre_batch.clamp(min=hot_thre) - hot_thre).unique()
        edge_list.append(torch.combinations(fre_batch))
    return torch.cat(edge_list)


def as_counter(pairs):
    return Counter(tuple(sorted(pair)) for pair in np.asarray(pairs).tolist())


def kept_batches(prepared, column):
    ids = np.concatenate([np.asarray(ids) for _, ids, _, _ in column.groups()])
    batches = ids.reshape(-1, BATCH)
    return [batch for number, batch in enumerate(batches) if number % 10 != 9]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return prepare_batches(tmp_path_factory.mktemp("edges"), draw_batches(40, num_ids=500, communities=20))


@pytest.mark.parametrize("hot_ratio", [0.0, 0.1])
def test_all_pairs_are_those_of_algorithm_2(prepared, hot_ratio):
    table = prepared.table("item")
    column, first = Column(prepared, table, BATCH), int(table.num_rows * hot_ratio)
    found = draw_edges(column, range(first, table.num_rows), 10**6)
    batches = [torch.from_numpy(batch.astype(np.int64)) for batch in kept_batches(prepared, column)]
    expected = as_counter(algorithm_2(batches, torch.arange(table.num_rows), table.num_rows, hot_ratio))
    if hot_ratio:  # its vertex 0 is that of the first id which is not hot, and of all hot ids
        expected = Counter({pair: count for pair, count in expected.items() if 0 not in pair})
    assert Counter({pair: n for pair, n in as_counter(found).items() if not hot_ratio or 0 not in pair}) == expected
    assert sum(expected.values()) > 1000


def test_bounded_pairs_are_some_of_algorithm_2(prepared):
    table = prepared.table("item")
    column = Column(prepared, table, BATCH)
    everything = as_counter(draw_edges(column, range(table.num_rows), 10**6))
    bounded = draw_edges(column, range(table.num_rows), 2000)
    assert 100 < len(bounded) <= 2000
    assert set(as_counter(bounded)) <= set(everything)
    assert (draw_edges(column, range(table.num_rows), 2000) == bounded).all()
    assert len(draw_edges(column, range(table.num_rows), 50)) == 50


def test_bags_are_groups(tmp_path):
    prepared = prepare_batches(tmp_path, draw_batches(40, num_ids=300), bags=True)
    table = prepared.table("item")
    column = Column(prepared, table, 16)
    expected: Counter = Counter()
    for _, ids, starts, ends in column.groups():
        for start, end in zip(starts, ends, strict=True):
            assert end - start == 4
            expected += as_counter(torch.combinations(torch.from_numpy(np.unique(ids[start:end]))))
    assert as_counter(all_pairs(column, range(table.num_rows), 10**6)) == expected
    assert sign(column, range(table.num_rows), 0).shape[1] == module.NUM_BANDS
    assert set(as_counter(draw_edges(column, range(table.num_rows), 500))) <= set(expected)


def test_pairs_are_found_as_often_as_they_are_alike():
    """Signatures of ids in 20 groups of which they share 10: J = 1/3, so a ninth of the bands of two signatures."""
    num_ids, groups = 4000, np.arange(20)
    signatures = np.full((num_ids, 64), 2**32 - 1, np.uint32)
    for first in range(0, num_ids, 2):
        for id_, members in ((first, groups), (first + 1, groups + 10)):
            starts = np.full(1, 0, np.int64)
            for group in members:
                module._sign(
                    np.array([id_], np.int32),
                    starts,
                    starts + 1,
                    int(group) + 100 * first,
                    np.uint64(0),
                    0,
                    num_ids,
                    signatures,
                )
    found = alike_pairs(signatures, 2, 10**6, seed=0)
    assert (np.sort(found, axis=1)[:, 0] % 2 == 0).all()
    assert (np.abs(found[:, 0] - found[:, 1]) == 1).all()
    assert len(found) / (num_ids / 2 * 32) == pytest.approx(1 / 9, rel=0.05)


def test_ids_that_occur_nowhere_are_in_no_pair():
    signatures = np.full((10, 64), 2**32 - 1, np.uint32)
    assert len(alike_pairs(signatures, 2, 100, seed=0)) == 0
