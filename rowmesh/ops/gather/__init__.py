"""Gather: rows of a table, by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from rowmesh.ops.gather.cpu import kernels
from rowmesh.ops.simd import STORAGE


def gather(table: Tensor, slots: Tensor) -> Tensor:
    """`table[slots]`, with prefetching.

    Args:
        table: `[R, D]`, float32, float64 or bfloat16, contiguous.
        slots: `[U]` int64, each in [0, R).

    Returns:
        `[U, D]` of the table's dtype.

    Raises:
        IndexError: a slot is outside the table.

    Example:
        >>> gather(torch.arange(6.0).view(3, 2), torch.tensor([2, 0])).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    if not table.is_contiguous() or table.dim() != 2:
        raise ValueError(f"table must be contiguous [R, D], got {tuple(table.shape)}")
    if slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < table.shape[0]:
        raise IndexError(f"slots must be in [0, {table.shape[0]}), got {int(slots.min())} to {int(slots.max())}")
    slots = slots.to(torch.int64).contiguous()
    out = torch.empty(slots.numel(), table.shape[1], dtype=table.dtype, device="cpu")
    kernels(table.shape[1], STORAGE[table.dtype]).gather(
        table.data_ptr(), slots.data_ptr(), slots.numel(), out.data_ptr()
    )
    return out
