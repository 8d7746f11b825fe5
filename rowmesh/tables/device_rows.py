"""Device rows: the fast rows of tiered tables in a GPU's memory, and how they get there and back.

See [Note: copies beside the computation] in `rowmesh.ops.streams`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rowmesh.ops.streams import Mark, Stream
from rowmesh.tables.arena import compute_dtype
from rowmesh.tables.columns import Columns
from rowmesh.tables.device_arena import DeviceArena
from rowmesh.tables.fast_rows import CHUNK, make_records
from rowmesh.tables.group import TableGroup


class Uses:
    """By which kernels each frame was used last.

    Args:
        num_frames: how many.
        begin: when their memory may be used.
    """

    def __init__(self, num_frames: int, begin: Mark) -> None:
        self._last = np.zeros(num_frames, np.int64)  # number of the last use
        self._pending = deque([(0, begin)])  # that may not have passed yet
        self._number = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers."""
        return self._last.nbytes

    def note(self, frames: np.ndarray, mark: Mark) -> None:
        """Frames were used by all that was launched before a mark."""
        with self._lock:
            self._number += 1
            self._last[frames] = self._number
            self._pending.append((self._number, mark))

    def of(self, frames: np.ndarray) -> list[Mark]:
        """What to wait for before frames are copied; uses that came before the last of them are among it."""
        with self._lock:
            while self._pending and self._pending[0][1].has_passed:
                self._pending.popleft()
            last = self._last[frames].max(initial=-1)
            return [mark for number, mark in self._pending if number <= last]


class Stage:
    """A staging buffer: the rows of a chunk on the host, on their way to frames or back.

    Attributes:
        columns: CHUNK rows and their state.
        index: int64 `[CHUNK]`: the frames.
        mark: of the last copy to or from it.
    """

    def __init__(self, group: TableGroup, verify: bool, is_pinned: bool) -> None:
        def room(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=is_pinned)

        compute = compute_dtype(group.dtype)
        extents = group.optimizer.state.items()
        state = {
            name: room(*(CHUNK,) if extent == "row" else (CHUNK, group.dim), dtype=compute) for name, extent in extents
        }
        rows = room(CHUNK, group.dim, dtype=group.dtype)
        self.columns = Columns(rows, state, np.zeros(CHUNK, np.uint32) if verify else None)
        self.tensors = rows, *state.values()
        self.index = room(CHUNK, dtype=torch.int64)
        self.mark = Mark()

    @property
    def num_bytes(self) -> int:
        """Of the buffer."""
        return sum(tensor.nbytes for tensor in (*self.tensors, self.index))


