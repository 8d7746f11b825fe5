"""Routes: what they ask for, and that they give back what they borrow; kernels are in tests/ops/test_route.py."""

import gc

import numpy as np

from rowmesh import EmbeddingCollection, SparseBatch, TableSpec
from rowmesh.exchange.host_group import route_of_nothing

TABLES = [TableSpec(name="a", num_rows=9, dim=3), TableSpec(name="b", num_rows=9, dim=3)]


def array(address, dtype, count):
    return np.ctypeslib.as_array((np.ctypeslib.as_ctypes_type(dtype) * count).from_address(address)).tolist()


def test_unique_rows_and_where_they_are():
    embeddings = EmbeddingCollection(TABLES)
    route = embeddings.route(SparseBatch.from_bags({"a": [[7, 2], [7]], "b": [[2], [2, 2]]}))
    (group,) = route.groups
    send, rows = group.look_up.send, embeddings.engine.exchanges[0].arena.rows
    assert group.num_unique == 3
    assert group.look_up.bounds == [0, 3]
    assert send.segment_offsets.tolist() == [[0, 2, 3]]
    assert send.accesses.tolist() == [[3, 3]]
    assert array(send.slots_address, np.uint32, 3) == [7, 2, 9 + 2]
    assert array(group.look_up.inverse, np.uint32, 6) == [0, 1, 0, 2, 2, 2]
    addresses = array(group.look_up.addresses, np.int64, 3)
    assert addresses == [rows[slot].data_ptr() for slot in (7, 2, 11)]


def test_a_route_of_nothing():
    embeddings = EmbeddingCollection(TABLES)
    embeddings.route(SparseBatch.from_bags({"a": [[1]], "b": [[1]]}))  # leaves its numbers in a workspace
    gc.collect()
    (exchange,) = embeddings.engine.exchanges
    route = route_of_nothing(embeddings.engine.exchanges)
    (group,) = route.groups
    assert exchange.look_ups.idle == []
    assert group.look_up.bounds == [0, 0]
    assert not group.look_up.send.segment_offsets.any()
    assert not group.look_up.send.accesses.any()
    del route, group
    assert len(exchange.look_ups.idle) == 1
    assert exchange.counters.routes == 1
