"""Route on a CPU: two passes over the unique ids and a counting sort by (destination, segment)."""

from __future__ import annotations

import numpy as np

from rowmesh.ops.counting_sort import quotient, restore, to_offsets
from rowmesh.ops.route.buckets import bucket_of
from rowmesh.ops.simd import (
    inlined,
    kernel,
    load_f64,
    load_i64,
    load_u32,
    prefetch,
    store_i64,
    store_u32,
)

# Short rows are asked for as soon as their address is known, so that the misses run under the routing of the others
# (dim 16: 12 % of a step). Long ones would fill the cache before pool comes to them.
PREFETCHED_ROW_BYTES = 128

# A header of int64 values, which stays the same from batch to batch, and where each stands.
HEADER = 14
(
    RANGES,
    INDEX,
    BUCKETS,
    NUM_ROWS,
    NUM_TABLES,
    NUM_KINDS,
    NUM_REPLYING,
    WORLD_SIZE,
    RANK,
    RANKS_PER_NODE,
    KEY_STRIDE,
    ARENAS,
    ROW_BYTES,
    KIND_FLAGS,
) = range(0, 8 * HEADER, 8)
DESCRIPTOR, INDEX_ENTRY = 11, 6  # int64 values that describe a range, and a table
_DESCRIPTOR_BYTES, _INDEX_BYTES = 8 * DESCRIPTOR, 8 * INDEX_ENTRY
(_START, _SHIFT, _MODULUS, _RANK, _DIVISOR, _BASE, _KIND, _FLAGS, _ORIGIN, _PER_MODULUS, _PER_DIVISOR) = range(
    0, _DESCRIPTOR_BYTES, 8
)
_KIND_BITS = 24  # a destination and its kind share 32 bits
RELAY, COPY = 1, 2  # flags of a range: the destination is the node leader; a copy is here
FLAG_BITS = 2  # KIND_FLAGS has the flags of kind k in bits 2k and 2k + 1


@inlined
def _table(header, table):
    """What `_find` needs to know of a table, read once: a loop that stores would read it for every id."""
    index = load_i64(header + INDEX) + _INDEX_BYTES * table
    return (
        load_i64(header + RANGES) + _DESCRIPTOR_BYTES * load_i64(index),
        load_i64(index + 8),
        load_i64(header + BUCKETS) + 4 * load_i64(index + 16),
        load_i64(index + 24),
        load_i64(index + 32),
        load_i64(index + 40),
    )


@inlined
def _find(row, ranges, count, buckets, start1, start2, start3):
    """The descriptor of the range that a row is in."""
    if count <= 4:
        number = np.int64(start1 <= row) + np.int64(start2 <= row) + np.int64(start3 <= row)
        return ranges + _DESCRIPTOR_BYTES * number
    bucket = buckets + 4 * bucket_of(row)
    first, last = load_u32(bucket), load_u32(bucket + 4)
    while first < last:
        middle = first + last + 1 >> 1
        if load_i64(ranges + _DESCRIPTOR_BYTES * middle + _START) <= row:
            first = middle
        else:
            last = middle - 1
    return ranges + _DESCRIPTOR_BYTES * first


@inlined
def _owner(row, origin, shift, modulus, rank, base, per_modulus, per_divisor):
    """Owner and slot; exact for rows below 2⁵¹ − 2 · W, see `quotient`."""
    x = row - origin
    y = x + shift
    owner = y - quotient(y, per_modulus) * modulus + rank
    return owner, base + quotient(x, per_divisor)


@inlined
def _describe(part):
    """What `_owner` needs to know of a range."""
    return (
        load_i64(part + _ORIGIN),
        load_i64(part + _SHIFT),
        load_i64(part + _MODULUS),
        load_i64(part + _RANK),
        load_i64(part + _BASE),
        load_f64(part + _PER_MODULUS),
        load_f64(part + _PER_DIVISOR),
    )


