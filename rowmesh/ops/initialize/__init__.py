"""Initial values of rows: a counter-based function of (table key, row, element), with the same bits on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from rowmesh.ops.initialize.cpu import DISTRIBUTIONS, STREAM, initialize_slots
from rowmesh.ops.initialize.cpu import initialize as _initialize_on_host

__all__ = ["STREAM", "initialize", "initialize_slots"]

_BLOCK_BYTES = 1 << 26  # of a device's values that are computed at a time
_ONLY_ON_HOST = ("normal",)  # no two libraries have equal bits of a logarithm or cosine


def initialize(out: Tensor, key: int, *, first: int, stride: int, distribution: str, a: float, b: float) -> None:
    """Writes the initial values of rows first, first + stride, … into `out`.

    Normal values of a device's rows are computed by the host.

    Args:
        out: `[n, D]`, float32, float64 or bfloat16, contiguous, on any device.
        key: the table's 64-bit key.
        first, stride: which rows of the table `out` holds.
        distribution: "uniform" in [a, b), "normal" with mean a and deviation b, or "constant" a.

    Raises:
        ValueError: dtype, layout or distribution do not fit.

    Example:
        >>> rows = torch.empty(2, 4)
        >>> initialize(rows, 7, first=1, stride=2, distribution="uniform", a=-1.0, b=1.0)
        >>> third = torch.empty(1, 4)
        >>> initialize(third, 7, first=3, stride=1, distribution="uniform", a=-1.0, b=1.0)
        >>> bool((rows[1] == third[0]).all())
        True
    """
    if distribution not in DISTRIBUTIONS:
        raise ValueError(f"distribution must be one of {', '.join(DISTRIBUTIONS)}, got {distribution!r}")
    if not out.is_contiguous() or out.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(f"out must be contiguous float32, float64 or bfloat16, got {out.dtype} {out.stride()}")
    if not out.is_cuda:
        _initialize_on_host(out, key, first=first, stride=stride, distribution=distribution, a=a, b=b)
        return
    from rowmesh.ops.initialize import cuda

    size = max(_BLOCK_BYTES // (out.shape[1] * out.itemsize), 1)
    for begin in range(0, len(out), size):
        block = out[begin : begin + size]
        row = first + begin * stride
        if distribution in _ONLY_ON_HOST:
            values = torch.empty_like(block, device="cpu")
            _initialize_on_host(values, key, first=row, stride=stride, distribution=distribution, a=a, b=b)
            block.copy_(values)
        else:
            cuda.initialize(block, key, first=row, stride=stride, distribution=distribution, a=a, b=b)
