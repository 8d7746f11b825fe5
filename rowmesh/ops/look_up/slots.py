"""Slots that a batch on a device needs of a cached group, found on the host, with the CPU's kernels.

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
        num_rows: of each table.
        features: of each feature the number of its table, and the row that ids outside of it are made.
        header: the words of the group's address map that `rowmesh.ops.route` reads.
    """

    def __init__(self, num_rows: Sequence[int], features: Sequence[tuple[int, int]], header: np.ndarray) -> None:
        self._num_rows, self._features, self._header = num_rows, features, header
        self._unique = UniqueIds(num_rows, [table for table, _ in features])

    def __call__(self, ids: np.ndarray, layout: GroupLayout) -> np.ndarray:
        """The slots, uint32 `[U]`, in the order in which the device numbers unique ids."""
        unique, _, offsets = self._unique(ids, layout.features)
        if self._has_others(unique, offsets):
            unique, _, offsets = self._unique(self._bounded(ids, layout), layout.features)
        owners, slots = np.empty(len(unique), np.uint32), np.empty(len(unique), np.uint32)
        for table in range(len(self._num_rows)):
            begin, end = offsets[table : table + 2].tolist()
            address, *outs = (array.ctypes.data + array.itemsize * begin for array in (unique, owners, slots))
            locate(self._header.ctypes.data, table, address, end - begin, *outs)
        return slots

    def _has_others(self, unique: np.ndarray, offsets: np.ndarray) -> bool:
        """Whether some ids are no rows of their tables."""
        parts = zip(np.split(unique, offsets[1:-1]), self._num_rows, strict=True)
        return any(len(part) and (part.min() < 0 or part.max() >= num_rows) for part, num_rows in parts)

    def _bounded(self, ids: np.ndarray, layout: GroupLayout) -> np.ndarray:
        """Ids with those outside their table made what the device makes of them; counting is its business."""
        bounded, bounds = ids.copy(), layout.features[:, :2].tolist()
        for (table, substitute), (begin, end) in zip(self._features, bounds, strict=True):
            part = bounded[begin:end]
            part[(part < 0) | (part >= self._num_rows[table])] = substitute
        return bounded

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return self._unique.num_bytes
