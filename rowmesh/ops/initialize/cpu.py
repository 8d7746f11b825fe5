"""Initial values on a CPU, written straight into an arena."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.simd import COMPUTE_BYTES, FLOAT32, FLOAT64, inlined, kernel, store_scalar

UNIFORM, NORMAL, CONSTANT = 0, 1, 2
_DISTRIBUTIONS = {"uniform": UNIFORM, "normal": NORMAL, "constant": CONSTANT}


@inlined
def _mix(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@functools.cache
def _kernel(storage: int) -> Any:
    STORAGE, ELEMENT = storage, COMPUTE_BYTES[storage]
    SCALAR = np.float64 if storage == FLOAT64 else np.float32

    @kernel
    def fill(out, num_rows, dim, key, first, stride, distribution, a, b):
        for i in range(num_rows):
            counter = np.uint64(first + i * stride) * np.uint64(dim)
            for e in range(dim):
                value = a
                if distribution != CONSTANT:
                    z = _mix(key + (counter + np.uint64(e) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
                    if distribution == UNIFORM:
                        value = a + (b - a) * (np.float64(z >> np.uint64(11)) * 2.0**-53)
                    else:
                        u = (np.float64(z >> np.uint64(32)) + 0.5) * 2.0**-32
                        v = np.float64(z & np.uint64(0xFFFFFFFF)) * 2.0**-32
                        value = a + b * np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * np.pi * v)
                store_scalar(out + ELEMENT * (i * dim + e), SCALAR(value), STORAGE)

    return fill


def initialize(
    out: Tensor, key: int, *, first: int, stride: int, distribution: str, a: float, b: float
) -> None:  # fmt: skip
    """Writes the initial values of rows first, first + stride, … into `out`.

    Args:
        out: `[n, D]`, float32, float64 or bfloat16, contiguous.
        key: the table's 64-bit key.
        first, stride: which rows of the table `out` holds.
        distribution: "uniform" in [a, b), "normal" with mean a and deviation b, or "constant" a.

    Example:
        >>> rows = torch.empty(2, 4)
        >>> initialize(rows, 7, first=1, stride=2, distribution="uniform", a=-1.0, b=1.0)
        >>> third = torch.empty(1, 4)
        >>> initialize(third, 7, first=3, stride=1, distribution="uniform", a=-1.0, b=1.0)
        >>> bool((rows[1] == third[0]).all())
        True
    """
    if not out.is_contiguous() or out.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ValueError(f"out must be contiguous float32, float64 or bfloat16, got {out.dtype} {out.stride()}")
    num_rows, dim = out.shape
    rule = (stride, _DISTRIBUTIONS[distribution], float(a), float(b))
    if out.dtype != torch.bfloat16:
        fill = _kernel(FLOAT64 if out.dtype == torch.float64 else FLOAT32)
        fill(out.data_ptr(), num_rows, dim, np.uint64(key), first, *rule)
        return
    block = torch.empty(min(num_rows, 65536), dim, dtype=torch.float32, device="cpu")
    for begin in range(0, num_rows, 65536):
        part = out[begin : begin + 65536]
        _kernel(FLOAT32)(block.data_ptr(), len(part), dim, np.uint64(key), first + begin * stride, *rule)
        part.copy_(block[: len(part)])
