"""A barrier in shared memory that yields, then sleeps: 4–10 µs where a collective barrier takes 80–150.

[Note: waiting]

A rank that waits spins about 200 times, yields for a millisecond, then sleeps until the rank it waits for comes.

*Yields* meet the usual case, in which the others come within microseconds. They are bounded by time, not counted: where
other processes use the core, one yield may take a whole time slice (2 to 6 ms, measured), and 20,000 of them minutes.

*Sleep* is for the others. A rank that yields for ever is always ready to run. Schedulers and quotas that divide the
processor between groups of processes (sessions, containers) charge that to the group of all ranks, and so to the one
that is waited for.

It sleeps on the flag of the rank that has not come (a futex, which Linux finds by file and offset: processes need not
map it at the same address), and that rank wakes it. Where there are no futexes it naps for up to a millisecond.
Ten times a second it looks whether the others are alive.

*A rank that stops waiting* says so beside its flag. A rank that comes later reads it there and stops too, instead of
going on with a step that the others have left. No rank knows which rows were updated, so the barrier cannot be used
again.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time
from typing import NoReturn

import numpy as np
from numba import types

from rowmesh.errors import PeerError
from rowmesh.mesh import Mesh
from rowmesh.mesh.interruptible import Stopwatch
from rowmesh.ops.memory import array_at
from rowmesh.ops.simd import (
    add_atomic,
    c_function,
    exchange_atomic,
    inlined,
    kernel,
    load_acquire,
    load_i64,
    load_ordered,
    sched_yield,
    store_i64,
)

_SPINS = 200  # then give the core away: a pure spin stalls where ranks outnumber cores
_YIELD_NS = 1_000_000  # then sleep
_LOOK_NS = 100_000_000  # then back to Python, to see whether the peers are alive
_FIRST_NAP_US, _LONGEST_NAP_US = 50, 1000  # where there are no futexes

# Places in the cache line of a rank, in bytes behind its flag: how many sleep on it; the generation at which this rank
# left; the step in which it failed.
_SLEEPERS, _LEFT_AT, _FAILED_IN = 8, 16, 24
_ALL_CAME, _LEFT = -1, -2

_NO_FUTEX = 0
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # of the system call
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_EVERYONE = 2**31 - 1

_usleep = c_function("usleep", types.int32, types.int64)
_clock_gettime = c_function("clock_gettime", types.int32, types.int64, types.int64)
_syscall = c_function("syscall", types.int64, *[types.int64] * 7)
_MONOTONIC = getattr(time, "CLOCK_MONOTONIC", 1)  # Windows has none, and no barrier in shared memory


def _find_futex() -> int:
    """The number of the system call, or 0 where there is none that works."""
    number = _FUTEX_NUMBERS.get(platform.machine(), _NO_FUTEX)
    if sys.platform != "linux" or sys.byteorder != "little" or not number:
        return _NO_FUTEX
    call, word = ctypes.CDLL(None).syscall, ctypes.c_int64()
    address = ctypes.c_void_p(ctypes.addressof(word))
    return number if call(number, address, _FUTEX_WAKE, 1, None, None, 0) == 0 else _NO_FUTEX


FUTEX = _find_futex()


@inlined
def _now(clock):
    """Nanoseconds."""
    _clock_gettime(_MONOTONIC, clock)
    return 1_000_000_000 * load_i64(clock) + load_i64(clock + 8)


@inlined
def _raise_flag(line, generation, futex):
    """Raises the flag of this rank, and wakes the ranks that sleep on it."""
    exchange_atomic(line, generation)  # a rank that falls asleep counts itself, then looks at the flag once more
    if futex and load_ordered(line + _SLEEPERS) > 0:
        _syscall(futex, line, _FUTEX_WAKE, _EVERYONE, 0, 0, 0)


@inlined
def _sleep(line, generation, futex, naps, clock):
    """Until the flag of a rank is raised, or it is time to look."""
    if futex:
        add_atomic(line + _SLEEPERS, 1)
        seen = load_ordered(line)
        if seen < generation:
            store_i64(clock, 0)
            store_i64(clock + 8, _LOOK_NS)
            _syscall(futex, line, _FUTEX_WAIT, seen & 0xFFFFFFFF, clock, 0, 0)
        add_atomic(line + _SLEEPERS, -1)
    else:
        _usleep(min(_FIRST_NAP_US << min(naps, 10), _LONGEST_NAP_US))


@kernel
def _wait(flags, rank, world_size, generation, futex, clock):
    """−1 once every flag has reached the generation, −2 if one of those ranks has left, else a rank to wait for."""
    own = load_i64(flags + 8 * rank)
    if load_i64(own) != generation:
        _raise_flag(own, generation, futex)
    rounds = naps = began = now = 0
    for other in range(world_size):
        line = load_i64(flags + 8 * other)
        while load_acquire(line) < generation:
            rounds += 1
            if rounds <= _SPINS:
                continue
            if began == 0:
                began = _now(clock)
            if now - began < _YIELD_NS:
                sched_yield()
            else:
                _sleep(line, generation, futex, naps, clock)
                naps += 1
            now = _now(clock)
            if now - began > _LOOK_NS:
                return other
    for other in range(world_size):  # now: one may have left while this rank waited for another
        if load_i64(load_i64(flags + 8 * other) + _LEFT_AT) != 0:
            return _LEFT
    return _ALL_CAME


class Barrier:
    """Counts generations: every rank raises its flag and waits for the others. See [Note: waiting].

    Args:
        mesh: the ranks.
        flags: address of int64 `[W]`, the address of every rank's flag: four int64, zeros, in a cache line of its own.
        futex: the number of the system call, or 0 to nap.
    """

    def __init__(self, mesh: Mesh, flags: int, futex: int = FUTEX) -> None:
        self._mesh = mesh
        self._flags = flags
        self._futex = futex
        self._generation = 0
        self._reason = ""  # why this rank left
        self._clock = np.zeros(2, np.int64)  # room for a time
        self._clock_at = self._clock.ctypes.data
        self._lines = [array_at(int(line), np.int64, 4) for line in array_at(flags, np.int64, mesh.world_size)]

    def wait(self) -> None:
        """Blocks until every rank has come.

        Raises:
            PeerError: a rank died, did not come within the mesh's timeout, or stopped waiting; names it. Or the
                mesh's cancellation was set. No rank can pass this barrier any more.
        """
        if self._reason:
            raise PeerError(
                f"rank {self._name}: a step of these tables ended half way, so they cannot be used any more; make "
                f"their EmbeddingCollection anew and load a checkpoint ({self._reason})"
            )
        self._generation += 1
        began_s = time.monotonic()
        mesh = self._mesh  # `_missing`, without a call: every step comes here twice
        if _wait(self._flags, mesh.rank, mesh.world_size, self._generation, self._futex, self._clock_at) != _ALL_CAME:
            self._wait_long(Stopwatch(_LOOK_NS / 1e9, began_s))

    def fail(self, step: int) -> None:
        """Notes that this rank failed in a step: ranks that wait here, now or later, stop and say so."""
        line = self._lines[self._mesh.rank]
        if not line[_LEFT_AT // 8]:
            line[_FAILED_IN // 8] = step
            line[_LEFT_AT // 8] = max(self._generation, 1)
        self._reason = self._reason or f"step {step} failed here"

    @property
    def _name(self) -> int:
        return self._mesh.name(self._mesh.rank)

    def _missing(self) -> int:
        """Waits for a while; −1 once all have come, −2 if one of them left, else a rank that has not come."""
        mesh = self._mesh
        return _wait(self._flags, mesh.rank, mesh.world_size, self._generation, self._futex, self._clock_at)

    def _wait_long(self, watch: Stopwatch) -> None:
        self._look(watch)
        while self._missing() != _ALL_CAME:
            self._look(watch)

    def _look(self, watch: Stopwatch) -> None:
        """Raises PeerError where waiting is in vain."""
        waited_s = watch.read()
        mesh, me = self._mesh, f"rank {self._name}"
        flags = [line[0] for line in self._lines]
        left = [mesh.name(rank) for rank, line in enumerate(self._lines) if line[_LEFT_AT // 8]]
        dead = [rank for rank in mesh.dead_ranks() if rank not in left]
        # A rank may come and end its run between these two looks; then it is not missed.
        if dead and self._missing() >= 0:
            self._leave(mesh.processes.died(dead, "the others waited, or left the program before them"))
        if mesh.cancellation.is_set:
            self._leave(PeerError(f"{me}: stopped waiting for the others: something else failed"))
        absent = [mesh.name(rank) for rank, flag in enumerate(flags) if flag < self._generation]
        absent = [name for name in absent if name not in left]
        if absent and waited_s > mesh.timeout_s:
            self._leave(PeerError(f"{me}: {mesh.not_come(absent, watch)}"))
        failed = {mesh.name(rank): line[_FAILED_IN // 8] for rank, line in enumerate(self._lines)}
        if failed := {rank: int(step) for rank, step in failed.items() if step}:
            which = ", ".join(f"rank {rank} failed in step {step}" for rank, step in failed.items())
            self._leave(PeerError(f"{me}: {which}, which all ranks had agreed on; its own output says why"))
        if mesh.failures.find():
            self._leave(PeerError(f"{me}: stopped waiting for the others: {mesh.failures.find()}"))
        if left:
            also = f"; {mesh.processes.describe(absent)} had not come by then" if absent else ""
            self._leave(
                PeerError(f"{me}: {mesh.processes.describe(left)} stopped waiting; its own output says why{also}")
            )

    def _leave(self, error: PeerError) -> NoReturn:
        """Marks this rank as gone for all others, and raises the error."""
        self._lines[self._mesh.rank][_LEFT_AT // 8] = self._generation
        self._reason = str(error)
        raise error
