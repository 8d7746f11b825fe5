"""The barrier in shared memory: it lets no rank through early, and names missing ranks."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rowmesh.errors import PeerError
from rowmesh.mesh import Mesh
from rowmesh.mesh.barrier import FUTEX, Barrier
from tests.support.threads import in_threads

SLEEPS = pytest.mark.parametrize("futex", [FUTEX, 0], ids=["futex", "naps"])


def barriers(world_size, timeout_s=30.0, pids=None, futex=FUTEX):
    board = np.zeros((world_size, 8), np.int64)
    flags = np.array([board[rank].ctypes.data for rank in range(world_size)], np.int64)
    pids = pids or (os.getpid(),) * world_size
    meshes = [Mesh(rank, world_size, (0,) * world_size, pids, timeout_s) for rank in range(world_size)]
    return [Barrier(mesh, flags.ctypes.data, futex) for mesh in meshes], (board, flags)


@SLEEPS
@pytest.mark.parametrize("world_size", [2, 3])
def test_no_rank_passes_before_all_have_come(world_size, futex):
    parts, keep = barriers(world_size, futex=futex)
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


def test_time_in_which_a_rank_stood_still_does_not_count(monkeypatch):
    """Ranks that were stopped together, and continued, go on, however long that was."""
    parts, (board, _flags) = barriers(2, timeout_s=5.0)
    clock_s, looks = [0.0], []

    def look(mesh):
        looks.append(clock_s[0])
        clock_s[0] += 1000.0  # as if this process had been stopped since
        if len(looks) == 3:
            board[1, 0] = 1
        return []

    monkeypatch.setattr(Mesh, "dead_ranks", look)
    monkeypatch.setattr("rowmesh.mesh.interruptible.time.monotonic", lambda: clock_s[0])
    parts[0].wait()
    assert looks == [0.0, 1000.0, 2000.0]


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


def test_a_waiting_rank_can_be_cancelled():
    parts, keep = barriers(2)
    parts[0]._mesh.cancellation.event = event = threading.Event()
    timer = threading.Timer(0.2, event.set)
    timer.start()
    with pytest.raises(PeerError, match="rank 0: stopped waiting for the others: something else failed"):
        parts[0].wait()
    timer.join()
    del keep


def cancel(barrier):
    """Has a rank stop waiting; returns when it did."""
    barrier._mesh.cancellation.event = event = threading.Event()
    event.set()
    me = f"rank {barrier._mesh.rank}"
    with pytest.raises(PeerError, match=f"{me}: stopped waiting for the others: something else failed"):
        barrier.wait()


class Waiter(threading.Thread):
    """Waits at a barrier, and keeps what was raised."""

    def __init__(self, barrier):
        super().__init__()
        self.barrier, self.error = barrier, ""
        self.start()

    def run(self):
        try:
            self.barrier.wait()
        except PeerError as error:
            self.error = str(error)

    def state(self):
        """As the kernel sees it: "R" where it runs or would like to, "S" where it sleeps."""
        stat = Path(f"/proc/self/task/{self.native_id}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]


@SLEEPS
def test_a_rank_that_waits_for_long_sleeps(futex):
    """One that yields for ever takes the processor from the rank that it waits for."""
    parts, (board, _flags) = barriers(2, futex=futex)
    waiter = Waiter(parts[0])
    try:
        in_a_row, deadline = 0, time.monotonic() + 20.0
        while in_a_row < 10:
            in_a_row = in_a_row + 1 if waiter.state() == "S" else 0
            assert time.monotonic() < deadline, "it never sleeps"
            time.sleep(0.002)
    finally:
        parts[1].wait()
        waiter.join()
    assert waiter.error == ""
    assert not board[:, 1].any(), "no rank is counted as asleep"


@pytest.mark.skipif(not FUTEX, reason="there are no futexes")
def test_a_sleeping_rank_is_woken():
    """At once: by itself it would look after 100 ms."""
    parts, (board, _flags) = barriers(2)
    delays_s = []
    for _ in range(5):
        waiter = Waiter(parts[0])
        while not board[1, 1]:  # it is counted as asleep on the flag of rank 1
            time.sleep(0.001)
        began = time.monotonic()
        parts[1].wait()
        waiter.join()
        delays_s.append(time.monotonic() - began)
    assert min(delays_s) < 0.05


def test_a_rank_that_comes_too_late_does_not_go_on():
    """The others have left the step, so that it is over for all."""
    parts, keep = barriers(3, timeout_s=0.2)
    waiters = [Waiter(parts[rank]) for rank in (0, 2)]
    for waiter in waiters:
        waiter.join()
    for rank, waiter in zip((0, 2), waiters, strict=True):
        assert waiter.error.startswith(f"rank {rank}: waited in vain for rank 1 (process {os.getpid()}, alive); every")
    with pytest.raises(PeerError, match=r"rank 1: rank 0 \(process \d+, alive\), rank 2 \(.*\) stopped waiting"):
        parts[1].wait()
    for rank, cause in ((0, "rank 0: waited in vain for rank 1"), (1, "rank 1: rank 0 .* stopped waiting")):
        with pytest.raises(PeerError, match=rf"make their EmbeddingCollection anew and load a checkpoint \({cause}"):
            parts[rank].wait()
    del keep


def test_a_rank_that_is_on_its_way_is_not_blamed_for_one_that_left():
    parts, keep = barriers(3, timeout_s=3600.0)
    cancel(parts[1])
    with pytest.raises(
        PeerError, match=r"^rank 0: rank 1 \(.*\) stopped waiting; .*; rank 2 \(.*\) had not come by then"
    ):
        parts[0].wait()
    del keep


def test_a_rank_that_leaves_while_another_waits_for_a_third_ends_that_wait():
    """It may have looked at the flag of the rank that left before it left."""
    parts, (board, _flags) = barriers(3)
    waiter = Waiter(parts[2])  # for rank 1: rank 0 has come
    board[0, 0] = 1
    while not board[1, 1] and FUTEX:
        time.sleep(0.001)
    board[0, 2] = 1  # leaves
    board[1, 0] = 1
    waiter.join()
    assert "stopped waiting" in waiter.error


def test_a_wait_for_a_rank_that_left_ends_at_once():
    parts, keep = barriers(2, timeout_s=3600.0)
    cancel(parts[1])
    with pytest.raises(PeerError, match=r"rank 0: rank 1 \(process \d+, alive\) stopped waiting; its own output says"):
        parts[0].wait()
    del keep
