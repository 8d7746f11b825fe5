"""Average of rows on a CPU."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np

from rowmesh.ops.simd import (
    FLOAT32,
    FLOAT64,
    STORAGE_BYTES,
    add,
    axpy,
    kernel,
    load_i64,
    load_row,
    load_u32,
    prefetch,
    store_row,
    store_u32,
    zero_row,
)

AHEAD = 16
END = 0xFFFFFFFF


@kernel
def mark(slots, first, end, marks, out):
    """Marks slots[first … end − 1] (uint32) in `marks` (uint8, one a slot) and writes those that were not to `out`.

    Returns how many there were.
    """
    count = 0
    for m in range(first, end):
        slot = load_u32(slots + 4 * m)
        if marks[slot] == 0:
            marks[slot] = 1
            store_u32(out + 4 * count, slot)
            count += 1
    return count


@functools.cache
def kernels(dim: int, storage: int) -> SimpleNamespace:
    """The kernels for one dimension and storage, compiled at their first call."""
    DIM, STORAGE = dim, storage
    ROW_BYTES = dim * STORAGE_BYTES[storage]
    OUT = FLOAT64 if storage == FLOAT64 else FLOAT32
    SCALAR = np.float64 if storage == FLOAT64 else np.float32

    @kernel
    def average(slots, heads, nexts, num_merged, told, num_groups, own, old, table, out):
        """The mean over groups of each merged slot's row: w₀ + Σ (wₘ − w₀) / M, in the order of the groups.

        told: int64 `[M + 1, 2]`, where each group's rows are and its first entry; the last has where entries end.
        A group without an entry for a slot has the value from before: in `old`, at the place of group `own`'s entry,
        where that group (this rank's) has one, else in the table. The mean of slot i goes to row i of `out`, or into
        the table where that is 0.
        """
        share = SCALAR(1.0 / num_groups)
        own_first, own_end = load_i64(told + 16 * own + 8), load_i64(told + 16 * own + 24)
        for i in range(num_merged):
            prefetch(table + load_u32(slots + 4 * min(i + AHEAD, num_merged - 1)) * ROW_BYTES, ROW_BYTES)
            place = table + load_u32(slots + 4 * i) * ROW_BYTES
            before, entry = place, load_u32(heads + 4 * i)
            while entry != END:
                if own_first <= entry and entry < own_end:
                    before = old + (entry - own_first) * ROW_BYTES
                entry = load_u32(nexts + 4 * entry)
            entry = load_u32(heads + 4 * i)
            base, total = zero_row(DIM, OUT), zero_row(DIM, OUT)
            for group in range(num_groups):
                first, at = load_i64(told + 16 * group + 8), before
                if entry < load_i64(told + 16 * group + 24):
                    at = load_i64(told + 16 * group) + (entry - first) * ROW_BYTES
                    entry = load_u32(nexts + 4 * entry)
                row = load_row(at, DIM, STORAGE)
                if group == 0:
                    base = row
                else:
                    total = add(total, axpy(SCALAR(-1.0), base, row))
            store_row(place if out == 0 else out + i * ROW_BYTES, axpy(share, total, base), STORAGE)

    @kernel
    def put(slots, count, rows, table):
        """`table[slots[i]] = rows[i]`."""
        for i in range(count):
            prefetch(table + load_u32(slots + 4 * min(i + AHEAD, count - 1)) * ROW_BYTES, ROW_BYTES)
            row = load_row(rows + i * ROW_BYTES, DIM, STORAGE)
            store_row(table + load_u32(slots + 4 * i) * ROW_BYTES, row, STORAGE)

    return SimpleNamespace(average=average, put=put)
