"""Route on a CPU: two passes over the unique ids, a counting sort by owner that keeps the order by segment."""

from __future__ import annotations

import numpy as np

from rowmesh.ops.simd import kernel, load_i64, load_u32, prefetch, store_i64, store_u32

# Short rows are asked for as soon as their address is known, so that the misses run under the routing of the others
# (dim 16: 12 % of a step). Long ones would fill the cache before pool comes to them.
PREFETCHED_ROW_BYTES = 128


@kernel
def route(
    unique, unique_offsets, counts, num_segments, bases, shifts, num_rows, world_size, owner_scratch, slot_scratch,
    arenas, received, row_bytes, slots, uniques, segment_offsets, accesses, addresses,
):  # fmt: skip
    """Rows dealt over the ranks: owner (row + shift) mod W, slot base + row // W.

    All arguments but the counts, sizes and row_bytes are addresses.

    Args:
        unique, unique_offsets, counts: what segment unique returned (int64, int64, uint32).
        bases, shifts, num_rows: int64 `[S]`, of the table that each segment is.
        owner_scratch, slot_scratch: uint32 `[U]`.
        arenas: int64 `[W]`, where the rows of an owner can be read in place, or 0.
        received: where the rows of the other owners will be received, in the order of `slots`.
        slots: uint32 `[U]` out, sorted by (owner, segment).
        uniques: uint32 `[U]` out; `slots[p]` is where unique id `uniques[p]` is.
        segment_offsets: int64 `[W, S + 1]` out, into `slots`.
        accesses: int64 `[W, S]` out: ids (not only distinct ones) by owner and segment.
        addresses: int64 `[U]` out: where row u is, or will be once it is received.

    Returns:
        −1, or the index u of the first unique id that is not a row of its table.
    """
    for i in range(world_size * (num_segments + 1)):
        store_i64(segment_offsets + 8 * i, 0)
    for i in range(world_size * num_segments):
        store_i64(accesses + 8 * i, 0)
    power = world_size & (world_size - 1) == 0
    bits = 0
    while (1 << bits) < world_size:
        bits += 1
    for s in range(num_segments):
        base, shift = load_i64(bases + 8 * s), load_i64(shifts + 8 * s)
        limit = np.uint64(load_i64(num_rows + 8 * s))
        for u in range(load_i64(unique_offsets + 8 * s), load_i64(unique_offsets + 8 * s + 8)):
            row = load_i64(unique + 8 * u)
            if np.uint64(row) >= limit:
                return u
            if power:
                quotient = row >> bits
                owner = row + shift & world_size - 1
            else:
                quotient = np.int64(np.uint64(row) // np.uint64(world_size))
                owner = row - quotient * world_size + shift
                if owner >= world_size:
                    owner -= world_size
            store_u32(owner_scratch + 4 * u, owner)
            store_u32(slot_scratch + 4 * u, base + quotient)
            cell = segment_offsets + 8 * (owner * (num_segments + 1) + s)
            store_i64(cell, load_i64(cell) + 1)
            cell = accesses + 8 * (owner * num_segments + s)
            store_i64(cell, load_i64(cell) + load_u32(counts + 4 * u))
    total = 0
    for owner in range(world_size):
        for s in range(num_segments + 1):
            cell = segment_offsets + 8 * (owner * (num_segments + 1) + s)
            size = load_i64(cell)
            store_i64(cell, total)
            total += size
    # The offsets serve as cursors, which leaves each at its end: the beginning of the next.
    for s in range(num_segments):
        for u in range(load_i64(unique_offsets + 8 * s), load_i64(unique_offsets + 8 * s + 8)):
            owner, slot = load_u32(owner_scratch + 4 * u), load_u32(slot_scratch + 4 * u)
            cell = segment_offsets + 8 * (owner * (num_segments + 1) + s)
            position = load_i64(cell)
            store_i64(cell, position + 1)
            store_u32(slots + 4 * position, slot)
            store_u32(uniques + 4 * position, u)
            arena = load_i64(arenas + 8 * owner)
            if arena:
                store_i64(addresses + 8 * u, arena + slot * row_bytes)
                if row_bytes <= PREFETCHED_ROW_BYTES:
                    prefetch(arena + slot * row_bytes, 64)
            else:
                store_i64(addresses + 8 * u, received + position * row_bytes)
    for owner in range(world_size):
        for s in range(num_segments, 0, -1):
            cell = segment_offsets + 8 * (owner * (num_segments + 1) + s)
            store_i64(cell, load_i64(cell - 8))
        cell = segment_offsets + 8 * owner * (num_segments + 1)
        if owner == 0:
            store_i64(cell, 0)
        else:
            store_i64(cell, load_i64(cell - 8))
    return -1
