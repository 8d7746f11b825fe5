"""The hash that checkpoints rely on never changes."""

import numpy as np

from rowmesh.tables.dynamic.hashing import seed_of, shard_of


def by_definition(table, i, num_shards):
    x = (i % 2**64) ^ seed_of(table)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return (x ^ (x >> 31)) % num_shards


def test_equals_its_definition_for_every_kind_of_id():
    ids = np.array([-(2**63), -1, 0, 1, 2**31, 2**32 + 7, 2**63 - 1])
    for num_shards in (1, 3, 1024):
        expected = [by_definition("user", i, num_shards) for i in ids.tolist()]
        assert shard_of("user", ids, num_shards).tolist() == expected


def test_tables_differ():
    ids = np.arange(1000)
    assert (shard_of("user", ids, 1024) != shard_of("item", ids, 1024)).mean() > 0.9
