"""Dot interactions on a GPU: one program a tile of products, or a tile of gradients, of a sample.

Products of float32 are made on the tensor cores, each in three passes of TF32: an H200 takes a quarter of the time of
float32 outside of them, and sums are off by less: 2e-7 of the largest instead of 5e-7. Gradients, whose sums are short,
are made in float32: there passes cost more than they save. Products of float64 are float64. See [Note: GPU kernels] in
`rowmesh.ops.gpu`.
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
_TILE = 32
_STEP = 32  # columns of a tile that is multiplied at once, at most
_ROWS = 16  # of vectors that gradients are added up from at once
_COLUMNS = 128  # of a tile of gradients, at most
_WARPS, _GRADIENT_WARPS = 1, 2  # a tile of products is small: more warps would wait for each other


@triton.jit
def _vectors(base, embeddings, sample, i, d, FEATURES: tl.constexpr, DIM: tl.constexpr):
    """A tile of a sample's vectors, rows i and columns d, one of which is across the other; 0 where there are none."""
    at = tl.where(i == 0, base + sample * DIM + d, embeddings + (sample * FEATURES + i - 1) * DIM + d)
    return tl.load(at, mask=(i <= FEATURES) & (d < DIM), other=0)


@triton.jit
def _interact(
    base,
    embeddings,
    out,
    FEATURES: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
            b = a
            if FEATURES >= TILE:  # there are more tiles than one
                b = _vectors(base, embeddings, sample, j[:, None], d[None, :], FEATURES, DIM)
            total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION, out_dtype=total.dtype)
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
    i = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    d = (tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    line = grad + sample * (DIM + FEATURES * (FEATURES + 1) // 2)
    total = tl.zeros([TILE, COLUMNS], grad.dtype.element_ty)
    for k in range(0, FEATURES + 1, STEP):
        j = k + tl.arange(0, STEP)
        most, least = tl.maximum(i, j[None, :]), tl.minimum(i, j[None, :])
        inside = (most <= FEATURES) & (most != least)
        s = tl.load(line + DIM + most * (most - 1) // 2 + least, mask=inside, other=0)
        v = _vectors(base, embeddings, sample, j[:, None], d, FEATURES, DIM)
        total = tl.dot(s, v, total, input_precision="ieee", out_dtype=total.dtype)
    total += tl.load(line + d + i * 0, mask=(i == 0) & (d < DIM), other=0)
    at = tl.where(i == 0, of_base + sample * DIM + d, of_embeddings + (sample * FEATURES + i - 1) * DIM + d)
    tl.store(at, total, mask=(i <= FEATURES) & (d < DIM))


def forward(base: Tensor, embeddings: Tensor, out: Tensor) -> None:
    """Writes `[B, D + F(F+1)/2]`; all are contiguous, float32 or float64.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a layout or device does not fit.
    """
    samples, features, dim = _check(base, embeddings, out)
    tiles = ceil_div(features + 1, _TILE)
    constants = _forward_constants(features, dim, base.dtype == torch.float64)
    launch(_interact, (samples, tiles, tiles), base, embeddings, out, num_warps=_WARPS, **constants)


def backward(base: Tensor, embeddings: Tensor, grad: Tensor, of_base: Tensor, of_embeddings: Tensor) -> None:
    """Writes the gradients of base and embeddings; arguments as for `forward`."""
    samples, features, dim = _check(base, embeddings, grad)
    check("of_base", of_base, (base.dtype,), 2, base.device)
    check("of_embeddings", of_embeddings, (base.dtype,), 3, base.device)
    constants = _backward_constants(features, dim)
    programs = (samples, ceil_div(features + 1, _TILE), ceil_div(dim, constants["COLUMNS"]))
    launch(
        _interact_backward,
        programs,
        base,
        embeddings,
        grad,
        of_base,
        of_embeddings,
        num_warps=_GRADIENT_WARPS,
        **constants,
    )


def _forward_constants(features: int, dim: int, is_double: bool) -> dict[str, int | str]:
    step, precision = min(max(next_power_of_2(dim), 16), _STEP), "ieee" if is_double else "tf32x3"
    return {"FEATURES": features, "DIM": dim, "TILE": _TILE, "STEP": step, "PRECISION": precision}


def _backward_constants(features: int, dim: int) -> dict[str, int]:
    columns = min(max(next_power_of_2(dim), 16), _COLUMNS)
    return {"FEATURES": features, "DIM": dim, "TILE": _TILE, "STEP": _ROWS, "COLUMNS": columns}


def _check(base: Tensor, embeddings: Tensor, wide: Tensor) -> tuple[int, int, int]:
    check("base", base, DTYPES, 2, base.device)
    check("embeddings", embeddings, (base.dtype,), 3, base.device)
    check("the products", wide, (base.dtype,), 2, base.device)
    samples, features, dim = embeddings.shape
    return samples, features, dim


_SIZES = (("fp32", 26, 64), ("fp32", 26, 128), ("fp32", 70, 100), ("fp64", 3, 5))
SIGNATURES = tuple(
    Signature(
        _interact,
        f"*{storage} *{storage} *{storage}",
        _forward_constants(features, dim, storage == "fp64"),
        _WARPS,
    )
    for storage, features, dim in _SIZES
) + tuple(
    Signature(
        _interact_backward,
        f"*{storage} *{storage} *{storage} *{storage} *{storage}",
        _backward_constants(features, dim),
        _GRADIENT_WARPS,
    )
    for storage, features, dim in _SIZES
)
