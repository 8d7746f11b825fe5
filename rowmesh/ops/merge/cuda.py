"""Merge of equal slots on a GPU: entries are sorted by slot, stably, so that those of one slot stand together.

They stand in entry order: that of the ranks that sent them, or of the ids. `rowmesh.ops.merge_update` then sums them
and changes rows. Distinct slots are in ascending order, not in that of their first appearance as on a CPU:
no result depends on it. See [Note: GPU kernels] in `rowmesh.ops.gpu`.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, launch
from rowmesh.ops.merge_update.handles import DeviceMerged as Merged

BLOCK = 1024  # entries of a program where each costs a few instructions
_RANGES = 128  # of a program that counts
NO_KIND = -1  # of a range that is not counted
_NO_SLOT = tl.constexpr(0x7FFFFFFF)  # the key of slot 2³² − 1, which no arena has; sorted last


@triton.jit(do_not_specialize=("num_entries",))
def _keys_of(slots, count, keys, num_entries, BLOCK: tl.constexpr):
    """Sort keys: slots of 32 bits as signed numbers in the same order; entries from `count` on come last."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + i, mask=i < num_entries, other=0).to(tl.int64) & 0xFFFFFFFF
    key = (slot - 0x80000000).to(tl.int32)
    if count is not None:
        key = tl.where(i < tl.load(count), key, _NO_SLOT)
    tl.store(keys + i, key, mask=i < num_entries)


@triton.jit(do_not_specialize=("num_entries",))
def _flag_heads(keys, flags, num_entries, BLOCK: tl.constexpr):
    """1 where a key differs from the one before it, and is that of a slot."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_entries
    key = tl.load(keys + i, mask=inside, other=_NO_SLOT)
    before = tl.load(keys + i - 1, mask=inside & (i > 0), other=_NO_SLOT)
    tl.store(flags + i, ((key != before) & (key != _NO_SLOT)).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=("num_entries",))
def _list_heads(keys, ranks, slots, starts, num_entries, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """The distinct slots, FIRST more than keys, where their entries begin, and where those of the last one end."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_entries
    key = tl.load(keys + i, mask=inside, other=_NO_SLOT)
    rank = tl.load(ranks + i, mask=inside, other=0)
    before = tl.load(ranks + i - 1, mask=inside & (i > 0), other=0)
    is_head = inside & (rank != before)
    tl.store(slots + rank - 1, key.to(tl.int64) + FIRST, mask=is_head)
    tl.store(starts + rank - 1, i, mask=is_head)
    following = tl.load(keys + i + 1, mask=i + 1 < num_entries, other=_NO_SLOT)
    tl.store(starts + rank, i + 1, mask=inside & (key != _NO_SLOT) & (following == _NO_SLOT))
    tl.store(starts + i, tl.zeros_like(i), mask=(i == 0) & (key == _NO_SLOT))


def merge(
    slots: Tensor, count: Tensor | None = None, *, most: int | None = None, node_ends: Tensor | None = None
) -> Merged:
    """Sorts entries by slot.

    Args:
        slots: `[M]`, int64, or int32 as the bits of uint32: of each entry, in the order that gradients are to be added.
        count: int `[1]`: how many of them are valid; default: all.
        most: the most entries of one slot, where that is known; where every rank asks for a slot once at most, the
            number of ranks. Few of them need no sums of their own.
        node_ends: int64 `[nodes]`, where entries come from several nodes: one past the last from each. A node's
            gradients are then summed first, the sums of nodes next.

    Source: FusedRec §3 "Lossless Lookup" (owner-side unique).

    Example:
        >>> merged = merge(torch.tensor([7, 3, 7, 9], device=device))
        >>> merged.order.tolist(), merged.slots[: merged.num].tolist(), merged.starts[: merged.num + 1].tolist()
        ([1, 0, 2, 3], [3, 7, 9], [0, 1, 3, 4])
    """
    check("slots", slots, (torch.int32, torch.int64), 1, slots.device)
    keys = torch.empty(slots.numel(), dtype=torch.int32, device=slots.device)
    launch(_keys_of, ceil_div(keys.numel(), BLOCK), slots, count, keys, keys.numel(), BLOCK=BLOCK)
    return _merge_keys(keys, 2**31, most, node_ends)


def merge_numbers(numbers: Tensor) -> Merged:
    """What `merge` returns for int32 `[M]`, none of them negative, which are sorted as they are; leaves out 2³¹ − 1."""
    check("numbers", numbers, (torch.int32,), 1, numbers.device)
    return _merge_keys(numbers, 0)


def _merge_keys(keys: Tensor, first: int, most: int | None = None, node_ends: Tensor | None = None) -> Merged:
    """Sorts keys; the slot of a key is `first` more."""
    num_entries, device = keys.numel(), keys.device
    starts = torch.empty(num_entries + 1, dtype=torch.int32, device=device)
    if num_entries == 0:
        none = torch.zeros(1, dtype=torch.int32, device=device)
        return Merged(keys.to(torch.int64), keys.to(torch.int64), starts.zero_(), keys, none, 0, node_ends)
    programs = ceil_div(num_entries, BLOCK)
    keys, order = torch.sort(keys, stable=True)  # 32 bits: half the passes of a sort of int64
    flags = torch.empty_like(keys)
    launch(_flag_heads, programs, keys, flags, num_entries, BLOCK=BLOCK)
    ranks = torch.cumsum(flags, 0, dtype=torch.int32)
    distinct = torch.empty_like(order)
    launch(_list_heads, programs, keys, ranks, distinct, starts, num_entries, FIRST=first, BLOCK=BLOCK)
    return Merged(order, distinct, starts, ranks, ranks[-1:], num_entries if most is None else most, node_ends)


