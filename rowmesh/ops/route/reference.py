"""Route in plain torch: a stable sort by destination and segment."""

from __future__ import annotations

import torch
from torch import Tensor


def route(
    destinations: Tensor, keys: Tensor, segments: Tensor, counts: Tensor, world_size: int, num_segments: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sort of `rowmesh.ops.route.cpu.route`, given where each unique id goes.

    Args:
        destinations, keys, segments, counts: int64 `[U]`, of each unique id.
        world_size, num_segments: W and S′.

    Returns:
        Keys in order, which unique id each is, segment offsets `[W, S′ + 1]` and accesses `[W, S′]`.
    """
    order = torch.argsort(destinations * num_segments + segments, stable=True)
    accesses = torch.zeros(world_size, num_segments, dtype=torch.int64)
    accesses.index_put_((destinations, segments), counts, accumulate=True)
    sizes = torch.zeros(world_size, num_segments, dtype=torch.int64)
    sizes.index_put_((destinations, segments), torch.ones_like(destinations), accumulate=True)
    flat = torch.cat([sizes.new_zeros(1), sizes.flatten().cumsum(0)])
    offsets = torch.stack([flat[rank * num_segments : (rank + 1) * num_segments + 1] for rank in range(world_size)])
    return keys[order], order, offsets, accesses
