"""Segment unique: duplicates removed within each segment, in order of first appearance, over all segments at once.

Equal ids of different segments stay different, so a segment may be a table: one pass removes the
duplicates of every table, and the category of an id is still known.

Source: FusedRec §3 "Embedding Deduplication" and "Segment unique", Fig. 5 (there with CUDA; the order is unspecified).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.segment_unique.cpu import SegmentHash


def segment_unique(ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Removes duplicates within each segment.

    Args:
        ids: int64 `[N]`.
        offsets: int64 `[S + 1]`; segment s holds `ids[offsets[s]:offsets[s + 1]]`.

    Returns:
        unique ids `[U]` int64, segment by segment in order of first appearance; inverse `[N]` int32 with
        `unique[inverse] == ids`; offsets of the segments in unique `[S + 1]` int64; how often each unique id occurs
        `[U]` int32.

    Example:
        >>> unique, inverse, offsets, counts = segment_unique(torch.tensor([5, 3, 5, 5]), torch.tensor([0, 3, 4]))
        >>> unique.tolist(), inverse.tolist(), offsets.tolist(), counts.tolist()
        ([5, 3, 5], [0, 1, 0, 2], [0, 2, 3], [2, 1, 1])
    """
    if ids.dtype != torch.int64 or offsets.dtype != torch.int64:
        raise TypeError(f"ids and offsets must be int64, got {ids.dtype} and {offsets.dtype}")
    if offsets.numel() < 1 or int(offsets[0]) != 0 or int(offsets[-1]) != ids.numel():
        raise ValueError(f"offsets must run from 0 to the number of ids, {ids.numel()}")
    if bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError("offsets must not decrease")
    ids, offsets = ids.contiguous(), offsets.contiguous()
    num_ids, num_segments = ids.numel(), offsets.numel() - 1
    unique = torch.empty(num_ids, dtype=torch.int64, device="cpu")
    counts = torch.empty(num_ids, dtype=torch.int32, device="cpu")
    inverse = torch.empty(num_ids, dtype=torch.int32, device="cpu")
    unique_offsets = torch.zeros(num_segments + 1, dtype=torch.int64, device="cpu")
    segments = np.arange(num_segments)
    SegmentHash([0] * num_segments, offsets.diff().tolist())(
        ids.data_ptr(),
        offsets.data_ptr(),
        8,
        segments.ctypes.data,
        num_segments,
        unique.data_ptr(),
        counts.data_ptr(),
        inverse.data_ptr(),
        unique_offsets.data_ptr(),
    )
    found = int(unique_offsets[-1])
    return unique[:found], inverse, unique_offsets, counts[:found]
