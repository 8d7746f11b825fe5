"""Gradients of weights on a GPU. See [Note: GPU kernels] in `rowmesh.ops.gpu`.

A program takes a tile of bags of one feature: it reads the gradients of their vectors once, and every row once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, compute_dtype, launch, tile_of_rows
from rowmesh.ops.pool.cuda import MOST_JAGGED, bags_of, factor_of
from rowmesh.ops.pool.handles import Bags

_STORAGE = (torch.float32, torch.bfloat16, torch.float64)


@triton.jit
def _weigh(
    rows,
    inverse,
    features,
    offsets,
    grad,
    out,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    MEAN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of the weights of the ids in BAGS bags of a feature; programs are numbered by tile and feature."""
    feature = features + tl.program_id(1) * 8
    num_bags = tl.load(feature + 4)
    begin = tl.program_id(0).to(tl.int64) * BAGS
    if begin >= num_bags:
        return
    bag, columns = begin + tl.arange(0, BAGS), tl.arange(0, COLUMNS)
    is_bag, is_column = bag < num_bags, columns < DIM
    first, size = bags_of(feature, offsets, bag, is_bag)
    cell = tl.multiple_of(tl.load(feature + 5) + bag * tl.load(feature + 6), ALIGNMENT)
    mask = is_bag[:, None] & is_column[None, :]
    gradient = tl.load(grad + cell[:, None] + columns[None, :], mask=mask, other=0)
    for j in range(tl.max(size)):
        at, here = first + j, j < size
        row = tl.load(inverse + at, mask=here, other=0).to(tl.int64)
        mask = here[:, None] & is_column[None, :]
        values = tl.load(rows + row[:, None] * DIM + columns[None, :], mask=mask, other=0).to(DTYPE)
        product = tl.sum(values * gradient, axis=1)
        if MEAN:
            product *= factor_of(None, feature, at, size, here, MEAN, DTYPE)
        tl.store(out + at, product, mask=here)


def weight_gradients(rows: Tensor, inverse: Tensor, bags: Bags, grad: Tensor, out: Tensor) -> Tensor:
    """`out[i]` = the product of the row of id i and the gradient of its bag, over the bag's size for a mean.

    Args:
        rows: `[R, D]`, float32, float64 or bfloat16.
        inverse: int32 `[N]`: the row of each id.
        bags: of the ids.
        grad: of the vectors, laid out as the output of `rowmesh.ops.pool.cuda.pool`; float64 where rows are, else
            float32.
        out: `[N]` of the same dtype.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]], device=device)
        >>> offsets = torch.tensor([0, 2, 3], device=device)  # one feature: a bag of ids 0 and 1, and one of id 2
        >>> bags = Bags.describe([(0, 3, 0, 0, 2, 0, 2, 0)], device, offsets)
        >>> grad = torch.tensor([[1.0, 1.0], [0.0, 1.0]], device=device)
        >>> inverse = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
        >>> weight_gradients(rows, inverse, bags, grad, torch.empty(3, device=device)).tolist()
        [3.0, 30.0, 20.0]
    """
    device, compute = rows.device, compute_dtype(rows.dtype)
    check("rows", rows, _STORAGE, 2, device)
    check("inverse", inverse, (torch.int32,), 1, device)
    check("grad", grad, (compute,), grad.dim(), device)
    check("out", out, (compute,), 1, device)
    bags.check(inverse.numel(), device)
    if out.numel() != inverse.numel():
        raise ValueError(f"{inverse.numel()} ids need as many gradients, out has {out.numel()}")
    columns, tile = tile_of_rows(rows.shape[1], compute)
    tile = tile if bags.offsets is None else min(tile, MOST_JAGGED)
    launch(
        _weigh,
        (ceil_div(bags.num_bags, tile), len(bags.features)),
        rows,
        inverse,
        bags.features,
        bags.offsets,
        grad,
        out,
        DIM=rows.shape[1],
        DTYPE=tl.float64 if compute == torch.float64 else tl.float32,
        MEAN=bags.has_mean,
        ALIGNMENT=bags.alignment,
        BAGS=tile,
        COLUMNS=columns,
    )
    return out


def _constants(dtype: tl.dtype, dim: int, columns: int, tile: int, alignment: int) -> dict[str, object]:
    return {"DIM": dim, "DTYPE": dtype, "ALIGNMENT": alignment, "BAGS": tile, "COLUMNS": columns}


SIGNATURES = (
    Signature(
        _weigh,
        "*fp32 *i32 *i64 *fp32 *fp32",
        _constants(tl.float32, 64, 64, 32, 16) | {"offsets": None, "MEAN": False},
    ),
    Signature(
        _weigh,
        "*bf16 *i32 *i64 *i64 *fp32 *fp32",
        _constants(tl.float32, 100, 128, MOST_JAGGED, 4) | {"MEAN": True},
    ),
    Signature(
        _weigh,
        "*fp64 *i32 *i64 *i64 *fp64 *fp64",
        _constants(tl.float64, 3, 4, MOST_JAGGED, 1) | {"MEAN": True},
    ),
)
