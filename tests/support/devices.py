"""Jobs whose rows are on devices."""

from __future__ import annotations

from collections import ChainMap

import pytest
import torch

from rowmesh import SparseBatch, TableSpec
from tests.support.training import merged, train
from tests.test_plans import assert_equal

NUM_GPUS = torch.cuda.device_count()


def train_on_device(ranks, scenario, transport="auto"):
    """What each rank left; all copies and replicas of a row are equal to the bit."""
    run = train_on_own if transport == "one_sided" else train
    how = (scenario, transport) if transport == "one_sided" else (scenario, transport, "cuda")
    parts = ranks.run(run, *how, world_size=scenario.world_size)
    assert transport in ("auto", *parts[0].transport.split("+"))
    assert_equal(scenario, parts, merged(scenario, parts))
    return parts


def assert_same_counts(mine, theirs):
    """What each table was asked for, on one rank."""
    for field in ("table_accesses", "table_distinct"):
        found, expected = ([getattr(counters, field) for counters in each.counters.values()] for each in (mine, theirs))
        assert dict(ChainMap(*found)) == dict(ChainMap(*expected))


def train_again(ranks, scenario):
    """By ranks that read each other where they can, else in the same way; always the same bits."""
    return train_on_device(ranks, scenario, "one_sided" if can_be_read(scenario.world_size) else "auto")


def can_be_read(world_size):
    """Whether devices of so many ranks could read each other: each has a GPU of its own, or all are interpreted."""
    return NUM_GPUS == 0 or world_size <= NUM_GPUS


# Of a test of ranks that read each other, at most four.
READ = pytest.mark.skipif(
    not can_be_read(4), reason="each of four ranks needs a GPU of its own, or all are interpreted"
)


def train_on_own(mesh, scenario, transport):
    """Each rank on a device of its own."""
    return train(mesh, scenario, transport, device_of(mesh))


def device_of(mesh):
    """This rank's own, where there are GPUs."""
    return f"cuda:{mesh.rank}" if NUM_GPUS else "cuda"


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
