"""Channels: what arrives, what is counted, and what a rank's own part costs."""

import pytest
import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel, _without

DTYPES = [torch.int32, torch.float32, torch.uint8]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_ranks_own_part_is_left_out_at_either_end(world_size):
    """In the middle it stays, since a message is one piece of memory."""
    sizes = [3, 1, 4, 2][:world_size]
    rows = torch.arange(sum(sizes)).view(-1, 1)
    for rank in range(world_size):
        left = list(sizes)
        message = _without(rows, left, rank)
        assert left == [0 if k == rank and rank in (0, world_size - 1) else size for k, size in enumerate(sizes)]
        parts = dict(enumerate(rows.split(sizes)))
        kept = torch.cat([part for k, part in parts.items() if left[k]])
        assert message.tolist() == kept.tolist()


def exchange(mesh, dtype, copies_own, is_direct):
    """Each rank sends (its number + k) rows to rank k, with values by sender and receiver; a second mesh group."""
    group = mesh.subgroup([range(mesh.world_size)], "testing") if is_direct else mesh.group
    channel = Channel(mesh, group, mesh.rank, mesh.world_size, is_direct=is_direct)
    size, me, counters = mesh.world_size, mesh.rank, CommonCounters()
    sizes_out, sizes_in = [me + k for k in range(size)], [k + me for k in range(size)]
    out = torch.cat([torch.full((n, 2), 10 * me + k, dtype=dtype) for k, n in enumerate(sizes_out)])
    into = torch.full((sum(sizes_in), 2), 99, dtype=dtype)
    came = channel.post(out, sizes_out, sizes_in, counters, "testing", into, copies_own=copies_own).wait()
    for k, part in enumerate(came.split(sizes_in)):
        if k != me or copies_own:
            assert (part == 10 * k + me).all(), (k, part)
    num_bytes = 2 * dtype.itemsize * sum(n for k, n in enumerate(sizes_out) if k != me)
    assert (counters.all_to_all_rounds, counters.bytes_sent) == (1, num_bytes)
    before = counters.bytes_sent
    one = torch.zeros(2, 1, dtype=dtype).T[:1].contiguous()  # whose stride says nothing
    mine = [int(k == (me + 1) % size) for k in range(size)]
    theirs = [int(me == (k + 1) % size) for k in range(size)]
    channel.post(one, mine, theirs, counters, "testing", copies_own=copies_own).wait()
    assert counters.bytes_sent - before == one.nbytes
    everyone = channel.post_gather(out[:1] if len(out) else torch.full((1, 2), 7, dtype=dtype), counters, "testing")
    assert everyone.wait().shape == (size, 2)
    equal = channel.exchange_equal(torch.arange(size) + 10 * me, counters, "testing")
    assert equal.tolist() == [10 * k + me for k in range(size)]


@pytest.mark.parametrize("is_direct", [False, True])
@pytest.mark.parametrize("copies_own", [False, True])
def test_what_is_sent_arrives(ranks, copies_own, is_direct):
    for dtype in DTYPES:
        ranks.run(exchange, dtype, copies_own, is_direct, world_size=3)


def test_a_rank_alone_has_its_own():
    channel, counters = Channel.between_hosts(Mesh()), CommonCounters()
    rows = torch.arange(6.0).view(3, 2)
    assert channel.post(rows, [3], [3], counters, "testing").wait().tolist() == rows.tolist()
    assert channel.exchange_equal(rows[:1], counters, "testing").tolist() == rows[:1].tolist()
    assert channel.post_gather(rows, counters, "testing").wait().tolist() == rows.tolist()
    assert counters == CommonCounters()
