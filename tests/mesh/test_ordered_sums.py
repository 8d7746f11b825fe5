"""Sums of core gradients: in the order of the ranks, the same bits everywhere."""

import pytest
import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.ordered_sums import CollectiveSums, SharedSums, is_scattered

COUNTS = {False: 1000, True: 40_000}  # elements of float64, of sums in one round and in two


def vector(rank, turn, count):
    return torch.randn(count, generator=torch.Generator().manual_seed(10 * turn + rank), dtype=torch.float64)


def add_up(mesh, kind, count):
    """The sums of four turns, and what was sent."""
    common = CommonCounters()
    if kind == "one_sided":
        sums = SharedSums(mesh, count, torch.float64)
    else:
        channel = Channel.between_hosts(mesh)
        if kind == "device":
            channel = Channel.between_devices(mesh, torch.device("cpu"))
        sums = CollectiveSums(mesh, channel, count, torch.float64, common)
    found = []
    for turn in range(4):
        mine = sums.begin()
        assert not mine.any(), "left from an earlier turn"
        mine[:count] = vector(mesh.rank, turn, count)
        found.append(sums.finish()[:count].clone())
    sums.barrier()
    sums.close()
    return found, (common.all_gathers, common.all_to_all_rounds, common.bytes_received), sums.num_bytes


@pytest.mark.parametrize("kind", ["collective", "one_sided", "device"])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_are_in_the_order_of_the_ranks(ranks, kind, scattered, world_size):
    count = COUNTS[scattered]
    assert is_scattered(8 * count, world_size) == (scattered and world_size > 2)
    for found, _, num_bytes in ranks.run(add_up, kind, count, world_size=world_size):
        for turn, mine in enumerate(found):
            expected = vector(0, turn, count)
            for rank in range(1, world_size):
                expected = expected + vector(rank, turn, count)
            assert torch.equal(mine, expected)
        assert num_bytes >= 2 * 8 * count


def test_messages_are_counted(ranks):
    """One round of the whole of every other rank, or two of a part to and from each."""
    padded = {key: 8 * -(-count // 256) * 256 for key, count in COUNTS.items()}
    for kind in ("collective", "device"):
        gathered, scattered = (ranks.run(add_up, kind, COUNTS[key], world_size=4)[0][1] for key in (False, True))
        assert gathered == (4, 0, 4 * 3 * padded[False])
        assert scattered == (4, 4, 4 * 2 * 3 * padded[True] // 4)
