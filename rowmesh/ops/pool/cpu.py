"""Pool and its backward on a CPU.

Forward reads each row where it is, through its address: in the arena of this rank, in that of a rank on the same host,
or in a receive buffer. Backward is one pass over the inverse in compressed form (for each row, the output cells it
went into): every gradient is read once, every sum stays in registers and is written once, to where push wants it.

A cell is an element offset into the output tensor, 32 bits. Features are described by rows of eight int64::

    ids_begin  ids_end  offsets (address, or 0)  bag_size  num_bags  first_cell  stride  mean
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

from rowmesh.ops.simd import (
    COMPUTE_BYTES,
    FLOAT32,
    FLOAT64,
    STORAGE_BYTES,
    add,
    axpy,
    inlined,
    kernel,
    load_f32,
    load_f64,
    load_i64,
    load_row,
    load_scalar,
    load_u32,
    prefetch,
    prefetch_far,
    prefetch_to_write,
    scale,
    store_f32,
    store_f64,
    store_i64,
    store_row,
    store_u32,
    stream_end,
    stream_row,
    zero_row,
)

AHEAD = 16  # rows to prefetch ahead; 8 to 32 measure alike
NEW_ROWS_AHEAD = 24  # the same, counted in rows that were not read before
BAGS_AHEAD = 8  # vectors of bags whose lines are asked for before they are written
SUMS_AHEAD = 16  # the same of sums of gradients
STREAMED_BYTES = 8 << 20  # so many bytes of sums, which no cache keeps until the update, are written past the caches
DESCRIPTOR = 8  # int64 values that describe a feature
IDS_BEGIN, IDS_END, OFFSETS, BAG_SIZE, NUM_BAGS, FIRST_CELL, STRIDE, MEAN = range(0, 8 * DESCRIPTOR, 8)


@inlined
def ids_in(offsets, bag_size, bag):
    """The number of ids in a bag."""
    if offsets:
        return load_i64(offsets + 8 * bag + 8) - load_i64(offsets + 8 * bag)
    return bag_size


@kernel
def id_weights(features, num_features, weights, double_in, out, double_out):
    """The factor of each id: its weight (1 where `weights` is 0), over the bag's size where the feature is a mean."""
    for f in range(num_features):
        feature = features + 8 * DESCRIPTOR * f
        i, offsets = load_i64(feature + IDS_BEGIN), load_i64(feature + OFFSETS)
        for bag in range(load_i64(feature + NUM_BAGS)):
            size = ids_in(offsets, load_i64(feature + BAG_SIZE), bag)
            divisor = float(size) if load_i64(feature + MEAN) else 1.0
            for _ in range(size):
                value = 1.0
                if weights:
                    value = load_f64(weights + 8 * i) if double_in else float(load_f32(weights + 4 * i))
                if double_out:
                    store_f64(out + 8 * i, value / divisor)
                else:
                    store_f32(out + 4 * i, value / divisor)
                i += 1


@kernel
def file_cells(features, num_features, inverse, counts, num_unique, pointers, cells):
    """Files the output cell of every id under its row: row u went into `cells[pointers[u]:pointers[u + 1]]`.

    Pointers start as the ends and are counted down. Going backwards through features and ids leaves each row's cells in
    the order of the ids.
    """
    total = 0
    for u in range(num_unique):
        total += load_u32(counts + 4 * u)
        store_u32(pointers + 4 * u, total)
    store_u32(pointers + 4 * num_unique, total)
    for f in range(num_features - 1, -1, -1):
        feature = features + 8 * DESCRIPTOR * f
        begin, i = load_i64(feature + IDS_BEGIN), load_i64(feature + IDS_END) - 1
        offsets, bag_size = load_i64(feature + OFFSETS), load_i64(feature + BAG_SIZE)
        num_bags, stride = load_i64(feature + NUM_BAGS), load_i64(feature + STRIDE)
        cell = load_i64(feature + FIRST_CELL) + (num_bags - 1) * stride
        if bag_size == 1:
            while i >= begin:
                u = load_u32(inverse + 4 * i)
                at = load_u32(pointers + 4 * u) - 1
                store_u32(pointers + 4 * u, at)
                store_u32(cells + 4 * at, cell)
                cell -= stride
                i -= 1
            continue
        for bag in range(num_bags - 1, -1, -1):
            for _ in range(ids_in(offsets, bag_size, bag)):
                u = load_u32(inverse + 4 * i)
                at = load_u32(pointers + 4 * u) - 1
                store_u32(pointers + 4 * u, at)
                store_u32(cells + 4 * at, cell)
                i -= 1
            cell -= stride


@kernel
def file_weights(features, num_features, inverse, pointers, num_unique, cursors, weights, element_bytes, out):
    """Orders the factors of the ids as `file_cells` orders their cells."""
    for u in range(num_unique):
        store_u32(cursors + 4 * u, load_u32(pointers + 4 * u))
    for f in range(num_features):
        feature = features + 8 * DESCRIPTOR * f
        for i in range(load_i64(feature + IDS_BEGIN), load_i64(feature + IDS_END)):
            u = load_u32(inverse + 4 * i)
            at = load_u32(cursors + 4 * u)
            store_u32(cursors + 4 * u, at + 1)
            if element_bytes == 8:
                store_i64(out + 8 * at, load_i64(weights + 8 * i))
            else:
                store_u32(out + 4 * at, load_u32(weights + 4 * i))


