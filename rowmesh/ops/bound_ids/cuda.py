"""Bound ids on a GPU: one pass that reads and writes each id. See [Note: GPU kernels] in `rowmesh.ops.gpu`."""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, launch

_BLOCK = 1024


@triton.jit(do_not_specialize=("num_ids", "num_features", "num_steps"))
def _bound_ids(ids, offsets, limits, substitutes, out, outside, num_ids, num_features, num_steps, BLOCK: tl.constexpr):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = position < num_ids
    low = tl.zeros_like(position)
    high = low + num_features - 1
    for _ in range(num_steps):  # the last feature that begins at or before the position
        middle = (low + high + 1) // 2
        is_later = tl.load(offsets + middle) <= position
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle - 1)
    row = tl.load(ids + position, mask=is_id, other=0)
    is_outside = is_id & ((row < 0) | (row >= tl.load(limits + low)))
    row = tl.where(is_outside, tl.load(substitutes + low), row)
    tl.store(out + position, row, mask=is_id)
    tl.atomic_add(outside + low, tl.full(low.shape, 1, tl.int64), mask=is_outside, sem="relaxed")  # seldom


def bound_ids(
    ids: Tensor, offsets: Tensor, limits: Tensor, substitutes: Tensor, out: Tensor, outside: Tensor
) -> Tensor:
    """Replaces ids below 0 or past their table.

    Args:
        ids: int64 `[N]`.
        offsets: int64 `[F + 1]`: where the ids of each feature begin, from 0 to N; not checked.
        limits: int64 `[F]`: rows of each feature's table.
        substitutes: int64 `[F]`: the row that stands for what is outside.
        out: int64 `[N]`; may be `ids`.
        outside: int64 `[F]`, to which the number of ids outside is added.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.

    Example:
        >>> ids, offsets = torch.tensor([5, -1, 9], device=device), torch.tensor([0, 2, 3], device=device)
        >>> limits, substitutes = torch.tensor([6, 9], device=device), torch.tensor([0, 4], device=device)
        >>> outside = torch.zeros(2, dtype=torch.int64, device=device)
        >>> bound_ids(ids, offsets, limits, substitutes, torch.empty_like(ids), outside).tolist(), outside.tolist()
        ([5, 0, 4], [1, 1])
    """
    num_features = limits.numel()
    for name, tensor, size in (
        ("ids", ids, ids.numel()),
        ("out", out, ids.numel()),
        ("offsets", offsets, num_features + 1),
        ("limits", limits, num_features),
        ("substitutes", substitutes, num_features),
        ("outside", outside, num_features),
    ):
        check(name, tensor, (torch.int64,), 1, ids.device)
        if tensor.numel() != size:
            raise ValueError(f"{name} must have {size} elements, got {tensor.numel()}")
    launch(
        _bound_ids,
        ceil_div(ids.numel(), _BLOCK),
        ids,
        offsets,
        limits,
        substitutes,
        out,
        outside,
        ids.numel(),
        num_features,
        (num_features - 1).bit_length(),
        BLOCK=_BLOCK,
    )
    return out


SIGNATURES = (Signature(_bound_ids, "*i64 *i64 *i64 *i64 *i64 *i64 i32 i32 i32", {"BLOCK": _BLOCK}),)
