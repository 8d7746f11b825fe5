"""Cutter: orders and sizes of micro-batches."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rowmesh import SparseBatch, TableSpec
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.pipeline.cutter import Cutter, RowNumbering

TABLES = [TableSpec(name="item", num_rows=50, dim=4)]


def batch(size):
    generator = torch.Generator().manual_seed(size)
    return SparseBatch.from_dense(["item"], torch.randint(50, (1, size), generator=generator))


@pytest.mark.parametrize("sizes", ["even", "light_ends"])
@pytest.mark.parametrize("clustering", ["off", "greedy", "light_ends"])
@pytest.mark.parametrize("size", [0, 1, 3, 64])
def test_every_sample_is_in_one_micro_batch(sizes, clustering, size):
    order, parts = Cutter(TABLES, 4, sizes=sizes, clustering=clustering)(batch(size))
    assert sum(parts) == size
    assert len(parts) == 4
    if clustering == "off" or size == 0:
        assert order is None
    else:
        assert order is not None
        assert order.sort().values.tolist() == list(range(size))


def test_light_ends_are_smaller():
    _, parts = Cutter(TABLES, 4, sizes="light_ends")(batch(64))
    assert parts[0] < parts[1]
    assert parts[-1] < parts[-2]


def test_unknown_ways_are_refused():
    with pytest.raises(ConfigurationError, match=r"sizes must be one of \['even', 'light_ends'\], got 'odd'"):
        Cutter(TABLES, 2, sizes="odd")  # pyright: ignore[reportArgumentType]


NUMBERED = [
    TableSpec(name="item", num_rows=50, dim=4, features=["seen", "liked"]),
    TableSpec(name="user", num_rows=10**6, dim=8),
]
FEATURES = {"seen": "item", "liked": "item", "user": "user"}


@given(st.permutations(list(FEATURES)), st.integers(1, 3), st.integers(0, 5), st.data())
def test_keys_are_equal_where_table_and_id_are(features, count, batch_size, data):
    bag = st.lists(st.integers(0, 49), max_size=4)
    batch = SparseBatch.from_bags({name: [data.draw(bag) for _ in range(batch_size)] for name in features[:count]})
    rows = RowNumbering(NUMBERED)(batch)
    ranges = [batch.feature_range(place) for place in range(count)]
    named = [
        (FEATURES[name], row)
        for name, part in zip(features, ranges, strict=False)
        for row in batch.ids[part[0] : part[1]].tolist()
    ]
    keys = rows.keys.tolist()
    assert len(set(zip(keys, named, strict=True))) == len(set(keys)) == len(set(named)) == rows.num_rows
    assert rows.counts.tolist() == [keys.count(key) for key in range(rows.num_rows)]
    assert rows.bags.tolist() == batch.offsets.tolist()
    assert rows.batch_size == batch_size


def test_numbers_batch_after_batch():
    number = RowNumbering(NUMBERED)
    for ids in ([1, 2, 1], [3, 3, 3], []):
        rows = number(SparseBatch.from_bags({"user": [[i] for i in ids]}))
        assert rows.num_rows == len(set(ids))


def test_equal_bags_need_no_offsets():
    batch = SparseBatch.from_bags({"user": [[1], [2]]})
    assert RowNumbering(NUMBERED)(SparseBatch.from_dense(("user",), batch.ids.view(1, 2))).bags == 1


def test_refuses_a_feature_of_no_table():
    with pytest.raises(DataError, match=r"features \['place'\] belong to no table; .*'seen', 'liked', 'user'"):
        RowNumbering(NUMBERED)(SparseBatch.from_bags({"place": [[1]]}))
