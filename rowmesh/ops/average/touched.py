"""Touched rows: which rows were updated since they were last averaged, and what they were before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.ops.average import clear, mark, pack
from rowmesh.ops.memory import Room, grown, zeros
from rowmesh.ops.merge_update.handles import HostMerged, Merged
from rowmesh.ops.transfer import Late


class TouchedRows:
    """The slots of touched rows in the order of their first touch, and what each table had there before.

    Args:
        tables: `[R, D]` each, with the same slots; or with cache slots, where rows are in tiers.
        device: where they are; None: the host's memory.
        num_slots: R, where tables do not have all rows.
    """

    def __init__(self, tables: Sequence[Tensor], device: torch.device | None, num_slots: int | None = None) -> None:
        self._tables, self._device, rows = tables, device, tables[0]
        self.marks = zeros(device, torch.uint8, len(rows) if num_slots is None else num_slots)
        self._slots = rows.new_empty(0, dtype=torch.uint32 if device is None else torch.int64)
        self._before = [table.new_empty(0, table.shape[1]) for table in tables]
        self._now = [Room(device) for _ in tables]
        self._start()

    def _start(self) -> None:
        """An empty list."""
        self._bounds = torch.zeros(2, dtype=torch.int64, device=self._slots.device)  # of what was listed last
        self._late: Late | None = None  # of a device, the bounds, on their way to the host
        self._most = 0  # that the list may have by now, as far as the host knows

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        tensors = (self.marks, self._slots, *self._before)
        return sum(tensor.nbytes for tensor in tensors) + sum(room.num_bytes for room in self._now)

    def add(
        self, merged: Merged, most: int, part: tuple[int, int] | None = None, at: NDArray[np.uint32] | None = None
    ) -> None:
        """Lists rows that are about to be updated.

        Args:
            merged: the rows.
            most: how many they are at most.
            part: which of them, first and one past the last, in the host's memory; default: all.
            at: uint32 `[M]`, cache slots: where in the tables they are; by default in their slots.
        """
        self.make_room(most)
        self._most += most
        if at is not None:
            self._add_cached(merged, part, at)
            return
        self._bounds = mark(merged, self.marks, self._bounds, self._slots, part, most)
        self._late = None if self._device is None else Late(self._bounds)
        for table, before in zip(self._tables, self._before, strict=True):
            pack(table, self._slots, self._bounds, before, most)

    def _add_cached(self, merged: Merged, part: tuple[int, int] | None, at: NDArray[np.uint32]) -> None:
        assert isinstance(merged, HostMerged)
        which = slice(*(part or (0, merged.num_merged)))
        is_new = self.marks.numpy()[merged.slots[which]] == 0
        places, first = torch.from_numpy(at[which][is_new]), int(self._bounds[1])
        self._bounds = mark(merged, self.marks, self._bounds, self._slots, part)
        bounds = torch.tensor([0, len(places)], dtype=torch.int64, device="cpu")
        for table, before in zip(self._tables, self._before, strict=True):
            pack(table, places, bounds, before[first:], len(places))

    def make_room(self, count: int) -> None:
        """Makes room for so many more rows; looks at how many there really are only where it may not do."""
        room, num_rows = len(self._slots), len(self.marks)
        if min(self._most + count, num_rows) > room:
            self._most = self.count
        if (needed := min(self._most + count, num_rows)) > room:
            size = min(max(needed, 2 * room), num_rows)
            self._slots, *self._before = (grown(each, size, self._device) for each in (self._slots, *self._before))

    @property
    def count(self) -> int:
        """How many rows are listed; waits until that is known."""
        if self._late is not None:
            return self._late.read()[1]
        return int(self._bounds[1]) if self._device is None else 0

    def take(self, read: Callable[[Tensor], list[Tensor]] | None = None) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The slots, what each table has there now, and what it had before; the list is empty then.

        They hold until more rows are listed. Slots are uint32 in the host's memory, int64 on a device.

        Args:
            read: what each table has in some slots, where tables do not have all rows.
        """
        count = self.count
        self._bounds[0] = 0
        now = self._packed(count) if read is None else read(self._slots[:count])
        slots, before = self._slots[:count], [each[:count] for each in self._before]
        self.clear()
        return slots, now, before

    def _packed(self, count: int) -> list[Tensor]:
        now = [room.tensor(t.dtype, count, t.shape[1]) for room, t in zip(self._now, self._tables, strict=True)]
        for table, out in zip(self._tables, now, strict=True):
            pack(table, self._slots, self._bounds, out, count)
        return now

    def clear(self) -> None:
        """Empties the list."""
        self._bounds[0] = 0
        clear(self._slots, self._bounds, self.marks, min(self._most, len(self._slots)))
        self._start()
