"""Bound ids in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def bound_ids(ids: Tensor, offsets: Tensor, limits: Tensor, substitutes: Tensor) -> tuple[Tensor, Tensor]:
    """As `rowmesh.ops.bound_ids.cuda.bound_ids`: the bounded ids, and how many each feature has outside its table."""
    sizes = offsets.diff()
    outside = (ids < 0) | (ids >= limits.repeat_interleave(sizes))
    counts = torch.stack([part.sum() for part in outside.split(sizes.tolist())])
    return torch.where(outside, substitutes.repeat_interleave(sizes), ids), counts
