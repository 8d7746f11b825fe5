"""The kernels of a frozen window, on a CPU.

The rows of a batch are numbered twice: as the requests of the rank that looks them up (its outbox: by stop and
segment), and as entries at a stop, rank after rank. Each has a mask of the phases in which it travels, uint32: bit k
for micro-batch k, and bit FINAL for what travels before the window opens. What travels in one phase lies packed, in
the order of the entries.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from rowmesh.ops.merge_update.cpu import END
from rowmesh.ops.pool.cpu import _BEGIN, _END, AHEAD, DESCRIPTOR, add_cells, first_cell
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
FINAL = 31  # the phase of rows that are final before the window opens
MAX_PARTS = FINAL


@kernel
def count_cells(features, num_features, inverse, part, counts, uses):
    """Counts how often each unique id occurs in a micro-batch, and adds the micro-batch to the uses of those that do.

    Counts must be 0 before.
    """
    for f in range(num_features):
        feature = features + 8 * DESCRIPTOR * f
        for i in range(load_i64(feature + _BEGIN), load_i64(feature + _END)):
            u = load_u32(inverse + 4 * i)
            store_u32(counts + 4 * u, load_u32(counts + 4 * u) + 1)
            store_u32(uses + 4 * u, load_u32(uses + 4 * u) | (1 << part))


@kernel
def order_uses(uses, uniques, count, out):
    """`out[p] = uses[uniques[p]]`."""
    for p in range(count):
        store_u32(out + 4 * p, load_u32(uses + 4 * load_u32(uniques + 4 * p)))


@kernel
def choose_phases(uses, count, form, num_parts, fetches, pushes):
    """When each row is fetched, and when its gradient is pushed."""
    last = 1 << (num_parts - 1)
    for p in range(count):
        mask = load_u32(uses + 4 * p)
        fetch, push = mask, mask
        if form == DELTA:
            fetch = mask & -mask
            push = last
            while push & mask == 0:
                push >>= 1
        elif form == UNSPLIT:
            fetch, push = 1, last
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
def place_rows(masks, bounds, num_members, own, phase, uniques, rows, row_bytes, addresses):
    """Says where the rows of a phase are: packed from `rows` on, as addresses of their unique ids."""
    for member in range(num_members):
        if member == own:
            continue
        for p in range(load_i64(bounds + 8 * member), load_i64(bounds + 8 * member + 8)):
            if load_u32(masks + 4 * p) >> phase & 1:
                store_i64(addresses + 8 * load_u32(uniques + 4 * p), rows)
                rows += row_bytes


@functools.cache
def kernels(dim: int, storage: int) -> SimpleNamespace:
    """The kernels for one dimension and storage, compiled at their first call."""
    DIM, STORAGE = dim, storage
    ROW_BYTES = dim * STORAGE_BYTES[storage]
    ELEMENT = COMPUTE_BYTES[storage]
    OUT = FLOAT64 if storage == FLOAT64 else FLOAT32
    OUT_BYTES = dim * ELEMENT

    @kernel
    def take_rows(arena, slots, masks, bounds, num_members, own, phase, out):
        """Packs the rows of the entries of a phase."""
        for member in range(num_members):
            if member == own:
                continue
            end = load_i64(bounds + 8 * member + 8)
            for e in range(load_i64(bounds + 8 * member), end):
                prefetch(arena + load_u32(slots + 4 * min(e + AHEAD, end - 1)) * ROW_BYTES, ROW_BYTES)
                if load_u32(masks + 4 * e) >> phase & 1:
                    store_row(out, load_row(arena + load_u32(slots + 4 * e) * ROW_BYTES, DIM, STORAGE), STORAGE)
                    out += ROW_BYTES

    @kernel
    def take_gradients(gradients, masks, bounds, num_members, own, phase, out):
        """Packs the gradients of the requests of a phase."""
        for member in range(num_members):
            if member == own:
                continue
            for p in range(load_i64(bounds + 8 * member), load_i64(bounds + 8 * member + 8)):
                if load_u32(masks + 4 * p) >> phase & 1:
                    store_row(out, load_row(gradients + p * OUT_BYTES, DIM, OUT), OUT)
                    out += OUT_BYTES

    @kernel
    def add_gradients(packed, masks, bounds, num_members, own, phase, gradients):
        """Unpacks the gradients of a phase into those of the entries; adds to what an earlier phase brought."""
        earlier = (1 << phase) - 1
        for member in range(num_members):
            if member == own:
                continue
            for e in range(load_i64(bounds + 8 * member), load_i64(bounds + 8 * member + 8)):
                mask = load_u32(masks + 4 * e)
                if mask >> phase & 1:
                    row = load_row(packed, DIM, OUT)
                    if mask & earlier:
                        row = add(load_row(gradients + e * OUT_BYTES, DIM, OUT), row)
                    store_row(gradients + e * OUT_BYTES, row, OUT)
                    packed += OUT_BYTES

    @kernel
    def backward(
        grad, pointers, cells, weights, uniques, segment_offsets, num_segments, world_size,
        uses, part, kept_begin, kept_end, sink,
    ):  # fmt: skip
        """`rowmesh.ops.pool.backward` for one micro-batch: only rows that it has, added to the sums of earlier ones.

        Sums of the requests outside [kept_begin, kept_end) begin afresh.
        """
        earlier = (1 << part) - 1
        last = load_u32(pointers + 4 * load_i64(segment_offsets + 8 * (world_size * (num_segments + 1) - 1))) - 1
        for s in range(num_segments):
            for owner in range(world_size):
                bounds = segment_offsets + 8 * (owner * (num_segments + 1) + s)
                for p in range(load_i64(bounds), load_i64(bounds + 8)):
                    mask = load_u32(uses + 4 * p)
                    if mask >> part & 1 == 0:
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