# Inlined into the kernels with dim, storage, … as constants.
@inlined
def first_cell(grad, cells, weights, j, last, dim, out, element, out_bytes):
    """The output gradient in cell j, times its factor unless `weights` is 0."""
    prefetch(grad + element * load_u32(cells + 4 * min(j + AHEAD, last)), out_bytes)
    row = load_row(grad + element * load_u32(cells + 4 * j), dim, out)
    if weights:
        row = scale(load_scalar(weights + element * j, out), row)
    return row


@inlined
def add_cells(row, grad, cells, weights, j, end, last, dim, out, element, out_bytes):
    """`row` and the output gradients in cells j … end − 1, each times its factor unless `weights` is 0."""
    while j < end:
        prefetch(grad + element * load_u32(cells + 4 * min(j + AHEAD, last)), out_bytes)
        more = load_row(grad + element * load_u32(cells + 4 * j), dim, out)
        if weights:
            row = axpy(load_scalar(weights + element * j, out), more, row)
        else:
            row = add(row, more)
        j += 1
    return row


@functools.cache
def kernels(dim: int, storage: int) -> SimpleNamespace:
    """The kernels that depend on the dimension and on how rows are stored, compiled at their first call."""
    DIM, STORAGE = dim, storage
    ROW_BYTES = dim * STORAGE_BYTES[storage]
    ELEMENT = COMPUTE_BYTES[storage]
    OUT = FLOAT64 if storage == FLOAT64 else FLOAT32
    OUT_BYTES = dim * ELEMENT
    IS_WHOLE_LINES = OUT_BYTES % 64 == 0

    @kernel
    def pool(features, num_features, addresses, num_unique, inverse, weights, out):
        """The sum of each bag, with a factor for each id unless `weights` is 0; an empty bag is zero."""
        prefetched = -1
        for f in range(num_features):
            feature = features + 8 * DESCRIPTOR * f
            i, end = load_i64(feature + IDS_BEGIN), load_i64(feature + IDS_END)
            offsets, bag_size = load_i64(feature + OFFSETS), load_i64(feature + BAG_SIZE)
            stride = ELEMENT * load_i64(feature + STRIDE)
            to = out + ELEMENT * load_i64(feature + FIRST_CELL)
            if i == end:
                for _ in range(load_i64(feature + NUM_BAGS)):
                    store_row(to, zero_row(DIM, STORAGE), OUT)
                    to += stride
                continue
            if bag_size == 1 and not weights:
                last = end - 1
                while i < end:
                    prefetch_to_write(to + BAGS_AHEAD * stride, OUT_BYTES)
                    ahead = load_u32(inverse + 4 * min(i + AHEAD, last))
                    prefetch_far(load_i64(addresses + 8 * ahead), ROW_BYTES)
                    address = load_i64(addresses + 8 * load_u32(inverse + 4 * i))
                    store_row(to, load_row(address, DIM, STORAGE), OUT)
                    to += stride
                    i += 1
                continue
            # Rows are numbered in order of first appearance: those to come soon follow the highest number so far.
            prefetched = max(prefetched, load_u32(inverse + 4 * i))
            for bag in range(load_i64(feature + NUM_BAGS)):
                prefetch_to_write(to + BAGS_AHEAD * stride, OUT_BYTES)
                total = zero_row(DIM, STORAGE)
                for _ in range(ids_in(offsets, bag_size, bag)):
                    u = load_u32(inverse + 4 * i)
                    row = load_row(load_i64(addresses + 8 * u), DIM, STORAGE)
                    if weights:
                        total = axpy(load_scalar(weights + ELEMENT * i, STORAGE), row, total)
                    else:
                        total = add(total, row)
                    i += 1
                    if prefetched < u + NEW_ROWS_AHEAD and prefetched < num_unique - 1:
                        prefetched += 1
                        prefetch_far(load_i64(addresses + 8 * prefetched), ROW_BYTES)
                store_row(to, total, OUT)
                to += stride

    @kernel
    def backward(grad, pointers, cells, weights, uniques, segment_offsets, num_segments, world_size, sink):
        """`sink[p]` = the sum of the output gradients in the cells of `uniques[p]`, in order.

        Segment by segment, so that the gradients of a feature stay in the cache while all owners' sums are made.
        """
        count = load_i64(segment_offsets + 8 * (world_size * (num_segments + 1) - 1))
        last = load_u32(pointers + 4 * count) - 1
        is_streamed = IS_WHOLE_LINES and sink & 63 == 0 and OUT_BYTES * count >= STREAMED_BYTES
        for s in range(num_segments):
            for owner in range(world_size):
                bounds = segment_offsets + 8 * (owner * (num_segments + 1) + s)
                for p in range(load_i64(bounds), load_i64(bounds + 8)):
                    if not is_streamed:
                        prefetch_to_write(sink + OUT_BYTES * (p + SUMS_AHEAD), OUT_BYTES)
                    u = load_u32(uniques + 4 * p)
                    j, end = load_u32(pointers + 4 * u), load_u32(pointers + 4 * u + 4)
                    row = first_cell(grad, cells, weights, j, last, DIM, OUT, ELEMENT, OUT_BYTES)
                    row = add_cells(row, grad, cells, weights, j + 1, end, last, DIM, OUT, ELEMENT, OUT_BYTES)
                    if is_streamed:
                        stream_row(sink + OUT_BYTES * p, row)
                    else:
                        store_row(sink + OUT_BYTES * p, row, OUT)
        if is_streamed:
            stream_end()

    return SimpleNamespace(pool=pool, backward=backward)
