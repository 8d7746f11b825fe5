"""Messages: which bytes go to whom."""

import itertools

import numpy as np
import pytest

from rowmesh.exchange.messages import Parts


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("begin", [0, 8])
def test_parts_leave_out_the_ranks_own(world_size, begin):
    """At either end; in the middle it stays, since a message is one piece of memory."""
    bounds = [0, *np.cumsum([3, 1, 4, 2][:world_size]).tolist()]
    buffer = np.arange(begin + 2 * bounds[-1], dtype=np.uint8)
    for rank in range(world_size):
        parts = Parts(buffer, begin, bounds, item_bytes=2)
        message, sizes = parts.trimmed(rank)
        is_at_an_end = rank in (0, world_size - 1)
        assert sizes == [
            0 if other == rank and is_at_an_end else 2 * (b - a)
            for other, (a, b) in enumerate(itertools.pairwise(bounds))
        ]
        assert message.numel() == sum(sizes)
        at = 0
        for other, size in enumerate(sizes):
            expected = buffer[begin + 2 * bounds[other] :][:size]
            assert message[at : at + size].tolist() == expected.tolist()
            at += size
        assert parts.num_bytes(rank) == 2 * bounds[-1] - 2 * (bounds[rank + 1] - bounds[rank])


def test_parts_without_bytes():
    message, sizes = Parts(np.zeros(0, np.uint8), 0, [0, 0, 0], 4).trimmed(1)
    assert (message.numel(), sizes) == (0, [0, 0])
