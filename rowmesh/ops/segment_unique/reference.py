"""Segment unique in plain torch: obviously right, one segment at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_unique(ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `rowmesh.ops.segment_unique.segment_unique`."""
    unique, counts, unique_offsets = [], [], [0]
    inverse = torch.empty_like(ids, dtype=torch.int32)
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        position: dict[int, int] = {}
        for i, key in enumerate(ids[begin:end].tolist(), begin):
            if key not in position:
                position[key] = len(position)
                unique.append(key)
                counts.append(0)
            inverse[i] = unique_offsets[-1] + position[key]
            counts[int(inverse[i])] += 1
        unique_offsets.append(len(unique))
    return (
        torch.tensor(unique, dtype=torch.int64),
        inverse,
        torch.tensor(unique_offsets, dtype=torch.int64),
        torch.tensor(counts, dtype=torch.int32),
    )
