"""Requests for the rows of dynamic tables: each id comes to its owner, and each row back to its id."""

import numpy as np
import pytest

from rowmesh.exchange.resolve.asked import DynamicTable
from rowmesh.exchange.resolve.asking import Asked, RequestRouter
from rowmesh.exchange.resolve.request_channel import BatchRequest, LocalRequestChannel
from rowmesh.mesh.grid import Grid
from rowmesh.ops.memory import array_at
from rowmesh.tables import Dynamic, TableSpec, Uniform
from rowmesh.tables.dynamic.hashing import shard_of
from rowmesh.tables.dynamic.layout import shards_of

SHARDS = {"user": 5, "item": 8}


def tables(world_size, replicas):
    made = []
    for name, shards in SHARDS.items():
        rules = Dynamic(capacity=100, shards=shards)
        spec = TableSpec(name=name, dim=2, storage="dynamic", dynamic=rules, initializer=Uniform(bound=1.0))
        made.append(DynamicTable(spec, Grid(world_size, replicas), None))
    return made


def asked_of(random):
    """Ids of both tables, in one group."""
    parts = [np.unique(random.integers(-(2**63), 2**63 - 1, size)) for size in (40, 30)]
    ids = np.concatenate(parts)
    offsets = np.cumsum([0, *map(len, parts)])
    return Asked(ids, offsets, random.integers(1, 9, len(ids)).astype(np.uint32), is_frozen=False)


@pytest.mark.parametrize("world_size, replicas", [(1, 1), (3, 1), (4, 2)])
def test_every_id_goes_to_its_owner_in_every_replica_group_and_its_row_comes_back(world_size, replicas):
    random = np.random.default_rng(world_size)
    asked, router = asked_of(random), RequestRouter(tables(world_size, replicas), 0, world_size)
    ids, grid = asked.ids.copy(), Grid(world_size, replicas)
    sizes = router.count([asked])
    memory = np.zeros((world_size, 2, len(ids)), np.int64)
    totals = sizes.sum(axis=1)
    ids_at = memory.ctypes.data + memory.strides[0] * np.arange(world_size)
    router.fill([asked], sizes, ids_at, ids_at + memory.strides[1])
    for rank in range(world_size):
        member, begin = grid.place(rank)[1], 0
        for table, (name, shards) in enumerate(SHARDS.items()):
            own = slice(*asked.offsets[table : table + 2])
            here = shards_of(Dynamic(capacity=100, shards=shards), member, grid.shards)
            mine = np.isin(shard_of(name, ids[own], shards), here)
            end = begin + int(sizes[rank, table])
            assert memory[rank, 0, begin:end].tolist() == ids[own][mine].tolist()
            assert memory[rank, 1, begin:end].tolist() == asked.counts[own][mine].tolist()
            begin = end
        assert begin == totals[rank]
    memory[:, 0] ^= 77  # the rows of ids, where they were
    router.take([asked], ids_at)
    assert asked.ids.tolist() == (ids ^ 77).tolist()
    assert router.answers.tolist() == [grid.place(rank)[0] == 0 for rank in range(world_size)]


def test_a_rank_alone_answers_itself_however_much_it_asks():
    channel, router = LocalRequestChannel(), RequestRouter(tables(1, 1), 0, 1)
    for size in (3, 1000, 5):
        ids = np.arange(size)
        asked = Asked(ids.copy(), np.array([0, size, size]), np.ones(size, np.uint32), is_frozen=False)
        sizes = router.count([asked])
        request = BatchRequest(0, 0, sizes, router.answers, 0)
        arrived = channel.send(request, lambda *at, asked=asked, sizes=sizes: router.fill([asked], sizes, *at))
        assert array_at(int(arrived.columns_at[0][0]), np.int64, size).tolist() == ids.tolist()
        array_at(int(arrived.rows_at[0]), np.int64, size)[:] += 5
        has_failed, rows_at = channel.answer(failed=False)
        router.take([asked], rows_at)
        assert not has_failed
        assert asked.ids.tolist() == (ids + 5).tolist()
