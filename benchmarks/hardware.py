"""What the machine can do while all ranks work: how fast it copies, and how long a word takes from core to core."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch.distributed as dist

from rowmesh.mesh import Mesh, SharedBuffer
from rowmesh.ops.memory import Buffer
from rowmesh.ops.simd import (
    FLOAT32,
    kernel,
    load_acquire,
    load_i64,
    load_row,
    sched_yield,
    store_release,
    store_row,
    uncached_kernel,
)

_ROW_BYTES = 256
_SPINS = 10_000
_FLAG_BYTES = 128  # two cache lines: neighbours are prefetched in pairs


@kernel
def _copy(source, target, num_rows):
    for row in range(num_rows):
        store_row(target + row * 256, load_row(source + row * 256, 64, FLOAT32), FLOAT32)


@uncached_kernel
def _ping_pong(flags, rank, world_size, generation, rounds):
    """Every rank raises its flag and waits for all the others', over and over; returns the last generation."""
    for _ in range(rounds):
        generation += 1
        store_release(load_i64(flags + 8 * rank), generation)
        for other in range(world_size):
            spins = 0
            while load_acquire(load_i64(flags + 8 * other)) < generation:
                spins += 1
                if spins > _SPINS:
                    sched_yield()
    return generation


class CopyFloor:
    """How long a plain copy of so many bytes takes while all ranks copy, with the kernels' own loads and stores.

    The copy reads half of the bytes and writes the other half, so that they come from where a step's bytes come from: a
    cache while they fit, memory where they do not.

    Args:
        num_bytes: read and written together.
        barrier: waits for all ranks.
    """

    def __init__(self, num_bytes: int, barrier: Callable[[], None]) -> None:
        self._num_rows = max(num_bytes // (2 * _ROW_BYTES), 1)
        self._source, self._target = (Buffer(self._num_rows * _ROW_BYTES) for _ in range(2))
        self._source.bytes[:] = 1
        self._barrier = barrier

    def measure_s(self, times: int = 12) -> float:
        """Seconds of one copy on this rank, the median; all ranks call it."""
        seconds = []
        for _ in range(times):
            self._barrier()
            self._barrier()
            began = time.perf_counter()
            _copy(self._source.address, self._target.address, self._num_rows)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[2:])


class PingPong:
    """Latency between the cores that the ranks run on. Machines have states in which it differs by a factor of five."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._mine = SharedBuffer.create(_FLAG_BYTES)
        everyone: list[tuple[int, int]] = [(0, 0)] * mesh.world_size
        if mesh.group is not None:
            dist.all_gather_object(everyone, (os.getpid(), self._mine.descriptor), mesh.group)
        self._buffers = [
            self._mine if rank == mesh.rank else SharedBuffer.attach(pid, descriptor, _FLAG_BYTES, rank)
            for rank, (pid, descriptor) in enumerate(everyone)
        ]
        self._flags = np.array([buffer.address for buffer in self._buffers], np.int64)
        self._generation = 0
        self._run(10)

    def measure_ns(self, rounds: int = 400, times: int = 9) -> float:
        """Nanoseconds until every rank has seen every other's word, the median of several runs; all ranks call it."""
        nanoseconds = []
        for _ in range(times):
            began = time.perf_counter()
            self._run(rounds)
            nanoseconds.append((time.perf_counter() - began) / rounds * 1e9)
        return statistics.median(nanoseconds)

    def _run(self, rounds: int) -> None:
        mesh = self._mesh
        self._generation = _ping_pong(self._flags.ctypes.data, mesh.rank, mesh.world_size, self._generation, rounds)
