"""Jobs whose rows are on devices."""

from __future__ import annotations

from collections import ChainMap

from rowmesh import SparseBatch, TableSpec
from tests.support.training import merged, train
from tests.test_plans import assert_equal


def train_on_device(ranks, scenario, transport="auto"):
    """What each rank left; all copies and replicas of a row are equal to the bit."""
    parts = ranks.run(train, scenario, transport, "cuda", world_size=scenario.world_size)
    assert_equal(scenario, parts, merged(scenario, parts))
    return parts


def assert_same_counts(mine, theirs):
    """What each table was asked for, on one rank."""
    for field in ("table_accesses", "table_distinct"):
        found, expected = ([getattr(counters, field) for counters in each.counters.values()] for each in (mine, theirs))
        assert dict(ChainMap(*found)) == dict(ChainMap(*expected))


def two_tables(**options):
    return [TableSpec(name="a", num_rows=9, dim=3, **options), TableSpec(name="b", num_rows=4, dim=3)]


def batch(**bags):
    """Of both tables."""
    return SparseBatch.from_bags({"a": [[1], [2, 8]], "b": [[3], []]} | bags)


def push_on_some(embeddings, optimizer, rank):
    """Two steps: rank 0 uses both of two look-ups, the others the second alone."""
    for _ in range(2):
        first, second = embeddings(batch()), embeddings(batch(a=[[7], [rank]]))
        if rank == 0:
            first.values.square().sum().backward()
        second.values.square().sum().backward()
        optimizer.step()
