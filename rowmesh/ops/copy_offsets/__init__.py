"""Copy of offsets: what kernels read is the library's own, and was checked after it was copied.

Offsets belong to the caller, which may use the buffer for the next batch, or write it through NumPy, where torch
counts no versions. A kernel that read the buffer itself would read past the ids.
"""

from __future__ import annotations

from torch import Tensor

from rowmesh.ops.copy_offsets import cpu

__all__ = ["check_offsets", "copy_offsets"]


def check_offsets(offsets: Tensor, num_ids: int) -> bool:
    """Whether int64 `[n]`, contiguous, n ≥ 1, runs from 0 to `num_ids` and never decreases.

    Example:
        >>> import torch
        >>> check_offsets(torch.tensor([0, 2, 3]), 3), check_offsets(torch.tensor([0, 4, 3]), 3)
        (True, False)
    """
    return cpu.copy_offsets(offsets.data_ptr(), offsets.numel(), num_ids, 0) == 0


def copy_offsets(source: Tensor, num_ids: int, out: Tensor) -> bool:
    """Copies int64 `[n]`, contiguous, n ≥ 1; returns whether the copy runs from 0 to `num_ids` and never decreases.

    Example:
        >>> import torch
        >>> out = torch.empty(3, dtype=torch.int64)
        >>> copy_offsets(torch.tensor([0, 2, 3]), 3, out), copy_offsets(torch.tensor([0, 4, 3]), 3, out)
        (True, False)
    """
    assert source.shape == out.shape
    return cpu.copy_offsets(source.data_ptr(), source.numel(), num_ids, out.data_ptr()) == 0
