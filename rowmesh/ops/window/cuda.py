"""Which rows of one batch another one touches as well, on a GPU: what look-ahead buffers have to bring up to date.

A batch that was fetched ahead holds rows as they were. Rows that the batch before it then changes are found by
`intersect` on the slots that both were merged to, and copied between the buffers by `rowmesh.ops.gather.cuda.gather`,
which leaves a row alone where its position is negative. See [Note: GPU kernels] in `rowmesh.ops.gpu`.

Source: EL-Rec (SC'22) §V-B (embedding cache), NestPipe §IV-B (dual-buffer synchronization).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import MOST_PROGRAMS, Signature, ceil_div, check, launch

_BLOCK = 1024


@triton.jit(do_not_specialize=("most_keys", "most_others", "steps"))
def _intersect(keys, others, num_keys, num_others, positions, most_keys, most_others, steps, BLOCK: tl.constexpr):
    """Binary search of every key; neighbours take the same way for long, so most loads are of the L1 cache."""
    end, end_of_others = most_keys, most_others
    if num_keys is not None:
        end = tl.minimum(tl.load(num_keys).to(tl.int32), most_keys)
    if num_others is not None:
        end_of_others = tl.minimum(tl.load(num_others).to(tl.int32), most_others)
    for begin in range(tl.program_id(0) * BLOCK, end, tl.num_programs(0) * BLOCK):
        i = begin + tl.arange(0, BLOCK)
        key = tl.load(keys + i, mask=i < end, other=0)
        low = i * 0
        high = low + end_of_others
        for _ in range(steps):
            middle = (low + high) // 2
            is_open = low < high
            is_below = is_open & (tl.load(others + middle, mask=is_open, other=0) < key)
            low = tl.where(is_below, middle + 1, low)
            high = tl.where(is_open & (is_below == 0), middle, high)
        is_there = low < end_of_others
        is_there = is_there & (tl.load(others + low, mask=is_there, other=0) == key)
        tl.store(positions + i, tl.where(is_there, low, -1), mask=i < end)


def intersect(
    keys: Tensor,
    others: Tensor,
    num_keys: Tensor | None = None,
    num_others: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`out[i]` = where `keys[i]` stands among the others, or −1.

    Args:
        keys, others: int64 `[A]` and `[B]`, each ascending: not checked.
        num_keys, num_others: `[1]` int64 or int32: how many of each are valid; None for all.
        out: int32 `[A]`; made where it is None. Elements past the number of keys stay as they are.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.

    Source: EL-Rec (SC'22) §V-B, NestPipe §IV-B.

    Example:
        >>> intersect(torch.tensor([2, 5, 9], device=device), torch.tensor([1, 2, 9], device=device)).tolist()
        [1, -1, 2]
    """
    device = keys.device
    check("keys", keys, (torch.int64,), 1, device)
    check("others", others, (torch.int64,), 1, device)
    for name, number in (("num_keys", num_keys), ("num_others", num_others)):
        if number is not None:
            check(name, number, (torch.int64, torch.int32), 1, device)
    out = torch.empty(keys.numel(), dtype=torch.int32, device=device) if out is None else out
    check("out", out, (torch.int32,), 1, device)
    if out.numel() != keys.numel():
        raise ValueError(f"{keys.numel()} keys need as many positions, got {out.numel()}")
    launch(
        _intersect,
        min(ceil_div(keys.numel(), _BLOCK), MOST_PROGRAMS),
        keys,
        others,
        num_keys,
        num_others,
        out,
        keys.numel(),
        others.numel(),
        others.numel().bit_length(),
        BLOCK=_BLOCK,
    )
    return out


SIGNATURES = (
    Signature(_intersect, "*i64 *i64 *i32 *i32 *i32 i32 i32 i32", {"BLOCK": _BLOCK}),
    Signature(_intersect, "*i64 *i64 *i32 i32 i32 i32", {"num_keys": None, "num_others": None, "BLOCK": _BLOCK}),
)
