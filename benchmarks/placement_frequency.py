"""Order of frequency: which row each id becomes, so that rows stand from the most to the least often read.

Prepared data are in this order already. This is for ids that were counted elsewhere.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import ConfigurationError
from rowmesh.ops.simd import kernel

_CAP = 1 << 16  # counts below it have a bucket each; above are few, and sorted
MAX_ROWS = 2**32


def order_by_frequency(
    counts: NDArray[np.integer], rows: NDArray[np.uint32] | None = None
) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.int64]]:
    """A counting sort: two passes over the counts, each from front to back, so that all may be memory-mapped.

    Equal counts keep their order.

    Args:
        counts: how often each id was read, `[n]`, integers.
        rows: where to write the result, uint32 `[n]`; new memory by default.

    Returns:
        The row of each id; the distinct counts, falling; and how many rows have each.

    Raises:
        ConfigurationError: a count is negative, or there are more than 2^32 ids.

    Example:
        >>> rows, counts, lengths = order_by_frequency(np.array([0, 7, 3, 0, 3]))
        >>> rows.tolist(), counts.tolist(), lengths.tolist()
        ([3, 0, 1, 4, 2], [7, 3, 0], [1, 2, 2])
    """
    if len(counts) > MAX_ROWS:
        raise ConfigurationError(f"{len(counts):,} ids in one table, more than {MAX_ROWS:,}; split the table")
    counts = np.asarray(counts)  # kernels take no memory-mapped arrays, but the memory behind them
    rows = np.empty(len(counts), np.uint32) if rows is None else np.asarray(rows)
    histogram = np.zeros(_CAP, np.int64)
    num_high = _histogram(counts, histogram)
    if num_high < 0:
        raise ConfigurationError("counts must not be negative")
    ids = np.empty(num_high, np.int64)
    values = np.empty(num_high, np.int64)
    _collect(counts, _CAP, ids, values)
    order = np.argsort(-values, kind="stable")
    cursors = num_high + np.concatenate([np.cumsum(histogram[::-1])[::-1][1:], np.zeros(1, np.int64)])
    _assign(counts, cursors, rows)
    rows[ids[order]] = np.arange(num_high, dtype=np.uint32)
    high, high_lengths = np.unique(values, return_counts=True)
    low = np.flatnonzero(histogram)[::-1]
    return rows, np.concatenate([high[::-1], low]), np.concatenate([high_lengths[::-1], histogram[low]])


@kernel
def _histogram(counts, histogram):  # pragma: no cover - compiled
    """How many ids have each count below the cap; returns how many are above, −1 where a count is negative."""
    cap = len(histogram)
    num_high = 0
    for i in range(len(counts)):
        count = np.int64(counts[i])
        if count < 0:
            return -1
        if count < cap:
            histogram[count] += 1
        else:
            num_high += 1
    return num_high


@kernel
def _collect(counts, cap, ids, values):  # pragma: no cover - compiled
    found = 0
    for i in range(len(counts)):
        if found == len(ids):
            return
        if counts[i] >= cap:
            ids[found] = i
            values[found] = counts[i]
            found += 1


@kernel
def _assign(counts, cursors, rows):  # pragma: no cover - compiled
    """Gives ids below the cap the next row of their count; the others are given theirs by the caller."""
    for i in range(len(counts)):
        count = np.int64(counts[i])
        if count < len(cursors):
            rows[i] = cursors[count]
            cursors[count] += 1
