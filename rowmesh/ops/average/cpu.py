"""Average of rows on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from rowmesh.ops.merge_update.handles import HostMerged
from rowmesh.ops.simd import (
    FLOAT32,
    FLOAT64,
    STORAGE,
    STORAGE_BYTES,
    add,
    axpy,
    kernel,
    load_i64,
    load_row,
    load_u32,
    prefetch,
    store_i64,
    store_row,
    store_u32,
    zero_row,
)

AHEAD = 16
END = 0xFFFFFFFF


@kernel
def _mark(slots, first, end, marks, bounds, out):
    """Marks slots[first … end − 1] (uint32) and appends those that were not marked to a list; see `mark`.

    bounds: int64 `[2]`: the list's length is bounds[1]; then where the new ones begin and end.
    """
    begin = load_i64(bounds + 8)
    count = begin
    for m in range(first, end):
        slot = load_u32(slots + 4 * m)
        if marks[slot] == 0:
            marks[slot] = 1
            store_u32(out + 4 * count, slot)
            count += 1
    store_i64(bounds, begin)
    store_i64(bounds + 8, count)


def mark(merged: HostMerged, first: int, end: int, marks: Tensor, bounds: Tensor, out: Tensor) -> None:
    """Marks slots; see `rowmesh.ops.average.mark`."""
    _mark(merged.merged_slots, first, end, marks.numpy(), bounds.data_ptr(), out.data_ptr())


def pack(table: Tensor, slots: Tensor, bounds: Tensor, out: Tensor) -> None:
    """Copies rows; see `rowmesh.ops.average.pack`."""
    of_table = kernels(table.shape[1], STORAGE[table.dtype])
    of_table.pack(table.data_ptr(), slots.data_ptr(), bounds.data_ptr(), out.data_ptr())


def put(table: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Puts rows into place; see `rowmesh.ops.average.put`."""
    of_table = kernels(table.shape[1], STORAGE[table.dtype])
    of_table.put(slots.data_ptr(), len(slots), rows.data_ptr(), table.data_ptr())


def average(
    table: Tensor,
    merged: HostMerged,
    rows: Sequence[Tensor],
    ends: Tensor,
    own: int,
    before: Tensor,
    out: Tensor | None,
) -> None:
    """Averages rows; see `rowmesh.ops.average.average`."""
    row_bytes, begins = table.shape[1] * table.itemsize, ends.tolist()
    if len(rows) == 1:
        addresses = [rows[0].data_ptr() + begin * row_bytes for begin in begins]
    else:
        addresses = [*(part.data_ptr() for part in rows), 0]
    sent = np.array([*zip(addresses, begins, strict=True)], np.int64)
    chains = merged.merged_slots, merged.heads, merged.nexts, merged.num_merged
    written = 0 if out is None else out.data_ptr()
    of_table = kernels(table.shape[1], STORAGE[table.dtype])
    of_table.average(*chains, sent.ctypes.data, len(begins) - 1, own, before.data_ptr(), table.data_ptr(), written)


@functools.cache
def kernels(dim: int, storage: int) -> SimpleNamespace:
    """The kernels for one dimension and storage, compiled at their first call."""
    DIM, STORAGE = dim, storage
    ROW_BYTES = dim * STORAGE_BYTES[storage]
    OUT = FLOAT64 if storage == FLOAT64 else FLOAT32
    SCALAR = np.float64 if storage == FLOAT64 else np.float32

    @kernel
    def average(slots, heads, nexts, num_merged, sent, num_groups, own, old, table, out):
        """The mean over groups of each merged slot's row: w₀ + Σ (wₘ − w₀) / M, in the order of the groups.

        sent: int64 `[M + 1, 2]`, where each group's rows are and its first entry; the last has where entries end.
        A group without an entry for a slot has the value from before: in `old`, at the place of group `own`'s entry,
        where that group (this rank's) has one, else in the table. The mean of slot i goes to row i of `out`, or into
        the table where that is 0.
        """
        share = SCALAR(1.0 / num_groups)
        own_first, own_end = load_i64(sent + 16 * own + 8), load_i64(sent + 16 * own + 24)
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
                first, at = load_i64(sent + 16 * group + 8), before
                if entry < load_i64(sent + 16 * group + 24):
                    at = load_i64(sent + 16 * group) + (entry - first) * ROW_BYTES
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

    @kernel
    def pack(table, slots, bounds, out):
        """`out[i] = table[slots[i]]` for bounds[0] ≤ i < bounds[1]."""
        begin, end = load_i64(bounds), load_i64(bounds + 8)
        for i in range(begin, end):
            prefetch(table + load_u32(slots + 4 * min(i + AHEAD, end - 1)) * ROW_BYTES, ROW_BYTES)
            row = load_row(table + load_u32(slots + 4 * i) * ROW_BYTES, DIM, STORAGE)
            store_row(out + i * ROW_BYTES, row, STORAGE)

    return SimpleNamespace(average=average, put=put, pack=pack)
