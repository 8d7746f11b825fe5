"""Sums of vectors that are sent in parts."""

import pytest
import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.mesh.bucketed_sums import BucketedSums
from rowmesh.mesh.channel import Channel

BOUNDS = [0, 5, 5, 6, 23]


def vector(rank, turn):
    return torch.randn(23, generator=torch.Generator().manual_seed(10 * turn + rank)) * 10.0**rank


def summed(mesh):
    counters = CommonCounters()
    sums = BucketedSums(Channel.between_hosts(mesh), BOUNDS, torch.float32, counters, "vectors")
    totals = []
    for turn in range(3):
        mine, total = vector(mesh.rank, turn), torch.full((23,), float("nan"))
        for bucket in (3, 1, 0, 2):
            sums.post(bucket, mine)
        mine.fill_(float("nan"))  # it may change once it was posted
        sums.finish(total)
        totals.append(total)
    return torch.stack(totals).tolist(), counters.all_to_all_rounds, counters.all_gathers


@pytest.mark.parametrize("world_size", [2, 3])
def test_vectors_are_added_in_the_order_of_the_ranks(ranks, world_size):
    expected = []
    for turn in range(3):
        total = vector(0, turn)
        for rank in range(1, world_size):
            total = total + vector(rank, turn)
        expected.append(total.tolist())
    for found, rounds, gathers in ranks.run(summed, world_size=world_size):
        assert found == expected
        assert (rounds, gathers) == (12, 12)
