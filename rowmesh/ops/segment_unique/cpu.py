"""Segment unique on a CPU: one small open-addressing hash table, reused by every segment.

An entry is (key, epoch << 32 | position). Each segment has an epoch of its own, so the table is never cleared; it is
sized to the segment and stays in the cache. A segment of few possible keys is addressed by the key itself: with the
multiplier 2^(64−bits) the hash is key mod 2^bits, which has no collisions, and the loop stays the same.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.memory import Scratch
from rowmesh.ops.simd import kernel, load_i64, load_u32, store_i64, store_u32

_FIBONACCI = 0x9E3779B97F4A7C15
_DIRECT_ROWS = 1 << 13  # below this many rows a table is addressed directly (16 bytes an entry)
_EPOCH_LIMIT = (1 << 31) - 1


@kernel
def _segment_unique(
    ids, ranges, stride, segments, num_ranges, num_segments,
    table, multipliers, bits, limits, epoch, unique, counts, inverse, unique_offsets,
):  # fmt: skip
    """Ranges of ids, sorted by segment → unique ids, their counts and the inverse, in order of first appearance.

    Returns the last epoch used, or −(segment + 1) where that segment needs a larger table.
    """
    found = 0
    segment = -1
    multiplier, shift, mask, full = np.uint64(0), np.uint64(0), 0, 0
    for r in range(num_ranges):
        next_segment = load_i64(segments + 8 * r)
        while segment < next_segment:
            segment += 1
            store_i64(unique_offsets + 8 * segment, found)
            if segment == next_segment:
                epoch += 1
                b = load_i64(bits + 8 * segment)
                multiplier, shift = np.uint64(load_i64(multipliers + 8 * segment)), np.uint64(64 - b)
                mask, full = (1 << b) - 1, found + load_i64(limits + 8 * segment)
        for i in range(load_i64(ranges + stride * r), load_i64(ranges + stride * r + 8)):
            key = load_i64(ids + 8 * i)
            entry = table + 16 * np.int64((np.uint64(key) * multiplier) >> shift)
            while True:
                meta = load_i64(entry + 8)
                if (meta >> 32) != epoch:
                    if found >= full:
                        return -(segment + 1)
                    store_i64(entry, key)
                    store_i64(entry + 8, (epoch << 32) | found)
                    store_i64(unique + 8 * found, key)
                    store_u32(counts + 4 * found, 1)
                    store_u32(inverse + 4 * i, found)
                    found += 1
                    break
                if load_i64(entry) == key:
                    position = meta & 0xFFFFFFFF
                    store_u32(inverse + 4 * i, position)
                    store_u32(counts + 4 * position, load_u32(counts + 4 * position) + 1)
                    break
                entry = table + (entry - table + 16 & 16 * mask + 15)
    while segment < num_segments:
        segment += 1
        store_i64(unique_offsets + 8 * segment, found)
    return epoch


class SegmentHash:
    """The hash table of a group of segments: sizes are kept from call to call and grow where a segment needs it.

    Args:
        num_rows: for each segment, an upper bound on its keys where one is known, else 0. Keys past it are
            still told apart (they only cost a longer probe).
    """

    def __init__(self, num_rows: list[int]) -> None:
        self._table = Scratch()
        self._epoch = 0
        count = len(num_rows)
        self._bits = np.full(count, 8, np.int64)
        self._limits = np.zeros(count, np.int64)
        self._multipliers = np.full(count, np.uint64(_FIBONACCI)).view(np.int64)
        self._direct = np.array([0 < n <= _DIRECT_ROWS for n in num_rows])
        for segment, n in enumerate(num_rows):
            if self._direct[segment]:
                self._bits[segment] = max(4, int(n).bit_length())
                self._multipliers[segment] = np.uint64(1 << (64 - int(self._bits[segment]))).view(np.int64)
            self._set_limit(segment)
        # Asking NumPy for an address costs more than routing a small batch.
        self._addresses = tuple(a.ctypes.data for a in (self._multipliers, self._bits, self._limits))
        self._reserve()

    def __call__(
        self, ids: int, ranges: int, stride: int, segments: int, num_ranges: int,
        unique: int, counts: int, inverse: int, unique_offsets: int,
    ) -> None:  # fmt: skip
        """Arguments are addresses, but for `num_ranges` and `stride`: range r begins at `ranges[r · stride]`, in
        bytes, and its end stands next to it.
        """
        num_segments = len(self._bits)
        while True:
            if self._epoch + num_segments >= _EPOCH_LIMIT:
                self._table.buffer.bytes[:] = 0
                self._epoch = 0
            epoch = _segment_unique(
                ids, ranges, stride, segments, num_ranges, num_segments,
                self._table.buffer.address, *self._addresses, self._epoch, unique, counts, inverse, unique_offsets,
            )  # fmt: skip
            if epoch >= 0:
                self._epoch = epoch
                return
            self._epoch += num_segments
            self._grow(-epoch - 1)

    def _grow(self, segment: int) -> None:
        if self._direct[segment]:  # keys outside the table: hash after all
            self._direct[segment] = False
            self._multipliers[segment] = np.uint64(_FIBONACCI).view(np.int64)
        self._bits[segment] += 1
        self._set_limit(segment)
        self._reserve()

    def _set_limit(self, segment: int) -> None:
        size = 1 << int(self._bits[segment])
        self._limits[segment] = size - 1 if self._direct[segment] else size * 5 // 8

    def _reserve(self) -> None:
        before = self._table.num_bytes
        self._table.reserve(16 << int(self._bits.max(initial=8)))
        if self._table.num_bytes != before:
            self._epoch = 0  # fresh memory is zero
