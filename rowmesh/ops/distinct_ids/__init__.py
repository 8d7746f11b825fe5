"""Distinct ids: those of a list in the order of their parts, how often each occurs, and which each entry is.

Any int64 is an id. Ids of a part stand in the order in which they first occur: nothing is sorted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rowmesh.ops.distinct_ids import cpu

__all__ = ["Distinct", "DistinctIds"]

_ONE_PART = np.zeros(1, np.int64)


class Distinct(NamedTuple):
    """The distinct ids that were found.

    Attributes:
        ids: int64 `[U]`, distinct; by part.
        counts: int64 `[U]`.
        inverse: int64 `[N]`: which of them each entry is.
        bounds: int64 `[parts + 1]`: where the ids of each part begin.
    """

    ids: np.ndarray
    counts: np.ndarray
    inverse: np.ndarray
    bounds: np.ndarray


class DistinctIds:
    """Finds distinct ids; keeps its memory from call to call. One thread at a time.

    Args:
        seed: of the hash that tells parts: mix(id xor seed) mod the number of `part_of`.
        part_of: int64 `[P]`: which part each remainder belongs to; default: all to one.
        num_parts: parts.

    Example:
        >>> found = DistinctIds()(np.array([7, -1, 7]))
        >>> found.ids.tolist(), found.counts.tolist(), found.inverse.tolist()
        ([7, -1], [2, 1], [0, 1, 0])
    """

    def __init__(self, seed: int = 0, part_of: np.ndarray | None = None, num_parts: int = 1) -> None:
        self._seed, self._part_of, self._num_parts = np.uint64(seed), _ONE_PART, num_parts
        if part_of is not None:
            self._part_of = np.ascontiguousarray(part_of, np.int64)
        self._heads = np.full(1, -1, np.int32)

    def __call__(self, ids: np.ndarray, weights: np.ndarray | None = None) -> Distinct:
        """The distinct ids among int64 ids `[N]`, contiguous or not; `weights` int64 `[N]` replace ones in sums."""
        number = len(ids)
        size = 1 << max(4, (2 * number - 1).bit_length())
        if len(self._heads) < size:
            self._heads = np.full(size, -1, np.int32)
        memory = np.empty((5, number), np.int64)
        bounds = np.zeros(self._num_parts + 1, np.int64)
        own = np.ones(1, np.int64) if weights is None else weights
        count = cpu.distinct(ids, own, self._seed, self._part_of, self._heads, size - 1, memory, bounds)
        return Distinct(memory[0, :count], memory[1, :count], memory[2], bounds)
