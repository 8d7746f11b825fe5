"""Cache memory: the rows of a cache in the memory where kernels use them, and how they get there and back.

Rows in the host's memory are read and written in place. Rows in a device's memory go through staging buffers,
beside the computation: see [Note: copies beside the computation] in `rowmesh.ops.streams`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.memory import Buffer
from rowmesh.ops.streams import Mark, Stream
from rowmesh.tables.dense import DenseArena
from rowmesh.tables.group import TableGroup
from rowmesh.tables.row_arrays import RowArrays

CHUNK = 4096  # records that are read, or written back, in one go: bounds the buffers, and how long the lock is held


class Uses:
    """Which kernels used each cache slot last.

    Args:
        num_cache_slots: how many.
        begin: when their memory may be used.
    """

    def __init__(self, num_cache_slots: int, begin: Mark) -> None:
        self._last = np.zeros(num_cache_slots, np.int64)  # number of the last use
        self._pending = deque([(0, begin)])  # that may not have passed yet
        self._number = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers."""
        return self._last.nbytes

    def note(self, cache_slots: np.ndarray, mark: Mark) -> None:
        """Cache slots were used by all that was launched before a mark."""
        with self._lock:
            self._number += 1
            self._last[cache_slots] = self._number
            self._pending.append((self._number, mark))

    def of(self, cache_slots: np.ndarray) -> list[Mark]:
        """Marks to wait for before cache slots are copied: those of their last use, and of all uses before it."""
        with self._lock:
            while self._pending and self._pending[0][1].has_passed:
                self._pending.popleft()
            last = self._last[cache_slots].max(initial=-1)
            return [mark for number, mark in self._pending if number <= last]


class CacheMemory:
    """Rows, their state and their versions by cache slot.

    Args:
        group: the tables.
        num_cache_slots: how many rows.
        verify: whether versions are kept; the host keeps them.
        device: whose memory; None: the host's.
        streams: makes streams of the device.

    Attributes:
        arena: rows and state, cache slots for slots.
        versions: uint32 `[num_cache_slots]`, or None.
        record_bytes: of a row, its state and its version.
        in_place: the rows themselves, where the host reads and writes them; else None.
        uses: of cache slots in a device's memory; None where kernels have run when they return.

    Raises:
        ConfigurationError: there are more cache slots than kernels can tell apart.
        MemoryError: the device has no room.
    """

    def __init__(
        self,
        group: TableGroup,
        num_cache_slots: int,
        verify: bool,
        device: torch.device | None,
        streams: type[Stream],
    ) -> None:
        self.arena = DenseArena(group, num_cache_slots, device)
        self.versions = np.zeros(num_cache_slots, np.uint32) if verify else None
        self._tensors, self._streams = (self.arena.rows, *self.arena.state.values()), streams
        self.in_place: RowArrays | None = None
        self.uses: Uses | None = None
        if device is None:
            self.in_place = RowArrays(self.arena.rows, self.arena.state, self.versions)
            self.record_bytes = self.in_place.record_bytes
            return
        self.record_bytes = RowArrays.empty(group, 1, verify).record_bytes
        self._inward, self._outward = streams.new(device), streams.new(device)
        self.uses = Uses(num_cache_slots, self.current().mark())

    @property
    def num_bytes(self) -> int:
        """Memory beside that of rows, state and versions."""
        return 0 if self.uses is None else self.uses.num_bytes

    def current(self) -> Stream:
        """The stream of the computation."""
        return self._streams.current(self.arena.device)

    def marks(self) -> tuple[Mark, ...]:
        """All copies so far; none, where rows are copied at once."""
        return () if self.uses is None else (self._inward.mark(), self._outward.mark())

    def wait(self) -> None:
        """The host waits for all copies."""
        for mark in self.marks():
            mark.wait()

    def put(self, stage: Stage, cache_slots: np.ndarray) -> None:
        """Begins to copy staged rows into cache slots, when what used these has run."""
        count = stage.aim(cache_slots)
        if self.versions is not None and stage.arrays.versions is not None:
            self.versions[cache_slots] = stage.arrays.versions[:count]

        def copy() -> None:
            index = stage.index[:count].to(self.arena.device, non_blocking=True)
            for rows, staged in zip(self._tensors, stage.tensors, strict=True):
                rows.index_copy_(0, index, staged[:count].to(self.arena.device, non_blocking=True))

        self._inward.wait_for(self._uses_of(cache_slots))
        self._inward.run(copy)
        stage.mark = self._inward.mark()

    def take(self, stage: Stage, cache_slots: np.ndarray) -> None:
        """Begins to copy the rows of cache slots out, as what was launched so far leaves them."""
        count = stage.aim(cache_slots)
        if self.versions is not None and stage.arrays.versions is not None:
            stage.arrays.versions[:count] = self.versions[cache_slots]

        def copy() -> None:
            index = stage.index[:count].to(self.arena.device, non_blocking=True)
            for rows, staged in zip(self._tensors, stage.tensors, strict=True):
                staged[:count].copy_(rows.index_select(0, index), non_blocking=True)

        self._outward.wait_for([*self._uses_of(cache_slots), self._inward.mark()])
        self._outward.run(copy)
        stage.mark = self._outward.mark()

    def poison(self, cache_slots: np.ndarray) -> None:
        """Leaves NaN in cache slots, when what used them has run; for tests, as their numbers are not pinned memory."""
        index = torch.from_numpy(cache_slots.astype(np.int64))

        def fill() -> None:
            for tensor in self._tensors:
                tensor.index_fill_(0, index.to(self.arena.device), torch.nan)

        if self.uses is None:
            fill()
            return
        self._inward.wait_for(self._uses_of(cache_slots))
        self._inward.run(fill)

    def _uses_of(self, cache_slots: np.ndarray) -> list[Mark]:
        return [] if self.uses is None else self.uses.of(cache_slots)


