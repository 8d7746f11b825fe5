"""Gather on a CPU: one vector load and store a row, prefetched."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from rowmesh.ops.merge_update.handles import END
from rowmesh.ops.simd import STORAGE_BYTES, kernel, load_i64, load_row, load_u32, prefetch, store_i64, store_row

AHEAD = 16


@functools.cache
def kernels(dim: int, storage: int) -> SimpleNamespace:
    """The kernels for one dimension and storage, compiled at their first call."""
    DIM, STORAGE = dim, storage
    ROW_BYTES = dim * STORAGE_BYTES[storage]

    @kernel
    def gather(table, slots, num_slots, out):
        """`out[i] = table[slots[i]]`; slots are int64."""
        for i in range(num_slots):
            ahead = load_i64(slots + 8 * min(i + AHEAD, num_slots - 1))
            prefetch(table + ahead * ROW_BYTES, ROW_BYTES)
            row = load_row(table + load_i64(slots + 8 * i) * ROW_BYTES, DIM, STORAGE)
            store_row(out + i * ROW_BYTES, row, STORAGE)

    @kernel
    def reply(arena, slots, heads, nexts, num_merged, own_begin, own_end, out):
        """Every distinct row is read once and written to each request for it, except to this rank's own.

        Entries are numbered over the requests of all ranks; [own_begin, own_end) are this rank's.
        """
        for m in range(num_merged):
            ahead = load_u32(slots + 4 * min(m + AHEAD, num_merged - 1))
            prefetch(arena + ahead * ROW_BYTES, ROW_BYTES)
            entry = load_u32(heads + 4 * m)
            row = load_row(arena + load_u32(slots + 4 * m) * ROW_BYTES, DIM, STORAGE)
            while entry != END:
                if entry < own_begin or entry >= own_end:
                    store_row(out + entry * ROW_BYTES, row, STORAGE)
                entry = load_u32(nexts + 4 * entry)

    @kernel
    def gather_slots(table, slots, num_slots, out):
        """`out[i] = table[slots[i]]`; slots are uint32."""
        for i in range(num_slots):
            prefetch(table + load_u32(slots + 4 * min(i + AHEAD, num_slots - 1)) * ROW_BYTES, ROW_BYTES)
            row = load_row(table + load_u32(slots + 4 * i) * ROW_BYTES, DIM, STORAGE)
            store_row(out + i * ROW_BYTES, row, STORAGE)

    @kernel
    def locate_slots(table, slots, num_slots, addresses):
        """`addresses[i]` = where slot `slots[i]` is; slots are uint32."""
        for i in range(num_slots):
            store_i64(addresses + 8 * i, table + load_u32(slots + 4 * i) * ROW_BYTES)

    @kernel
    def reply_from(addresses, heads, nexts, num_replying, bounds, shifts, own, own_uniques, own_addresses, out):
        """As `reply`, for rows that may be anywhere and requests of which not all get replies.

        Entries bounds[r] … bounds[r + 1] − 1 are rank r's; its replies begin at entry + shifts[r]. This rank, `own`,
        gets no row but its address: of its k-th request, as address of unique id own_uniques[k].
        """
        for m in range(num_replying):
            prefetch(load_i64(addresses + 8 * min(m + AHEAD, num_replying - 1)), ROW_BYTES)
            row = load_row(load_i64(addresses + 8 * m), DIM, STORAGE)
            entry, rank = load_u32(heads + 4 * m), 0
            while entry != END:
                while entry >= load_i64(bounds + 8 * (rank + 1)):
                    rank += 1
                if rank == own:
                    u = load_u32(own_uniques + 4 * (entry - load_i64(bounds + 8 * rank)))
                    store_i64(own_addresses + 8 * u, load_i64(addresses + 8 * m))
                else:
                    store_row(out + (entry + load_i64(shifts + 8 * rank)) * ROW_BYTES, row, STORAGE)
                entry = load_u32(nexts + 4 * entry)

    return SimpleNamespace(
        gather=gather, reply=reply, gather_slots=gather_slots, locate_slots=locate_slots, reply_from=reply_from
    )
