"""Dot interactions on a GPU: one program a tile of products, or a tile of gradients, of a sample.

Products are summed in float32 or float64 outside of the tensor cores, in the order of the dimension, so that they equal
those of the CPU to rounding. See [Note: GPU kernels] in `rowmesh.ops.gpu`. It has not run on a GPU.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, launch, next_power_of_2

__all__ = ["SIGNATURES", "backward", "forward"]
DTYPES = (torch.float32, torch.float64)
_TILE, _STEP = 32, 16
_COLUMNS = 64  # of a tile of gradients, at most


@triton.jit
def _vectors(base, embeddings, sample, i, d, FEATURES: tl.constexpr, DIM: tl.constexpr):
    """A tile of a sample's vectors, rows i and columns d, one of which is across the other; 0 where there are none."""
    first = tl.load(base + sample * DIM + d, mask=(i == 0) & (d < DIM), other=0)
    at = (sample * FEATURES + i - 1) * DIM + d
    return first + tl.load(embeddings + at, mask=(i > 0) & (i <= FEATURES) & (d < DIM), other=0)


@triton.jit
def _interact(base, embeddings, out, FEATURES: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr):
    """Programs: samples × tiles of rows × tiles of columns; those above the diagonal have nothing to do."""
    sample = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    j = tl.program_id(2) * TILE + tl.arange(0, TILE)
    line = out + sample * (DIM + FEATURES * (FEATURES + 1) // 2)
    if tl.program_id(1) >= tl.program_id(2):
        total = tl.zeros([TILE, TILE], out.dtype.element_ty)
        for k in range(0, DIM, STEP):
            d = k + tl.arange(0, STEP)
            a = _vectors(base, embeddings, sample, i[:, None], d[None, :], FEATURES, DIM)
            b = _vectors(base, embeddings, sample, j[None, :], d[:, None], FEATURES, DIM)
            total = tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
            if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
                values = tl.load(base + sample * DIM + d, mask=d < DIM)
                tl.store(line + d, values, mask=d < DIM)
        at = (i * (i - 1) // 2)[:, None] + j[None, :]
        tl.store(line + DIM + at, total, mask=(i <= FEATURES)[:, None] & (j[None, :] < i[:, None]))


@triton.jit
def _interact_backward(
    base,
    embeddings,
    grad,
    of_base,
    of_embeddings,
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Programs: samples × tiles of rows × tiles of columns."""
    sample = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * TILE + tl.arange(0, TILE)
    d = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    line = grad + sample * (DIM + FEATURES * (FEATURES + 1) // 2)
    total = tl.zeros([TILE, COLUMNS], grad.dtype.element_ty)
    for k in range(0, FEATURES + 1, STEP):
        j = k + tl.arange(0, STEP)
        most, least = tl.maximum(i[:, None], j[None, :]), tl.minimum(i[:, None], j[None, :])
        inside = (most <= FEATURES) & (most != least)
        s = tl.load(line + DIM + most * (most - 1) // 2 + least, mask=inside, other=0)
        v = _vectors(base, embeddings, sample, j[:, None], d[None, :], FEATURES, DIM)
        total = tl.dot(s, v, total, input_precision="ieee", out_dtype=total.dtype)
    is_base, is_column = (i == 0)[:, None], (d < DIM)[None, :]
    total += tl.load(line + d[None, :] + i[:, None] * 0, mask=is_base & is_column, other=0)
    tl.store(of_base + sample * DIM + d[None, :] + i[:, None] * 0, total, mask=is_base & is_column)
    at = (sample * FEATURES + i - 1)[:, None] * DIM + d[None, :]
    tl.store(of_embeddings + at, total, mask=((i > 0) & (i <= FEATURES))[:, None] & is_column)


def forward(base: Tensor, embeddings: Tensor, out: Tensor) -> None:
    """Writes `[B, D + F(F+1)/2]`; all are contiguous, float32 or float64.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a layout or device does not fit.
    """
    samples, features, dim = _check(base, embeddings, out)
    tiles = ceil_div(features + 1, _TILE)
    sizes = {"FEATURES": features, "DIM": dim, "TILE": _TILE, "STEP": _STEP}
    launch(_interact, (samples, tiles, tiles), base, embeddings, out, **sizes)


def backward(base: Tensor, embeddings: Tensor, grad: Tensor, of_base: Tensor, of_embeddings: Tensor) -> None:
    """Writes the gradients of base and embeddings; arguments as for `forward`."""
    samples, features, dim = _check(base, embeddings, grad)
    check("of_base", of_base, (base.dtype,), 2, base.device)
    check("of_embeddings", of_embeddings, (base.dtype,), 3, base.device)
    columns = min(max(next_power_of_2(dim), 16), _COLUMNS)
    programs = (samples, ceil_div(features + 1, _TILE), ceil_div(dim, columns))
    sizes = {"FEATURES": features, "DIM": dim, "TILE": _TILE, "STEP": _STEP, "COLUMNS": columns}
    launch(_interact_backward, programs, base, embeddings, grad, of_base, of_embeddings, **sizes)


def _check(base: Tensor, embeddings: Tensor, wide: Tensor) -> tuple[int, int, int]:
    check("base", base, DTYPES, 2, base.device)
    check("embeddings", embeddings, (base.dtype,), 3, base.device)
    check("the products", wide, (base.dtype,), 2, base.device)
    samples, features, dim = embeddings.shape
    return samples, features, dim


SIGNATURES = tuple(
    Signature(
        _interact,
        f"*{storage} *{storage} *{storage}",
        {"FEATURES": features, "DIM": dim, "TILE": _TILE, "STEP": _STEP},
    )
    for storage, features, dim in (("fp32", 26, 64), ("fp32", 70, 100), ("fp64", 3, 5))
) + tuple(
    Signature(
        _interact_backward,
        f"*{storage} *{storage} *{storage} *{storage} *{storage}",
        {"FEATURES": features, "DIM": dim, "TILE": _TILE, "STEP": _STEP, "COLUMNS": columns},
    )
    for storage, features, dim, columns in (("fp32", 26, 64, 64), ("fp32", 70, 100, 64), ("fp64", 3, 5, 16))
)
