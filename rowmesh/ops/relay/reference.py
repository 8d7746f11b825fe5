"""Relay in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def sort_relay(
    keys: Tensor, segments: Tensor, num_segments: int, num_nodes: int, key_stride: int
) -> tuple[Tensor, ...]:
    """The sort of `rowmesh.ops.relay.cpu.sort_relay`.

    Args:
        keys, segments: int64 `[M]`: the merged keys of relayed kinds, and the relayed segment of each, in order.
        num_segments, num_nodes, key_stride: S″, H and V.

    Returns:
        Slots in order, which key each is, and offsets `[H, S″ + 1]`.
    """
    nodes, slots = keys // key_stride, keys % key_stride
    order = torch.argsort(nodes * num_segments + segments, stable=True)
    sizes = torch.zeros(num_nodes, num_segments, dtype=torch.int64)
    sizes.index_put_((nodes, segments), torch.ones_like(nodes), accumulate=True)
    flat = torch.cat([sizes.new_zeros(1), sizes.flatten().cumsum(0)])
    offsets = torch.stack([flat[node * num_segments : (node + 1) * num_segments + 1] for node in range(num_nodes)])
    return slots[order], order, offsets
