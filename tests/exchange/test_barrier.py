"""The barrier in shared memory: nobody is let through early, and who is missing is named."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from rowmesh.errors import PeerError
from rowmesh.exchange.barrier import Barrier
from rowmesh.mesh import Mesh
from tests.support.threads import in_threads


def barriers(world_size, timeout_s=30.0, pids=None):
    board = np.zeros((world_size, 8), np.int64)
    flags = np.array([board[rank].ctypes.data for rank in range(world_size)], np.int64)
    pids = pids or (os.getpid(),) * world_size
    meshes = [Mesh(rank, world_size, (0,) * world_size, pids, timeout_s) for rank in range(world_size)]
    return [Barrier(mesh, flags.ctypes.data) for mesh in meshes], (board, flags)


@pytest.mark.parametrize("world_size", [2, 3])
def test_nobody_passes_before_all_have_come(world_size):
    parts, keep = barriers(world_size)
    counts, wrong = [0] * world_size, []

    def run(rank):
        for number in range(1, 200):
            counts[rank] = number
            parts[rank].wait()
            if min(counts) < number:
                wrong.append((rank, number, list(counts)))
            parts[rank].wait()

    in_threads(run, world_size)
    assert not wrong
    assert counts == [199] * world_size
    del keep


def test_names_the_rank_that_is_late():
    parts, keep = barriers(3, timeout_s=0.2)
    keep[0][1, 0] = 1  # rank 1 has come, rank 2 has not
    with pytest.raises(PeerError, match=r"rank 0: waited in vain for rank 2 \(process \d+, alive\); every rank must"):
        parts[0].wait()


def test_names_the_rank_that_died():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    parts, _keep = barriers(2, pids=(os.getpid(), process.pid))
    with pytest.raises(PeerError, match=rf"rank 0: rank 1 \(process {process.pid}\) died"):
        parts[0].wait()


def test_a_rank_that_came_and_left_is_not_missed(monkeypatch):
    """A peer may pass the last barrier and exit while this rank looks whether it is alive."""
    parts, (board, _flags) = barriers(2)

    def come_and_die(mesh):
        board[1, 0] = 1
        return [1]

    monkeypatch.setattr(Mesh, "dead_ranks", come_and_die)
    parts[0].wait()


def test_whoever_waits_can_give_up():
    parts, keep = barriers(2)
    parts[0]._mesh.cancellation.event = event = threading.Event()
    timer = threading.Timer(0.2, event.set)
    timer.start()
    with pytest.raises(PeerError, match="rank 0: gave up waiting for the others: something else failed"):
        parts[0].wait()
    timer.join()
    del keep
