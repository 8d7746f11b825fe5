"""Fast rows: the fast memory of leased rows, as the host's part of it sees that memory; and the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from torch import Tensor

from rowmesh.ops.memory import Buffer, Memory
from rowmesh.tables.arena import DenseArena
from rowmesh.tables.columns import Columns
from rowmesh.tables.group import TableGroup

CHUNK = 4096  # records that are read, or written back, in one go: bounds the buffers, and how long the lock is held


class Shuttle(Protocol):
    """Carries rows between frames and the host, at most CHUNK at a time. Whoever uses one has it for himself.

    Attributes:
        records: uint8 `[CHUNK, stride]` on pages of its own, for what a store reads and writes.
    """

    records: np.ndarray

    def fill(self, frames: np.ndarray) -> Iterator[tuple[slice, Columns, np.ndarray]]:
        """Fills frames, part after part: positions in `frames`, then columns and the places in them where the rows of
        these frames belong, which are to be written before the next part is asked for, or the end.
        """
        ...

    def pack(self, frames: np.ndarray) -> None:
        """Begins to copy the rows of at most CHUNK frames, as they are now."""
        ...

    def packed(self) -> np.ndarray:
        """What was packed last, the first of `records`; waits for it."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        ...


class FastArena(Protocol):
    """Rows and their state by frame."""

    rows: Tensor
    state: dict[str, Tensor]

    @property
    def num_bytes(self) -> tuple[int, int]: ...


class FastRows(Protocol):
    """Fast memory.

    Attributes:
        versions: uint32 `[num_frames]` where they are kept.
        record_bytes: of a row, its state and its version.
    """

    versions: np.ndarray | None
    record_bytes: int

    @property
    def arena(self) -> FastArena:
        """The rows."""
        ...

    def make_shuttle(self, stride: int, num_parts: int) -> Shuttle:
        """A shuttle.

        Args:
            stride: of records.
            num_parts: how many parts of what is filled may be on their way at once.
        """
        ...

    def poison(self, frames: np.ndarray) -> None:
        """Leaves NaN in frames that were given up."""
        ...

    def settle(self) -> None:
        """Returns when all that shuttles began is done."""
        ...


MakeFast = Callable[[TableGroup, int, bool], FastRows]
"""Makes the fast memory of a group, given the number of frames and whether versions are kept."""


class HostRows:
    """Fast rows in this process's memory; kernels and shuttles use them in place.

    Args:
        group: the tables.
        num_frames: how many rows.
        verify: whether versions are kept.
        allocate: where rows are put.
    """

    def __init__(
        self, group: TableGroup, num_frames: int, verify: bool, allocate: Callable[[int], Memory] = Buffer
    ) -> None:  # fmt: skip
        self.arena = DenseArena(group, num_frames, allocate)
        self.versions = np.zeros(num_frames, np.uint32) if verify else None
        self._columns = Columns(self.arena.rows, self.arena.state, self.versions)
        self.record_bytes = self._columns.record_bytes

    def make_shuttle(self, stride: int, num_parts: int) -> HostShuttle:
        """A shuttle."""
        return HostShuttle(self._columns, stride)

    def poison(self, frames: np.ndarray) -> None:
        """Leaves NaN."""
        self._columns.poison(frames)

    def settle(self) -> None:
        """Everything is done at once."""


class HostShuttle:
    """Copies at once.

    Args:
        columns: the frames.
        stride: of records.
    """

    def __init__(self, columns: Columns, stride: int) -> None:
        self.records = make_records(stride)
        self._columns, self._count = columns, 0

    def fill(self, frames: np.ndarray) -> Iterator[tuple[slice, Columns, np.ndarray]]:
        """All in one part: they are filled where they are."""
        yield slice(0, len(frames)), self._columns, frames

    def pack(self, frames: np.ndarray) -> None:
        """Copies rows."""
        self._count = len(frames)
        self._columns.pack(frames, self.records[: len(frames)])

    def packed(self) -> np.ndarray:
        """What was packed."""
        return self.records[: self._count]

    @property
    def num_bytes(self) -> int:
        """Of the records."""
        return self.records.nbytes


def make_records(stride: int) -> np.ndarray:
    """Room for CHUNK records, on pages of its own."""
    return Buffer(CHUNK * stride).array(np.uint8, CHUNK, stride)
