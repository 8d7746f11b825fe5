"""Direct messages: they may come late, and a wait for them can be cancelled."""

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from rowmesh._support.counters import CommonCounters
from rowmesh.errors import PeerError
from rowmesh.mesh.channel import Channel
from tests.support.ranks import RankPool


@pytest.fixture
def pool():
    """Of its own, since broken connections stay broken."""
    ranks = RankPool()
    yield ranks
    ranks.close()


def channel_of(mesh):
    group = mesh.subgroup([range(mesh.world_size)], "rows")
    return Channel(mesh, group, mesh.rank, mesh.world_size, is_direct=True)


def exchange(channel, mesh, number, sizes):
    """Sends each member its number, as often as `sizes` says by sender and receiver; checks what comes."""
    counters = CommonCounters()
    mine, theirs = sizes[mesh.rank], [row[mesh.rank] for row in sizes]
    out = torch.full((sum(mine),), 10 * mesh.rank + number % 10, dtype=torch.uint8)
    into = torch.full((sum(theirs),), 255, dtype=torch.uint8)
    channel.post(out, mine, theirs, counters, "testing", into, copies_own=False).wait()
    for member, came in enumerate(into.split(theirs)):
        if member != mesh.rank:
            assert came.tolist() == [10 * member + number % 10] * theirs[member]


def exchange_often(mesh, delay_s):
    """Exchanges of many sizes, empty ones too; before the third, rank 1 takes its time."""
    channel = channel_of(mesh)
    for number in range(30):
        if number == 2 and mesh.rank == 1:
            time.sleep(delay_s)
        size = mesh.world_size
        sizes = [[(3 * a + b + number) % 4 * (number % 3) for b in range(size)] for a in range(size)]
        exchange(channel, mesh, number, sizes)
    return mesh.liveness.absent()


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_that_comes_late_breaks_nothing(pool, world_size):
    """Later than anybody waits at a time."""
    assert pool.run(exchange_often, 2.5, world_size=world_size) == [[*range(world_size)]] * world_size


def wait_in_vain(mesh, gives_up):
    """Rank 1 sends nothing; the others end in time, and so do their threads."""
    done = mesh.subgroup([range(mesh.world_size)], "gradients")
    channel = channel_of(mesh if gives_up else replace(mesh, timeout_s=1.0))
    mesh.cancellation.event = event = threading.Event()
    message, began = "", time.monotonic()
    if gives_up:
        threading.Timer(0.5, event.set).start()
    if mesh.rank == 1:
        dist.barrier(done)
        return message, 0.0, 0
    try:
        exchange(channel, mesh, 0, [[4] * mesh.world_size] * mesh.world_size)
    except PeerError as error:
        message = str(error)
    elapsed_s = time.monotonic() - began
    del channel
    deadline = time.monotonic() + 3
    while (left := _messengers()) and time.monotonic() < deadline:
        time.sleep(0.05)
    dist.barrier(done)
    return message, elapsed_s, left


def _messengers():
    return sum(thread.name == "rowmesh messages" for thread in threading.enumerate())


@pytest.mark.parametrize("gives_up", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_waiting_in_vain(pool, gives_up):
    left = pool.run(wait_in_vain, gives_up, world_size=2)
    message, elapsed_s, threads = left[0]
    if gives_up:
        assert message == "stopped testing: something else failed"
    else:
        assert message.startswith("rank 0: waited in vain for rank 1 (process")
    assert elapsed_s < 5
    assert threads == 0