def singles(slots: Tensor, count: Tensor) -> Merged:
    """Slots that are distinct already, with one gradient each, in the form of what `merge` returns.

    Args:
        slots: int64 `[M]`.
        count: int32 or int64 `[1]`: how many are valid.
    """
    return Merged(None, slots, None, None, count, 1)


def merge_equal(slots: Tensor, num_lists: int) -> Merged:
    """What `merge` would find by sorting so many lists of the same distinct slots, one after the other.

    Args:
        slots: int64 `[n]`; they stay in their order.
        num_lists: how many lists.

    Example:
        >>> merged = merge_equal(torch.tensor([3, 7], device=device), 3)
        >>> merged.order.tolist(), merged.slots.tolist(), merged.starts.tolist()
        ([0, 2, 4, 1, 3, 5], [3, 7], [0, 3, 6])
    """
    check("slots", slots, (torch.int64,), 1, slots.device)
    count, device = slots.numel(), slots.device
    entries = torch.arange(num_lists * count, device=device)
    starts = torch.arange(0, num_lists * count + 1, num_lists, dtype=torch.int32, device=device)
    ranks = (entries // num_lists + 1).to(torch.int32)
    num = torch.full((1,), count, dtype=torch.int32, device=device)
    return Merged(entries.view(num_lists, count).T.flatten(), slots, starts, ranks, num, num_lists)


@triton.jit
def _num_below(slots, count, bound, num_steps):
    """How many of the first `count` slots, ascending, are below each bound."""
    first = tl.zeros_like(bound)
    last = first + count
    for _ in range(num_steps):
        middle = (first + last) // 2
        is_below = (middle < last) & (tl.load(slots + middle, mask=middle < last, other=0) < bound)
        first = tl.where(is_below, middle + 1, first)
        last = tl.where(is_below, last, middle)
    return first


@triton.jit(do_not_specialize=("num_ranges", "num_steps"))
def _count_ranges(slots, num, starts, kinds, totals, num_ranges, num_steps, BLOCK: tl.constexpr):
    """Adds the number of slots in each range to the total of its kind."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < num_ranges
    side = tl.arange(0, 2)[None, :]  # both ends of a range are looked for at once
    bound = tl.load(starts + r[:, None] + side, mask=inside[:, None], other=0)
    below = _num_below(slots, tl.load(num), bound, num_steps)
    number = tl.sum(tl.where(side == 1, below, -below), 1)
    kind = tl.load(kinds + r, mask=inside, other=0)
    tl.atomic_add(totals + kind, number, mask=inside & (kind >= 0))  # of whole numbers: in any order the same


def count_by_range(merged: Merged, starts: Tensor, kinds: Tensor, totals: Tensor) -> None:
    """Counts distinct slots by the ranges that they are in.

    Args:
        merged: what `merge` returned, with slots in ascending order.
        starts: int64 `[R + 1]`: the first slot of each range, ascending, and one past the last one's.
        kinds: int64 `[R]`: of each range; NO_KIND: not counted.
        totals: int64, one a kind, to which the counts are added.

    Example:
        >>> totals = torch.zeros(2, dtype=torch.int64, device=device)
        >>> starts, kinds = torch.tensor([0, 5, 8, 9], device=device), torch.tensor([1, 0, 1], device=device)
        >>> count_by_range(merge(torch.tensor([7, 3, 7, 8, 4], device=device)), starts, kinds, totals)
        >>> totals.tolist()
        [1, 3]
    """
    device = merged.slots.device
    for name, tensor in (("starts", starts), ("kinds", kinds), ("totals", totals)):
        check(name, tensor, (torch.int64,), 1, device)
    num_slots, num_ranges = merged.slots.numel(), kinds.numel()
    if num_slots:
        launch(
            _count_ranges,
            ceil_div(num_ranges, _RANGES),
            merged.slots,
            merged.num,
            starts,
            kinds,
            totals,
            num_ranges,
            num_slots.bit_length(),
            BLOCK=_RANGES,
        )


SIGNATURES = (
    Signature(_keys_of, "*i32 *i32 *i32 i32", {"BLOCK": BLOCK}),
    Signature(_keys_of, "*i64 *i32 i32", {"BLOCK": BLOCK, "count": None}),
    Signature(_flag_heads, "*i32 *i32 i32", {"BLOCK": BLOCK}),
    Signature(_list_heads, "*i32 *i32 *i64 *i32 i32", {"BLOCK": BLOCK, "FIRST": 2**31}),
    Signature(_count_ranges, "*i64 *i32 *i64 *i64 *i64 i32 i32", {"BLOCK": _RANGES}),
)