@kernel
def locate(header, table, ids, count, owners, slots):
    """Owner (uint32) and slot (uint32) of every row of one table; `route` without the sort."""
    ranges, num_ranges, buckets, start1, start2, start3 = _table(header, table)
    for i in range(count):
        row = load_i64(ids + 8 * i)
        part = _find(row, ranges, num_ranges, buckets, start1, start2, start3)
        origin, shift, modulus, only, base, per_modulus, per_divisor = _describe(part)
        owner, slot = _owner(row, origin, shift, modulus, only, base, per_modulus, per_divisor)
        store_u32(owners + 4 * i, owner)
        store_u32(slots + 4 * i, slot)


@kernel
def route(
    header,
    unique,
    unique_offsets,
    counts,
    destination_scratch,
    key_scratch,
    received,
    keys,
    uniques,
    segment_offsets,
    accesses,
    reply_offsets,
    addresses,
):
    """The destination and key of every unique id, sorted.

    All arguments are addresses. S′ = kinds · tables, W ranks.

    Args:
        header: int64 words, see above; what they point to is described in `rowmesh.placement.address_map`.
        unique, unique_offsets, counts: what segment unique returned (int64, int64, uint32).
        destination_scratch, key_scratch: uint32 `[U]`.
        received: where the rows of other ranks will be received, in the order of `keys` without those of kinds that get
            no reply.
        keys: uint32 `[U]` out, sorted by (destination, segment).
        uniques: uint32 `[U]` out; `keys[p]` asks for unique id `uniques[p]`.
        segment_offsets: int64 `[W, S′ + 1]` out, into `keys`.
        accesses: int64 `[W, S′]` out: ids (not only distinct ones) by destination and segment.
        reply_offsets: int64 `[W + 1]` out: where the replies of each destination begin among all replies.
        addresses: int64 `[U]` out: where row u is, or will be once it is received; 0 for rows that this rank asks
            itself for as node leader.

    Returns:
        −1, or the index u of the first unique id that is not a row of its table.
    """
    num_tables, num_kinds = load_i64(header + NUM_TABLES), load_i64(header + NUM_KINDS)
    world_size = load_i64(header + WORLD_SIZE)
    num_segments = num_tables * num_kinds
    for i in range(world_size * (num_segments + 1)):
        store_i64(segment_offsets + 8 * i, 0)
    for i in range(world_size * num_segments):
        store_i64(accesses + 8 * i, 0)
    refused = _place_all(
        header,
        unique,
        unique_offsets,
        counts,
        destination_scratch,
        key_scratch,
        segment_offsets,
        accesses,
        num_tables,
        num_segments,
        world_size,
    )
    if refused >= 0:
        return refused
    num_replying = load_i64(header + NUM_REPLYING) * num_tables
    to_offsets(segment_offsets, reply_offsets, world_size, num_segments, num_replying, -1)
    _sort(
        header,
        unique_offsets,
        destination_scratch,
        key_scratch,
        received,
        keys,
        uniques,
        segment_offsets,
        reply_offsets,
        addresses,
        num_tables,
        num_segments,
    )
    restore(segment_offsets, reply_offsets, world_size, num_segments)
    return -1


