"""The kernels of a frozen window, on a CPU.

The rows of a batch are numbered twice: as the requests of the rank that looks them up (in its send buffer: by owner
and segment), and as entries at their owner, rank after rank. Each has a mask of the phases in which it travels, uint32:
bit FINAL for rows that travel before the window opens, and bit k + 1 for micro-batch k. The entries of a phase lie
packed, in the order of the entries: `sort_phases` finds that order once, when the window opens.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from rowmesh.ops.merge_update.handles import END
from rowmesh.ops.pool.cpu import AHEAD, DESCRIPTOR, IDS_BEGIN, IDS_END, add_cells, first_cell
from rowmesh.ops.simd import (
    COMPUTE_BYTES,
    FLOAT32,
    FLOAT64,
    STORAGE_BYTES,
    add,
    kernel,
    load_i64,
    load_row,
    load_u8,
    load_u32,
    prefetch,
    store_i64,
    store_row,
    store_u8,
    store_u32,
)

UNSPLIT, NAIVE, DELTA = 0, 1, 2
FORMS = {"unsplit": UNSPLIT, "naive": NAIVE, "delta": DELTA}
FINAL = 0  # the phase of rows that are final before the window opens; that of micro-batch k is k + 1
MAX_PARTS = 31


@kernel
def count_cells(features, num_features, inverse, phase, counts, uses):
    """Counts how often each unique id occurs in a micro-batch, and adds its phase to the uses of those that do.

    Counts must be 0 before.
    """
    for f in range(num_features):
        feature = features + 8 * DESCRIPTOR * f
        for i in range(load_i64(feature + IDS_BEGIN), load_i64(feature + IDS_END)):
            u = load_u32(inverse + 4 * i)
            store_u32(counts + 4 * u, load_u32(counts + 4 * u) + 1)
            store_u32(uses + 4 * u, load_u32(uses + 4 * u) | (1 << phase))


@kernel
def order_uses(uses, uniques, count, out):
    """`out[p] = uses[uniques[p]]`."""
    for p in range(count):
        store_u32(out + 4 * p, load_u32(uses + 4 * load_u32(uniques + 4 * p)))


@kernel
def choose_phases(uses, count, form, num_parts, fetches, pushes):
    """When each row is fetched, and when its gradient is pushed."""
    last = 1 << num_parts
    for p in range(count):
        mask = load_u32(uses + 4 * p)
        fetch, push = mask, mask
        if form == DELTA:
            fetch = mask & -mask
            push = last
            while push & mask == 0:
                push >>= 1
        elif form == UNSPLIT:
            fetch, push = 2, last
        store_u32(fetches + 4 * p, fetch)
        store_u32(pushes + 4 * p, push)


@kernel
def count_phases(masks, bounds, num_members, own, num_phases, out):
    """`out[phase, member]` (int64) = entries of a member that travel in a phase; none of this rank's own."""
    for cell in range(num_phases * num_members):
        store_i64(out + 8 * cell, 0)
    for member in range(num_members):
        if member == own:
            continue
        for e in range(load_i64(bounds + 8 * member), load_i64(bounds + 8 * member + 8)):
            mask, phase = load_u32(masks + 4 * e), 0
            while mask:
                if mask & 1:
                    cell = out + 8 * (phase * num_members + member)
                    store_i64(cell, load_i64(cell) + 1)
                mask >>= 1
                phase += 1


@kernel
def sort_phases(masks, bounds, num_members, own, num_phases, sizes, cursors, order):
    """`order` (uint32) = entries of other members by phase, then by member, in their order; in every phase they have.

    `sizes` (int64 `[phases, members]`) are those of `count_phases`; `cursors` has as much room.
    """
    total = 0
    for cell in range(num_phases * num_members):
        store_i64(cursors + 8 * cell, total)
        total += load_i64(sizes + 8 * cell)
    for member in range(num_members):
        if member == own:
            continue
        for e in range(load_i64(bounds + 8 * member), load_i64(bounds + 8 * member + 8)):
            mask, phase = load_u32(masks + 4 * e), 0
            while mask:
                if mask & 1:
                    cursor = cursors + 8 * (phase * num_members + member)
                    at = load_i64(cursor)
                    store_u32(order + 4 * at, e)
                    store_i64(cursor, at + 1)
                mask >>= 1
                phase += 1


@kernel
def note_touched(slots, num_merged, touched, number, before):
    """Notes the window that asks for the distinct slots; `before` gets the one that asked for each last."""
    for m in range(num_merged):
        at = touched + 4 * load_u32(slots + 4 * m)
        store_u32(before + 4 * m, load_u32(at))
        store_u32(at, number)


@kernel
def mark_final(before, heads, nexts, num_merged, number, fetches):
    """Gives the entries of rows that the window before `number` does not touch to the phase FINAL."""
    for m in range(num_merged):
        if load_u32(before + 4 * m) == number - 1:
            continue
        entry = load_u32(heads + 4 * m)
        while entry != END:
            store_u32(fetches + 4 * entry, 1 << FINAL)
            entry = load_u32(nexts + 4 * entry)


@kernel
def spread(values, heads, nexts, num_merged, out):
    """`out[e] = values[m]` for every entry e of the distinct slot m."""
    for m in range(num_merged):
        value, entry = load_u32(values + 4 * m), load_u32(heads + 4 * m)
        while entry != END:
            store_u32(out + 4 * entry, value)
            entry = load_u32(nexts + 4 * entry)


