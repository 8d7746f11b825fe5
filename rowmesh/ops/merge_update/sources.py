"""Sources: the lists of requests that a rank merges, in the order of the ranks."""

from __future__ import annotations

import numpy as np

from rowmesh.ops.merge_update.merging import Merger


class Sources:
    """Lists of requests in the host's memory, and where their gradients are or will be.

    Args:
        merger: holds what is merged.
        gradient_bytes: of one gradient.
        num_segments: S′.

    Attributes:
        num_entries: requests of all lists.
        accesses: int64 `[S′]`: ids that they are for.
    """

    __slots__ = ("_gradient_bytes", "_keep", "_lists", "_node_ends", "accesses", "merger", "num_entries")

    def __init__(self, merger: Merger, gradient_bytes: int, num_segments: int) -> None:
        self.merger, self._gradient_bytes = merger, gradient_bytes
        self._lists: list[tuple[int, int, int]] = []
        self._node_ends: list[int] = []
        self._keep: list[np.ndarray] = []
        self.num_entries = 0
        self.accesses = np.zeros(num_segments, np.int64)

    def add(self, slots: int, offsets: np.ndarray, gradients: int, accesses: np.ndarray) -> None:
        """Adds the requests of a rank: `offsets` int64 `[S′ + 1]` into lists that begin at the two addresses."""
        self._lists.append((slots, offsets.ctypes.data, gradients))
        self.num_entries += int(offsets[-1]) - int(offsets[0])
        self.accesses += accesses

    def add_copied(self, slots: int, offsets: np.ndarray, gradients: int, first: int, rank: int) -> None:
        """Adds requests of a rank to other owners for rows that have a copy here.

        Args:
            slots, gradients: addresses of the lists.
            offsets: int64 `[W, S′ + 1]` into them.
            first: the first segment of rows with copies.
            rank: this one, whose own are added by themselves.
        """
        clipped = np.maximum(offsets, offsets[:, first, None])
        sizes = clipped[:, -1] - clipped[:, 0]
        sizes[rank] = 0
        begin, stride = clipped.ctypes.data, clipped.strides[0]
        self._lists += [(slots, begin + stride * owner, gradients) for owner in np.flatnonzero(sizes).tolist()]
        self._keep.append(clipped)
        self.num_entries += int(sizes.sum())

    def end_node(self) -> None:
        """Ends a node: later requests come from the next one."""
        self._node_ends.append(self.num_entries)

    def merge(self) -> None:
        """Finds the distinct slots."""
        self.merger(self._lists, self._gradient_bytes, self.num_entries, self._node_ends)
