"""Tiered groups on a device: the host brings rows into its memory, and kernels read and update them in cache slots.

The host finds what a batch needs, with the CPU's kernels, while the device computes. On one rank it has the ids: rows
are on their way from `route` on. On several, owners learn from messages what is asked of them; that the host waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import NoRoomError
from rowmesh.exchange.device.route import DeviceExchange, DeviceRouteGroup
from rowmesh.exchange.layout import GroupLayout
from rowmesh.exchange.route import never
from rowmesh.ops.memory import Scratch, array_at
from rowmesh.ops.route import locate
from rowmesh.ops.segment_unique.cpu import SegmentHash
from rowmesh.ops.transfer import upload
from rowmesh.placement import AddressMap
from rowmesh.sparse import SparseBatch
from rowmesh.tables import CachedArena, PinnedRows, TableGroup

if TYPE_CHECKING:
    from rowmesh.ops.merge_update.cuda import Merged


class Distinct:
    """Distinct ids by segment, found by the host in the order of `rowmesh.ops.segment_unique`.

    Args:
        num_rows: of each segment.
        segments: of each range of ids, ascending.

    Example:
        >>> distinct = Distinct([10], [0])
        >>> unique, inverse, _ = distinct(np.array([7, 3, 7]), np.array([[0, 3]]))
        >>> unique.tolist(), inverse.tolist()
        ([7, 3], [0, 1, 0])
    """

    def __init__(self, num_rows: Sequence[int], segments: Sequence[int]) -> None:
        self._hash, self._segments = SegmentHash(list(num_rows)), np.array(segments, np.int64)
        self._offsets = np.zeros(len(num_rows) + 1, np.int64)
        self._unique, self._counts, self._inverse = Scratch(), Scratch(), Scratch()

    def __call__(self, ids: np.ndarray, ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Unique ids, which of them each id is, and where those of each segment begin; valid until the next call.

        Args:
            ids: int64 `[N]`.
            ranges: int64 `[R, 2 …]`: where each begins and ends.
        """
        count = len(ids)
        unique, counts = self._unique.reserve(8 * count), self._counts.reserve(4 * count)
        inverse = self._inverse.reserve(4 * count)
        self._hash(
            ids.ctypes.data, ranges.ctypes.data, ranges.strides[0], self._segments.ctypes.data, len(ranges),
            unique, counts, inverse, self._offsets.ctypes.data,
        )  # fmt: skip
        found = int(self._offsets[-1])
        return array_at(unique, np.int64, found), array_at(inverse, np.uint32, count), self._offsets

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return self._unique.num_bytes + self._counts.num_bytes + self._inverse.num_bytes


class Finder:
    """Finds the slots that a batch needs of one group, where this rank has them all.

    Args:
        group: the tables.
        address_map: of their rows.
    """

    def __init__(self, group: TableGroup, address_map: AddressMap) -> None:
        self._map, self._header = address_map, address_map.header(0, 0)
        self._tables = [table for table in group.tables for _ in table.features]  # of each feature
        numbers = [number for number, table in enumerate(group.tables) for _ in table.features]
        self._distinct = Distinct(address_map.num_rows, numbers)

    def __call__(self, batch: SparseBatch, layout: GroupLayout) -> np.ndarray:
        """The slots, uint32 `[U]`, in the order in which the device numbers unique ids."""
        ids = batch.ids.numpy()
        unique, _, offsets = self._distinct(ids, layout.features)
        if self._has_strangers(unique, offsets):
            unique, _, offsets = self._distinct(self._bounded(ids, layout), layout.features)
        homes, slots = np.empty(len(unique), np.uint32), np.empty(len(unique), np.uint32)
        for table in range(self._map.num_tables):
            begin, end = offsets[table : table + 2].tolist()
            at = (array.ctypes.data + array.itemsize * begin for array in (unique, homes, slots))
            address, *outs = at
            locate(self._header.ctypes.data, table, address, end - begin, *outs)
        return slots

    def _has_strangers(self, unique: np.ndarray, offsets: np.ndarray) -> bool:
        """Whether some ids are no rows of their tables."""
        parts = np.split(unique, offsets[1:-1])
        return any(
            len(part) and (part.min() < 0 or part.max() >= num_rows)
            for part, num_rows in zip(parts, self._map.num_rows, strict=True)
        )

    def _bounded(self, ids: np.ndarray, layout: GroupLayout) -> np.ndarray:
        """Ids with those outside their table made what the device makes of them; counting is its business."""
        bounded = ids.copy()
        for table, (begin, end) in zip(self._tables, layout.features[:, :2].tolist(), strict=True):
            part = bounded[begin:end]
            part[(part < 0) | (part >= table.num_rows)] = 0 if table.out_of_range == "error" else table.out_of_range
        return bounded

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return self._distinct.num_bytes


