"""Relay on a CPU: two passes over the merged keys, a counting sort by the owner's node."""

from __future__ import annotations

from rowmesh.ops.counting_sort import quotient, restore, to_offsets
from rowmesh.ops.simd import kernel, load_i64, load_u32, store_i64, store_u32


@kernel
def sort_relay(
    keys,
    merged_offsets,
    heads,
    first_segment,
    num_segments,
    num_fetched,
    num_replying,
    num_nodes,
    node,
    key_stride,
    arena,
    row_bytes,
    received,
    slots,
    sorted_heads,
    offsets,
    reply_offsets,
    addresses,
):
    """The requests of a node leader to each node, and the address of every row that the leader was asked for.

    All arguments but the numbers and row_bytes are addresses. S″ relayed segments begin with `first_segment`. The rows
    of the first `num_fetched` of them are fetched, of the others there is a copy here. The first `num_replying` of all
    segments get replies.

    Args:
        keys, merged_offsets, heads: of the merger: uint32 `[M]`, int64 `[S′ + 1]`, uint32 `[M]`.
        node: this rank's; what it asks of its own node is sorted with the rest, though it is not sent.
        received: where the rows of other nodes will be received, in the order of the nodes.
        slots, sorted_heads: uint32 out, sorted by (node, segment): the slot at the owner, and the head of the chain.
        offsets: int64 `[H, S″ + 1]` out, into `slots`.
        reply_offsets: int64 `[H + 1]` out: where each node's rows begin among those received.
        addresses: int64 out, one for each merged key of the replying segments: where its row is or will be.
    """
    per_stride = 1.0 / key_stride
    for i in range(num_nodes * (num_segments + 1)):
        store_i64(offsets + 8 * i, 0)
    for s in range(num_segments):
        segment = merged_offsets + 8 * (first_segment + s)
        for m in range(load_i64(segment), load_i64(segment + 8)):
            cell = offsets + 8 * (quotient(load_u32(keys + 4 * m), per_stride) * (num_segments + 1) + s)
            store_i64(cell, load_i64(cell) + 1)
    to_offsets(offsets, reply_offsets, num_nodes, num_segments, num_fetched, node)
    for m in range(load_i64(merged_offsets + 8 * first_segment)):  # what is asked of this rank as the owner
        store_i64(addresses + 8 * m, arena + load_u32(keys + 4 * m) * row_bytes)
    for s in range(num_segments):
        segment = merged_offsets + 8 * (first_segment + s)
        for m in range(load_i64(segment), load_i64(segment + 8)):
            key = load_u32(keys + 4 * m)
            owner = quotient(key, per_stride)
            slot = key - owner * key_stride
            cell = offsets + 8 * (owner * (num_segments + 1) + s)
            position = load_i64(cell)
            store_i64(cell, position + 1)
            store_u32(slots + 4 * position, slot)
            store_u32(sorted_heads + 4 * position, load_u32(heads + 4 * m))
            if first_segment + s < num_replying:
                address = arena + slot * row_bytes
                if s < num_fetched and owner != node:
                    address = received + (position + load_i64(reply_offsets + 8 * owner)) * row_bytes
                store_i64(addresses + 8 * m, address)
    restore(offsets, reply_offsets, num_nodes, num_segments)
