"""Route in plain torch: locate every unique id, then sort by owner, keeping the order within an owner."""

from __future__ import annotations

import torch
from torch import Tensor


def route(
    unique: Tensor, unique_offsets: Tensor, counts: Tensor,
    bases: Tensor, shifts: Tensor, num_rows: Tensor, world_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `rowmesh.ops.route.cpu.route`: slots, which unique id each is, segment offsets and accesses by owner."""
    num_segments = unique_offsets.numel() - 1
    segment = torch.repeat_interleave(torch.arange(num_segments), unique_offsets.diff())
    if bool(((unique < 0) | (unique >= num_rows[segment])).any()):
        raise IndexError("id out of range")
    owner = (unique + shifts[segment]) % world_size
    slot = bases[segment] + unique // world_size
    order = torch.argsort(owner, stable=True)
    segment_offsets = torch.zeros(world_size, num_segments + 1, dtype=torch.int64)
    accesses = torch.zeros(world_size, num_segments, dtype=torch.int64)
    accesses.index_put_((owner, segment), counts.long(), accumulate=True)
    sizes = torch.zeros(world_size, num_segments, dtype=torch.int64)
    sizes.index_put_((owner, segment), torch.ones_like(owner), accumulate=True)
    flat = torch.cat([sizes.new_zeros(1), sizes.flatten().cumsum(0)])
    for rank in range(world_size):
        segment_offsets[rank] = flat[rank * num_segments : (rank + 1) * num_segments + 1]
    return slot[order], order, segment_offsets, accesses
