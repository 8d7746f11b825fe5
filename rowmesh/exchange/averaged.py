"""Averaged rows: replica groups update for themselves, and rows and moments are averaged over them, `average`
synchronization.

Between two synchronizations a rank marks the rows it updates and keeps what they were before. Then it tells its column
the rows it touched; of those that another group did not touch, that group's value is the one from before, which all
have. So what is sent follows the batches, not the tables, and the result is that of averaging whole tables.

Source: two-dimensional sparse parallelism, Algorithm 1, lines 5-10. Differs: the paper averages whole tables; here that
is `dense`, for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rowmesh.exchange.told import Layout, Told
from rowmesh.ops import average, gather
from rowmesh.ops.memory import Growing, Scratch, array_at, held_bytes
from rowmesh.ops.merge_update import Merger
from rowmesh.ops.simd import STORAGE
from rowmesh.optim.rules import Update

if TYPE_CHECKING:
    from rowmesh.exchange.group import GroupExchange

CHUNK_BYTES = 16 << 20  # of whole tables are averaged at once


class _Column:
    """One kind of value that every slot has: the row, or a state of the optimizer."""

    def __init__(self, address: int, dim: int, dtype: torch.dtype) -> None:
        self.address, self.item_bytes = address, dim * dtype.itemsize
        self.gather: SimpleNamespace = gather.kernels(dim, STORAGE[dtype])
        self.average: SimpleNamespace = average.kernels(dim, STORAGE[dtype])
        self.before, self.current, self.means = Growing(), Scratch(), Scratch()

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.before.num_bytes + self.current.num_bytes + self.means.num_bytes

    def read(self, slots: int, count: int, out: int) -> None:
        """The values of some slots."""
        self.gather.gather_slots(self.address, slots, count, out)


class AveragedRows:
    """One group's rows and optimizer state, averaged over replicas.

    Args:
        exchange: the group's.
        replica: the number of this rank's group.
    """

    def __init__(self, exchange: GroupExchange, replica: int) -> None:
        self._arena, self._replica = exchange.arena, replica
        tensors = [exchange.arena.rows, *exchange.arena.state.values()]
        self._columns = [_Column(t.data_ptr(), 1 if t.dim() == 1 else t.shape[1], t.dtype) for t in tensors]
        self.layout = Layout([column.item_bytes for column in self._columns])
        self._marks = np.zeros(exchange.arena.num_slots, np.uint8)
        self._slots = Growing()
        self._merger = Merger(1)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        columns = sum(column.num_bytes for column in self._columns)
        return self._marks.nbytes + self._slots.num_bytes + held_bytes(self._merger) + columns

    def apply(
        self, merged: Any, update: Update, part: tuple[int, int] | None = None, *, num: int | None = None
    ) -> None:
        """Updates merged rows; keeps what those that are touched for the first time were."""
        first, end = part or (0, merged.num_merged)
        used = self._slots.used
        new = self._slots.append(4 * (end - first))
        count = average.mark(merged.merged_slots, first, end, self._marks, new)
        self._slots.shrink(used + 4 * count)
        for column in self._columns:
            column.read(new, count, column.before.append(column.item_bytes * count))
        self._arena.apply(merged, update.lr, update.scaling, update.step, part)

    def outgoing(self) -> Told:
        """The rows that this group touched, whose marks go; views that hold until more are touched."""
        count = self._slots.used // 4
        slots, blocks, before = self._slots.array(np.uint32, count), [], []
        for column in self._columns:
            current = column.current.reserve(column.item_bytes * count)
            column.read(slots.ctypes.data, count, current)
            blocks.append(array_at(current, np.uint8, count, column.item_bytes))
            before.append(column.before.array(np.uint8, count, column.item_bytes))
        self.forget()
        return Told(slots, blocks, before)

    def forget(self) -> None:
        """Unmarks all rows."""
        self._marks[self._slots.array(np.uint32, self._slots.used // 4)] = 0
        self._slots.shrink(0)
        for column in self._columns:
            column.before.shrink(0)

    def whole(self) -> Iterator[Told]:
        """All rows, some at a time, touched or not."""
        self.forget()
        per_row = sum(column.item_bytes for column in self._columns)
        step = max(CHUNK_BYTES // per_row, 1)
        for first in range(0, self._arena.num_slots, step):
            slots = np.arange(first, min(first + step, self._arena.num_slots), dtype=np.uint32)
            blocks = [
                array_at(column.address + first * column.item_bytes, np.uint8, len(slots), column.item_bytes)
                for column in self._columns
            ]
            yield Told(slots, blocks, blocks)

    def combine(self, told: Sequence[Told], update: Update | None = None) -> None:
        """Puts the means of the rows that any group told into place."""
        self._average(told, [0] * len(self._columns))

    def reduce(self, told: Sequence[Told]) -> Told:
        """The means of the rows that any group told; views that hold until the next call."""
        most = sum(map(len, told))
        means = [column.means.reserve(column.item_bytes * most) for column in self._columns]
        count = self._average(told, means)
        slots = array_at(self._merger.merged_slots, np.uint32, count)
        sizes = self.layout.item_bytes
        return Told(slots, [array_at(at, np.uint8, count, size) for at, size in zip(means, sizes, strict=True)])

    def accept(self, told: Told, update: Update | None = None) -> None:
        """Puts the means that `reduce` gave, here or at another rank, into place."""
        for column, block in zip(self._columns, told.blocks, strict=True):
            column.average.put(told.slots.ctypes.data, len(told), block.ctypes.data, column.address)

    def _average(self, told: Sequence[Told], means: Sequence[int]) -> int:
        merger, offsets = self._merger, [np.array([0, len(part)]) for part in told]
        sources = [(part.slots.ctypes.data, bounds.ctypes.data, 0) for part, bounds in zip(told, offsets, strict=True)]
        merger(sources, 0, sum(map(len, told)))
        entries = np.cumsum([0, *map(len, told)])
        own = told[self._replica]
        for kind, (column, out) in enumerate(zip(self._columns, means, strict=True)):
            blocks = [*(part.blocks[kind].ctypes.data for part in told), 0]
            where = np.array([*zip(blocks, entries, strict=True)], np.int64)
            column.average.average(
                merger.merged_slots, merger.heads, merger.nexts, merger.num_merged, where.ctypes.data, len(told),
                self._replica, own.before[kind].ctypes.data, column.address, out,
            )  # fmt: skip
        return merger.num_merged