class Stage:
    """A staging buffer: the rows of a chunk on the host, on their way to cache slots or back.

    Attributes:
        arrays: CHUNK rows and their state.
        tensors: of the arrays, without versions.
        index: int64 `[CHUNK]`: the cache slots.
        mark: of the last copy to or from it.
    """

    def __init__(self, memory: CacheMemory) -> None:
        def room(like: Tensor) -> Tensor:
            shape, is_pinned = (CHUNK, *like.shape[1:]), memory.arena.device.type == "cuda"
            return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=is_pinned)

        rows, state = room(memory.arena.rows), {name: room(tensor) for name, tensor in memory.arena.state.items()}
        self.arrays = RowArrays(rows, state, None if memory.versions is None else np.zeros(CHUNK, np.uint32))
        self.tensors = rows, *state.values()
        self.index = room(torch.empty(0, dtype=torch.int64, device="cpu"))
        self.mark = Mark()
        self.num_bytes = sum(tensor.nbytes for tensor in (*self.tensors, self.index))

    def aim(self, cache_slots: np.ndarray) -> int:
        """Notes which cache slots the buffer is for; returns how many."""
        self.index[: len(cache_slots)] = torch.from_numpy(cache_slots.astype(np.int64))
        return len(cache_slots)


class Copier:
    """Copies rows between cache slots and records; used by one thread at a time.

    Args:
        memory: the cache slots.
        stride: of records.
        num_stages: staging buffers, for a device: so many chunks may be on their way at once.

    Attributes:
        records: uint8 `[CHUNK, stride]` on pages of its own, for what a store reads and writes.
    """

    def __init__(self, memory: CacheMemory, stride: int, num_stages: int) -> None:
        self.records = Buffer(CHUNK * stride).array(np.uint8, CHUNK, stride)
        self._memory, self._count, self._next = memory, 0, 0
        self._stages = [] if memory.in_place else [Stage(memory) for _ in range(num_stages)]
        self._packed: Stage | None = None
        self._places = np.arange(CHUNK, dtype=np.uint32)

    def fill(self, cache_slots: np.ndarray) -> Iterator[tuple[slice, RowArrays, np.ndarray]]:
        """Fills cache slots, part after part; on a device, what was filled is copied while the next part is.

        Yields:
            Positions in `cache_slots`, and the arrays and uint32 places where the rows of these belong. The caller
            writes them before it asks for the next part, or the end.
        """
        if (arrays := self._memory.in_place) is not None:
            yield slice(0, len(cache_slots)), arrays, cache_slots
            return
        for first in range(0, len(cache_slots), CHUNK):
            part = slice(first, min(first + CHUNK, len(cache_slots)))
            stage = self._next_stage()
            yield part, stage.arrays, self._places[: part.stop - first]
            self._memory.put(stage, cache_slots[part])

    def pack(self, cache_slots: np.ndarray) -> None:
        """Begins to copy the rows of at most CHUNK cache slots, as they are now."""
        self._count = len(cache_slots)
        if (arrays := self._memory.in_place) is not None:
            arrays.pack(cache_slots, self.records[: self._count])
            return
        self._packed = self._next_stage()
        if self._count:
            self._memory.take(self._packed, cache_slots)

    def packed(self) -> np.ndarray:
        """The records that were packed last, the first of `records`; waits for them."""
        records = self.records[: self._count]
        if self._packed is not None:
            self._packed.mark.wait()
            self._packed.arrays.pack(self._places[: self._count], records)
        return records

    def _next_stage(self) -> Stage:
        """The next buffer; waits for its last copy."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % len(self._stages)
        stage.mark.wait()
        return stage

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return self.records.nbytes + self._places.nbytes + sum(stage.num_bytes for stage in self._stages)