@inlined
def _place_all(
    header,
    unique,
    unique_offsets,
    counts,
    destination_scratch,
    key_scratch,
    segment_offsets,
    accesses,
    num_tables,
    num_segments,
    world_size,
):
    """Finds destination, kind and key of every unique id and counts them by (destination, segment)."""
    rank, per_node = load_i64(header + RANK), load_i64(header + RANKS_PER_NODE)
    key_stride = load_i64(header + KEY_STRIDE)
    node_first = rank // per_node * per_node
    nodes_per_rank = 1.0 / per_node
    bits = 0
    while (1 << bits) < world_size:
        bits += 1
    for s in range(num_tables):
        ranges, num_ranges, buckets, start1, start2, start3 = _table(header, s)
        limit = np.uint64(load_i64(load_i64(header + NUM_ROWS) + 8 * s))
        part, is_one = ranges, num_ranges == 1
        origin, shift, modulus, only, base, per_modulus, per_divisor = _describe(part)
        kind, flags = load_i64(part + _KIND), load_i64(part + _FLAGS)
        if is_one and flags == 0 and modulus == load_i64(part + _DIVISOR) == 1 << bits:
            # A whole table cyclic over a power of two of ranks, as without a plan: shifts instead of products.
            mask = world_size - 1
            for u in range(load_i64(unique_offsets + 8 * s), load_i64(unique_offsets + 8 * s + 8)):
                row = load_i64(unique + 8 * u)
                if np.uint64(row) >= limit:
                    return u
                destination = row + shift & mask
                store_u32(key_scratch + 4 * u, base + (row >> bits))
                store_u32(destination_scratch + 4 * u, destination | kind << _KIND_BITS)
                _count(destination, kind * num_tables + s, num_segments, segment_offsets, accesses, counts + 4 * u)
            continue
        for u in range(load_i64(unique_offsets + 8 * s), load_i64(unique_offsets + 8 * s + 8)):
            row = load_i64(unique + 8 * u)
            if np.uint64(row) >= limit:
                return u
            if not is_one:
                part = _find(row, ranges, num_ranges, buckets, start1, start2, start3)
                origin, shift, modulus, only, base, per_modulus, per_divisor = _describe(part)
                kind, flags = load_i64(part + _KIND), load_i64(part + _FLAGS)
            destination, key = _owner(row, origin, shift, modulus, only, base, per_modulus, per_divisor)
            if flags & RELAY:
                node = quotient(destination, nodes_per_rank)
                key += node * key_stride
                destination += node_first - node * per_node
            store_u32(key_scratch + 4 * u, key)
            store_u32(destination_scratch + 4 * u, destination | kind << _KIND_BITS)
            _count(destination, kind * num_tables + s, num_segments, segment_offsets, accesses, counts + 4 * u)
    return -1


@inlined
def _count(destination, segment, num_segments, segment_offsets, accesses, count):
    """One more row for a destination and segment, and as many accesses as it has."""
    cell = segment_offsets + 8 * (destination * (num_segments + 1) + segment)
    store_i64(cell, load_i64(cell) + 1)
    cell = accesses + 8 * (destination * num_segments + segment)
    store_i64(cell, load_i64(cell) + load_u32(count))


@inlined
def _sort(
    header,
    unique_offsets,
    destination_scratch,
    key_scratch,
    received,
    keys,
    uniques,
    segment_offsets,
    reply_offsets,
    addresses,
    num_tables,
    num_segments,
):
    """Sorts the keys, and finds the address of each row."""
    arenas, row_bytes = load_i64(header + ARENAS), load_i64(header + ROW_BYTES)
    rank, key_stride = load_i64(header + RANK), load_i64(header + KEY_STRIDE)
    kind_flags, here = load_i64(header + KIND_FLAGS), load_i64(arenas + 8 * rank)
    for s in range(num_tables):
        for u in range(load_i64(unique_offsets + 8 * s), load_i64(unique_offsets + 8 * s + 8)):
            word, key = load_u32(destination_scratch + 4 * u), load_u32(key_scratch + 4 * u)
            destination, kind = word & (1 << _KIND_BITS) - 1, word >> _KIND_BITS
            cell = segment_offsets + 8 * (destination * (num_segments + 1) + kind * num_tables + s)
            position = load_i64(cell)
            store_i64(cell, position + 1)
            store_u32(keys + 4 * position, key)
            store_u32(uniques + 4 * position, u)
            flags = kind_flags >> FLAG_BITS * kind & (RELAY | COPY)
            if flags == 0:
                arena = load_i64(arenas + 8 * destination)
                if arena:
                    store_i64(addresses + 8 * u, arena + key * row_bytes)
                    if row_bytes <= PREFETCHED_ROW_BYTES:
                        prefetch(arena + key * row_bytes, 64)
                    continue
            if flags & COPY:
                slot = key % key_stride if flags & RELAY else key
                store_i64(addresses + 8 * u, here + slot * row_bytes)
            elif flags and destination == rank:
                store_i64(addresses + 8 * u, 0)
            else:
                reply = position + load_i64(reply_offsets + 8 * destination)
                store_i64(addresses + 8 * u, received + reply * row_bytes)