@kernel
def place_own(places, heads, nexts, num_merged, begin, end, uniques, base, row_bytes, addresses):
    """Addresses of the rows that a rank asked itself for, entries begin … end − 1.

    The row of entry begin + k is that of unique id uniques[k].
    """
    for m in range(num_merged):
        address, entry = base + load_u32(places + 4 * m) * row_bytes, load_u32(heads + 4 * m)
        while entry != END:
            if begin <= entry < end:
                store_i64(addresses + 8 * load_u32(uniques + 4 * (entry - begin)), address)
            entry = load_u32(nexts + 4 * entry)


@kernel
def pack_bits(masks, begin, end, out):
    """Eight entries a byte: whether each is of the phase FINAL."""
    for first in range(begin, end, 8):
        byte = 0
        for e in range(first, min(first + 8, end)):
            byte |= (load_u32(masks + 4 * e) >> FINAL & 1) << (e - first)
        store_u8(out + (first - begin >> 3), byte)


@kernel
def unpack_bits(packed, begin, end, masks):
    """Gives the entries whose bit is set to the phase FINAL."""
    for e in range(begin, end):
        if load_u8(packed + (e - begin >> 3)) >> (e - begin & 7) & 1:
            store_u32(masks + 4 * e, 1 << FINAL)


@kernel
def place(order, count, numbers, base, row_bytes, addresses):
    """Writes where packed entries are, from `base` on: in `addresses[numbers[e]]` for entry e; 0: `addresses[e]`.

    An entry that travels in several phases gets the first place.
    """
    for i in range(count - 1, -1, -1):
        e = load_u32(order + 4 * i)
        at = load_u32(numbers + 4 * e) if numbers else e
        store_i64(addresses + 8 * at, base + i * row_bytes)


@functools.cache
def kernels(dim: int, storage: int) -> SimpleNamespace:
    """The kernels for one dimension and storage, compiled at their first call."""
    DIM, STORAGE = dim, storage
    ROW_BYTES = dim * STORAGE_BYTES[storage]
    ELEMENT = COMPUTE_BYTES[storage]
    OUT = FLOAT64 if storage == FLOAT64 else FLOAT32
    OUT_BYTES = dim * ELEMENT

    @kernel
    def take_rows(arena, slots, order, count, out):
        """Packs the rows of some entries: `out[i] = arena[slots[order[i]]]`."""
        for i in range(count):
            ahead = load_u32(order + 4 * min(i + AHEAD, count - 1))
            prefetch(arena + load_u32(slots + 4 * ahead) * ROW_BYTES, ROW_BYTES)
            slot = load_u32(slots + 4 * load_u32(order + 4 * i))
            store_row(out + i * ROW_BYTES, load_row(arena + slot * ROW_BYTES, DIM, STORAGE), STORAGE)

    @kernel
    def take_gradients(gradients, order, count, out):
        """Packs the gradients of some requests: `out[i] = gradients[order[i]]`."""
        for i in range(count):
            row = load_row(gradients + load_u32(order + 4 * i) * OUT_BYTES, DIM, OUT)
            store_row(out + i * OUT_BYTES, row, OUT)

    @kernel
    def add_gradients(packed, order, count, masks, phase, addresses):
        """Adds the gradients of a phase to what an earlier one brought, which is at the addresses of its entries."""
        earlier = (1 << phase) - 1
        for i in range(count):
            e = load_u32(order + 4 * i)
            if load_u32(masks + 4 * e) & earlier:
                address = load_i64(addresses + 8 * e)
                row = add(load_row(address, DIM, OUT), load_row(packed + i * OUT_BYTES, DIM, OUT))
                store_row(address, row, OUT)

    @kernel
    def backward(
        grad,
        pointers,
        cells,
        weights,
        uniques,
        segment_offsets,
        num_segments,
        world_size,
        uses,
        phase,
        kept_begin,
        kept_end,
        sink,
    ):
        """`rowmesh.ops.pool.backward` for one micro-batch: only rows that it has, added to the sums of earlier ones.

        Sums of the requests outside [kept_begin, kept_end) begin afresh.
        """
        earlier = (1 << phase) - 1
        last = load_u32(pointers + 4 * load_i64(segment_offsets + 8 * (world_size * (num_segments + 1) - 1))) - 1
        for s in range(num_segments):
            for owner in range(world_size):
                bounds = segment_offsets + 8 * (owner * (num_segments + 1) + s)
                for p in range(load_i64(bounds), load_i64(bounds + 8)):
                    mask = load_u32(uses + 4 * p)
                    if mask >> phase & 1 == 0:
                        continue
                    u = load_u32(uniques + 4 * p)
                    j, end = load_u32(pointers + 4 * u), load_u32(pointers + 4 * u + 4)
                    row = first_cell(grad, cells, weights, j, last, DIM, OUT, ELEMENT, OUT_BYTES)
                    if mask & earlier and kept_begin <= p < kept_end:
                        row = add(load_row(sink + OUT_BYTES * p, DIM, OUT), row)
                    row = add_cells(row, grad, cells, weights, j + 1, end, last, DIM, OUT, ELEMENT, OUT_BYTES)
                    store_row(sink + OUT_BYTES * p, row, OUT)

    return SimpleNamespace(
        take_rows=take_rows, take_gradients=take_gradients, add_gradients=add_gradients, backward=backward
    )