class DeviceRows:
    """Fast rows in a GPU's memory.

    Args:
        group: the tables.
        num_frames: how many rows.
        verify: whether versions are kept, by the host.
        device: where.
        streams: makes streams.

    Raises:
        ConfigurationError: there are more frames than kernels can tell apart.
        MemoryError: the device has no room.
    """

    def __init__(
        self, group: TableGroup, num_frames: int, verify: bool, device: torch.device, streams: Any = Stream
    ) -> None:  # fmt: skip
        self.arena = DeviceArena(group, num_frames, device)
        self.versions = np.zeros(num_frames, np.uint32) if verify else None
        self.record_bytes = Columns.empty(group, 1, verify).record_bytes
        self._group, self._device, self._streams = group, device, streams
        self._tensors = self.arena.rows, *self.arena.state.values()
        self._inward, self._outward = streams.new(device), streams.new(device)
        self.uses = Uses(num_frames, self.current().mark())

    def current(self) -> Stream:
        """The stream of the computation."""
        return self._streams.current(self._device)

    def make_shuttle(self, stride: int, num_parts: int) -> DeviceShuttle:
        """A shuttle with so many staging buffers."""
        is_pinned = self._device.type == "cuda"
        stages = [Stage(self._group, self.versions is not None, is_pinned) for _ in range(num_parts)]
        return DeviceShuttle(self, stages, stride)

    def marks(self) -> tuple[Mark, ...]:
        """All copies so far."""
        return self._inward.mark(), self._outward.mark()

    def settle(self) -> None:
        """The host waits for all copies."""
        for mark in self.marks():
            mark.wait()

    def put(self, stage: Stage, frames: np.ndarray) -> None:
        """Begins to copy staged rows into frames, when what used these has run."""
        count = len(frames)
        stage.index[:count] = torch.from_numpy(frames.astype(np.int64))
        if self.versions is not None and stage.columns.versions is not None:
            self.versions[frames] = stage.columns.versions[:count]

        def copy() -> None:
            index = stage.index[:count].to(self._device, non_blocking=True)
            for rows, staged in zip(self._tensors, stage.tensors, strict=True):
                rows.index_copy_(0, index, staged[:count].to(self._device, non_blocking=True))

        self._inward.wait_for(self.uses.of(frames))
        self._inward.run(copy)
        stage.mark = self._inward.mark()

    def take(self, stage: Stage, frames: np.ndarray) -> None:
        """Begins to copy the rows of frames out, as what was launched so far leaves them."""
        count = len(frames)
        stage.index[:count] = torch.from_numpy(frames.astype(np.int64))
        if self.versions is not None and stage.columns.versions is not None:
            stage.columns.versions[:count] = self.versions[frames]

        def copy() -> None:
            index = stage.index[:count].to(self._device, non_blocking=True)
            for rows, staged in zip(self._tensors, stage.tensors, strict=True):
                staged[:count].copy_(rows.index_select(0, index), non_blocking=True)

        self._outward.wait_for([*self.uses.of(frames), self._inward.mark()])
        self._outward.run(copy)
        stage.mark = self._outward.mark()

    def poison(self, frames: np.ndarray) -> None:
        """Leaves NaN in frames, when what used them has run; for tests, as the frames' numbers are not pinned."""
        index = torch.from_numpy(frames.astype(np.int64))

        def fill() -> None:
            for tensor in self._tensors:
                tensor.index_fill_(0, index.to(self._device), torch.nan)

        self._inward.wait_for(self.uses.of(frames))
        self._inward.run(fill)


class DeviceShuttle:
    """Carries rows through staging buffers, one after the other.

    Args:
        rows: the frames.
        stages: the buffers.
        stride: of records.
    """

    def __init__(self, rows: DeviceRows, stages: Sequence[Stage], stride: int) -> None:
        self.records = make_records(stride)
        self._rows, self._stages, self._next = rows, stages, 0
        self._places = np.arange(CHUNK, dtype=np.uint32)
        self._packed = (stages[0], 0)

    def fill(self, frames: np.ndarray) -> Iterator[tuple[slice, Columns, np.ndarray]]:
        """Parts of CHUNK frames; while one is filled, those before it are copied."""
        for first in range(0, len(frames), CHUNK):
            part = slice(first, min(first + CHUNK, len(frames)))
            stage = self._take_stage()
            yield part, stage.columns, self._places[: part.stop - first]
            self._rows.put(stage, frames[part])

    def pack(self, frames: np.ndarray) -> None:
        """Begins to copy rows out."""
        self._packed = (self._take_stage(), len(frames))
        if len(frames):
            self._rows.take(self._packed[0], frames)

    def packed(self) -> np.ndarray:
        """What was packed last; waits for it."""
        stage, count = self._packed
        stage.mark.wait()
        stage.columns.pack(self._places[:count], self.records[:count])
        return self.records[:count]

    def _take_stage(self) -> Stage:
        """The next buffer; waits for its last copy."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % len(self._stages)
        stage.mark.wait()
        return stage

    @property
    def num_bytes(self) -> int:
        """Of the buffers and the records."""
        return self.records.nbytes + self._places.nbytes + sum(stage.num_bytes for stage in self._stages)