class DeviceTieredExchange(DeviceExchange):
    """A group whose rows are cached: slots become cache slots when their rows are there.

    Attributes:
        tiered: the arena.
        comes_early: whether rows begin to come when a batch is routed; false while a pipeline says when.
    """

    is_tiered = True

    def __init__(self, group: TableGroup, address_map: AddressMap, arena: CachedArena) -> None:
        super().__init__(group, address_map, arena)
        self.tiered, self.comes_early = arena, True
        self._find = Finder(group, address_map)
        self._distinct = Distinct([arena.num_slots], [0])

    def prefetch(self, group: DeviceRouteGroup, batch: SparseBatch) -> None:
        """On one rank, rows of a batch begin to come; where there is no room for them yet, they come at the fetch."""
        if self.world_size > 1:
            return
        group.wanted = self._find(batch, group.layout)
        group.num_unique = len(group.wanted)
        if self.comes_early:
            with contextlib.suppress(NoRoomError):
                self.retrieve(group, never)

    def retrieve(self, group: DeviceRouteGroup, may_wait: Callable[[], bool]) -> None:
        """Has the rows that a rank without others asked for come; blocks until they are read from the store.

        Args:
            group: of a route.
            may_wait: whether other batches may unpin rows meanwhile.

        Raises:
            NoRoomError: they do not fit into fast memory beside those of other batches.
        """
        if group.held is None or not group.held.is_pinned:
            group.held = self.tiered.pin(group.wanted, may_wait)

    def bring(self, group: DeviceRouteGroup) -> None:
        """Makes sure that what is launched from now on finds the rows that a rank without others asked for.

        Raises:
            NoRoomError: they do not fit into fast memory.
        """
        self.retrieve(group, never)
        assert group.held is not None
        group.held.ready()
        group.slots = self._upload(group.held.cache_slots)

    def hold(self, slots: Tensor) -> tuple[Tensor, PinnedRows]:
        """Brings the rows that ranks asked this one for; the host waits until it knows which.

        Returns:
            int32 `[M]`: their cache slots; and what keeps them there.
        """
        asked = slots.cpu().numpy().view(np.uint32).astype(np.int64)
        unique, inverse, _ = self._distinct(asked, np.array([[0, len(asked)]]))
        held = self.tiered.pin(unique.astype(np.uint32), never)
        held.ready()
        return self._upload(held.cache_slots[inverse]), held

    def _count_distinct(self, merged: Merged, held: Sequence[PinnedRows | None]) -> None:
        """Merged are cache slots; the host knows the slots."""
        slots = [each.slots for each in held if each is not None]
        self._slot_tables.count_here(np.unique(np.concatenate(slots)), self.counters)

    def give_up(self, held: Sequence[PinnedRows | None]) -> None:
        """Rows were updated and may leave fast memory."""
        for each in held:
            if each is not None:
                each.note_use()
                each.unpin(changed=True)

    def _upload(self, cache_slots: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(cache_slots.view(np.int32)), self.device)

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers of the host."""
        return self._find.num_bytes + self._distinct.num_bytes
