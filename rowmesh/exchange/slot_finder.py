"""Slot finder: finds on the host, with the CPU's kernels, which slots of a cached group a batch on a device needs.

Rows of a cached group are read from their store by the host. On one rank it has the ids, so that rows are on their way
while the device still computes; on several, owners learn from messages what is asked of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rowmesh.ops.memory import Scratch, array_at
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.route import locate
from rowmesh.ops.segment_unique.cpu import SegmentHash
from rowmesh.placement import AddressMap
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableGroup


class UniqueIds:
    """Unique ids by segment, found by the host in the order of `rowmesh.ops.segment_unique`.

    Args:
        num_rows: of each segment.
        segments: of each range of ids, ascending.

    Example:
        >>> unique_ids = UniqueIds([10], [0])
        >>> unique, inverse, _ = unique_ids(np.array([7, 3, 7]), np.array([[0, 3]]))
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
            ids.ctypes.data,
            ranges.ctypes.data,
            ranges.strides[0],
            self._segments.ctypes.data,
            len(ranges),
            unique,
            counts,
            inverse,
            self._offsets.ctypes.data,
        )
        found = int(self._offsets[-1])
        return array_at(unique, np.int64, found), array_at(inverse, np.uint32, count), self._offsets

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return self._unique.num_bytes + self._counts.num_bytes + self._inverse.num_bytes


class SlotFinder:
    """Finds the slots that a batch needs of one group, where this rank has them all.

    Args:
        group: the tables.
        address_map: of their rows.
    """

    def __init__(self, group: TableGroup, address_map: AddressMap) -> None:
        self._map, self._header = address_map, address_map.header(0, 0)
        self._tables = [table for table in group.tables for _ in table.features]  # of each feature
        numbers = [number for number, table in enumerate(group.tables) for _ in table.features]
        self._unique = UniqueIds(address_map.num_rows, numbers)

    def __call__(self, batch: SparseBatch, layout: GroupLayout) -> np.ndarray:
        """The slots, uint32 `[U]`, in the order in which the device numbers unique ids."""
        ids = batch.ids.numpy()
        unique, _, offsets = self._unique(ids, layout.features)
        if self._has_others(unique, offsets):
            unique, _, offsets = self._unique(self._bounded(ids, layout), layout.features)
        owners, slots = np.empty(len(unique), np.uint32), np.empty(len(unique), np.uint32)
        for table in range(self._map.num_tables):
            begin, end = offsets[table : table + 2].tolist()
            at = (array.ctypes.data + array.itemsize * begin for array in (unique, owners, slots))
            address, *outs = at
            locate(self._header.ctypes.data, table, address, end - begin, *outs)
        return slots

    def _has_others(self, unique: np.ndarray, offsets: np.ndarray) -> bool:
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
        return self._unique.num_bytes
