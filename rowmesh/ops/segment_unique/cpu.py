"""Segment unique on a CPU: one small open-addressing hash table, reused by every segment.

An entry is 8 bytes: the low half of the key, and the position of the unique id plus one; the rest of the key is
compared where the unique ids stand. The table is sized to the segment, cleared before it, and stays in the cache. A
segment of few possible keys is addressed by the key itself: with the multiplier 2^(64−bits) the hash is key mod
2^bits, which has no collisions, and the loop stays the same.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.memory import Scratch
from rowmesh.ops.simd import (
    FLOAT32,
    inlined,
    kernel,
    load_i64,
    load_u32,
    opaque,
    store_i64,
    store_row,
    store_u32,
    zero_row,
)

_FIBONACCI = 0x9E3779B97F4A7C15
_DIRECT_ROWS = 1 << 13  # below this many rows a table is addressed directly
_LOW = 0xFFFFFFFF
_RUN = 256  # ids after which the loop may change
_MANY_NEW = 24  # of a run: the next one is taken by the loop for new ids


@inlined
def _probe(cell, half, key, table, mask, unique):
    """The cell of a key, and the position of its unique id; −1, and a free cell, where there is none."""
    while True:
        entry = load_i64(cell)
        if entry == 0:
            return cell, -1
        if np.uint64(entry ^ half) <= np.uint64(_LOW):
            position = (entry & _LOW) - 1
            if load_i64(unique + 8 * position) == key:
                return cell, position
        cell = table + (cell - table + 8 & mask)


@kernel
def _segment_unique(
    ids,
    ranges,
    stride,
    segments,
    num_ranges,
    num_segments,
    table,
    multipliers,
    bits,
    limits,
    unique,
    counts,
    inverse,
    unique_offsets,
):
    """Ranges of ids, sorted by segment → unique ids, their counts and the inverse, in order of first appearance.

    Returns −1, or the first segment that needs a larger table.
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
                b = load_i64(bits + 8 * segment)
                multiplier, shift = np.uint64(load_i64(multipliers + 8 * segment)), np.uint64(64 - b)
                mask, full = (8 << b) - 1, found + load_i64(limits + 8 * segment)
                for line in range(table, table + (8 << b), 64):
                    store_row(line, zero_row(16, FLOAT32), FLOAT32)
        i, end = load_i64(ranges + stride * r), load_i64(ranges + stride * r + 8)
        before = found - _RUN
        while i < end:
            stop, has_many_new, before = min(i + _RUN, end), found - before > _MANY_NEW, found
            while has_many_new and i < stop:
                # No branch asks whether an id is new: a mask chooses, as processors guess wrong for most new ids.
                key = load_i64(ids + 8 * i)
                half = key << 32
                cell = table + 8 * np.int64((np.uint64(key) * multiplier) >> shift)
                entry = load_i64(cell)
                is_new = opaque(-np.int64(entry == 0))
                position = (found & is_new) | ((entry & _LOW) - 1 & ~is_new)
                differs = ((entry ^ half) >> 32) | (load_i64(unique + 8 * position) ^ key)
                if differs & ~is_new:
                    cell, position = _probe(table + (cell - table + 8 & mask), half, key, table, mask, unique)
                    is_new = -np.int64(position < 0)
                    position = (found & is_new) | (position & ~is_new)
                if found - is_new > full:
                    return segment
                store_i64(cell, half | (position + 1))
                store_i64(unique + 8 * position, key)
                store_u32(counts + 4 * position, (load_u32(counts + 4 * position) & ~is_new) + 1)
                store_u32(inverse + 4 * i, position)
                found -= is_new
                i += 1
            while i < stop:
                key = load_i64(ids + 8 * i)
                half = key << 32
                cell = table + 8 * np.int64((np.uint64(key) * multiplier) >> shift)
                cell, position = _probe(cell, half, key, table, mask, unique)
                if position < 0:
                    if found >= full:
                        return segment
                    store_i64(cell, half | (found + 1))
                    store_i64(unique + 8 * found, key)
                    store_u32(counts + 4 * found, 1)
                    store_u32(inverse + 4 * i, found)
                    found += 1
                else:
                    store_u32(inverse + 4 * i, position)
                    store_u32(counts + 4 * position, load_u32(counts + 4 * position) + 1)
                i += 1
    while segment < num_segments:
        segment += 1
        store_i64(unique_offsets + 8 * segment, found)
    return -1


class SegmentHash:
    """The hash table of a group of segments: sizes are kept from call to call and grow where a segment needs it.

    Args:
        num_rows: for each segment, an upper bound on its keys where one is known, else 0. Keys past it are
            still distinguished (they only cost a longer probe).
        num_ids: for each segment, about how many ids it will have, where that is known.
    """

    def __init__(self, num_rows: list[int], num_ids: list[int] | None = None) -> None:
        self._table = Scratch()
        count = len(num_rows)
        self._bits = np.array([max(8, n.bit_length()) for n in num_ids or [0] * count], np.int64)
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
        self,
        ids: int,
        ranges: int,
        stride: int,
        segments: int,
        num_ranges: int,
        unique: int,
        counts: int,
        inverse: int,
        unique_offsets: int,
    ) -> None:
        """Arguments are addresses, but for `num_ranges` and `stride`: range r begins at `ranges[r · stride]`, in
        bytes, and its end stands next to it.
        """
        while True:
            refused = _segment_unique(
                ids,
                ranges,
                stride,
                segments,
                num_ranges,
                len(self._bits),
                self._table_address,
                *self._addresses,
                unique,
                counts,
                inverse,
                unique_offsets,
            )
            if refused < 0:
                return
            self._grow(refused)

    def _grow(self, segment: int) -> None:
        if self._direct[segment]:  # keys outside the table: hash after all
            self._direct[segment] = False
            self._multipliers[segment] = np.uint64(_FIBONACCI).view(np.int64)
        self._bits[segment] += 2 if self._bits[segment] < 16 else 1
        self._set_limit(segment)
        self._reserve()

    def _set_limit(self, segment: int) -> None:
        size = 1 << int(self._bits[segment])
        self._limits[segment] = size - 1 if self._direct[segment] else size * 3 // 8

    def _reserve(self) -> None:
        self._table_address = self._table.reserve(8 << int(self._bits.max(initial=8)))
