"""In how many batches the rows of a run stand, counted batch by batch with memory for one batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import IdRangeError
from rowmesh.ops.simd import kernel

_MULTIPLIER = 0x9E3779B97F4A7C15


class BatchCounter:
    """Counts (row, batch) pairs of one table by run: every row once a batch, however often it is read in it.

    Args:
        name: of the table.
        starts: int64 `[K + 1]`, the first row of each run, and the number of rows.

    Example:
        >>> counter = BatchCounter("item", np.array([0, 1, 4]))
        >>> counter.add(np.array([0, 2, 0, 3]))
        >>> counter.add(np.array([2, 2]))
        >>> counter.pairs.tolist()
        [1, 3]
    """

    def __init__(self, name: str, starts: NDArray[np.int64]) -> None:
        self._name = name
        self._starts = np.ascontiguousarray(starts, np.int64)
        self.pairs = np.zeros(len(starts) - 1, np.int64)
        self._cells = np.zeros(16, np.int64)  # row + 1 where the cell was filled in this batch

    def add(self, ids: NDArray[np.int64]) -> None:
        """Counts one batch.

        Raises:
            IdRangeError: an id is not a row of the table.
        """
        if not len(ids):
            return
        check_rows(self._name, ids, int(self._starts[-1]))
        bits = max(4, (2 * len(ids) - 1).bit_length())
        if 1 << bits != len(self._cells):
            self._cells = np.empty(1 << bits, np.int64)
        self._cells.fill(0)
        _count_pairs(ids, self._cells, bits, self._starts, self.pairs)


def check_rows(name: str, ids: NDArray[np.int64], num_rows: int) -> None:
    """Raises:
    IdRangeError: an id is not a row of the table.
    """
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= num_rows:
        raise IdRangeError(f"table {name!r} has rows 0 to {num_rows - 1}, but ids from {low} to {high} came")


@kernel
def _count_pairs(ids, cells, bits, starts, pairs):  # pragma: no cover - compiled
    """Adds every distinct id of a batch to its run; `cells` is an empty hash table of 2^bits cells."""
    mask = len(cells) - 1
    for i in range(len(ids)):
        row = ids[i]
        cell = np.int64((np.uint64(row) * np.uint64(_MULTIPLIER)) >> np.uint64(64 - bits))
        while cells[cell] != 0 and cells[cell] != row + 1:
            cell = cell + 1 & mask
        if cells[cell] == 0:
            cells[cell] = row + 1
            low, high = 0, len(starts) - 1
            while high - low > 1:
                middle = (low + high) >> 1
                if starts[middle] <= row:
                    low = middle
                else:
                    high = middle
            pairs[low] += 1
