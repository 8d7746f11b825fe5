"""Tensor-train ids on a GPU, sorted by prefix and slice of the second core; and tiles of what was sorted.

One sort by (i₂, i₁, i₃) is enough: ids of equal (i₁, i₂) then stand together, a *prefix*, and prefixes of equal i₂ too,
a *group*. How many prefixes there are stays on the device. See [Note: GPU kernels] in `rowmesh.ops.gpu`.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, launch
from rowmesh.ops.merge.cuda import merge as merge_slots
from rowmesh.ops.merge_update.cuda import sum_merged
from rowmesh.ops.prefixes.handles import NO_ID, Arrangement, DevicePrefixes
from rowmesh.ops.segment_unique.cuda import segment_unique

BLOCK = 512  # ids of a program


@triton.jit(do_not_specialize=("num_rows", "num_ids", "p1", "p2", "p3"))
def _keys_of(ids, count, keys, num_rows, num_ids, p1, p2, p3, BLOCK: tl.constexpr):
    """(i₂ · p₁ + i₁) · p₃ + i₃ of each id; p₁·p₂·p₃ for what is none."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = i < num_ids
    if count is not None:
        is_id &= i < tl.load(count)
    row = tl.load(ids + i, mask=is_id, other=0)
    is_row = is_id & (row >= 0) & (row < num_rows)
    row = tl.where(is_row, row, 0)
    prefix = row // p3
    first = prefix // p2
    key = ((prefix - first * p2) * p1 + first) * p3 + row - prefix * p3
    key = tl.where(is_row, key, p1.to(tl.int64) * p2 * p3)
    tl.store(keys + i, key.to(keys.dtype.element_ty), mask=i < num_ids)


@triton.jit(do_not_specialize=("num_ids", "num_prefixes", "p1", "p2", "p3"))
def _flag_heads(
    keys,
    flags,
    starts,
    firsts,
    group_starts,
    num_ids,
    num_prefixes,
    p1,
    p2,
    p3,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """1 where a prefix begins; and what `_list_prefixes` leaves as it is, where there is no prefix or group."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + i, mask=i < num_ids, other=0).to(tl.int64)
    before = tl.load(keys + i - 1, mask=(i > 0) & (i < num_ids), other=0).to(tl.int64)
    is_head = key < p1.to(tl.int64) * p2 * p3
    if SHARED:
        is_head &= (i == 0) | (key // p3 != before // p3)
    tl.store(flags + i, is_head.to(tl.int32), mask=i < num_ids)
    tl.store(starts + i, 0, mask=i <= num_ids)
    tl.store(firsts + i, p1, mask=i < num_prefixes)
    tl.store(group_starts + i, 0, mask=i <= p2)


@triton.jit(do_not_specialize=("num_ids", "p1", "p2", "p3"))
def _list_prefixes(
    keys, ranks, prefixes, lasts, starts, firsts, group_starts, num_ids, p1, p2, p3, BLOCK: tl.constexpr
):
    """What `Arrangement` has of every id and prefix."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < num_ids
    none = p1.to(tl.int64) * p2 * p3
    key = tl.load(keys + i, mask=inside, other=0).to(tl.int64)
    before = tl.load(keys + i - 1, mask=inside & (i > 0), other=0).to(tl.int64)
    following = tl.load(keys + i + 1, mask=i + 1 < num_ids, other=0).to(tl.int64)
    is_id = inside & (key < none)
    is_last = is_id & ((i + 1 == num_ids) | (following == none))
    rank = tl.load(ranks + i, mask=inside, other=0)
    is_head = is_id & (rank != tl.load(ranks + i - 1, mask=inside & (i > 0), other=0))
    prefix = key // p3
    second = prefix // p1
    tl.store(prefixes + i, tl.where(is_id, rank - 1, -1), mask=inside)
    tl.store(lasts + i, tl.where(is_id, key - prefix * p3, p3).to(tl.int32), mask=inside)
    tl.store(starts + rank - 1, i, mask=is_head)
    tl.store(starts + rank, i + 1, mask=is_last)
    tl.store(firsts + rank - 1, (prefix - second * p1).to(tl.int32), mask=is_head)
    # Groups between that of the id before and this one have no prefix: they begin, and end, here as well.
    missed = tl.where(is_head, second - tl.where(i > 0, before // p3 // p1, -1), 0).to(tl.int32)
    for back in range(tl.max(missed)):
        tl.store(group_starts + second - back, rank - 1, mask=back < missed)
    left = tl.where(is_last, p2 - second, 0).to(tl.int32)
    for further in range(tl.max(left)):
        tl.store(group_starts + second + 1 + further, rank, mask=further < left)


@triton.jit
def tile_of(starts, num_segments, tile, SIZE: tl.constexpr, SEARCHED: tl.constexpr):
    """Which segment a tile is of, and where it begins and the segment ends; it is empty where that is not behind it.

    A segment is cut into tiles of SIZE from its own beginning. Its first has the number starts[s] // SIZE + s: there
    are no more before it. So no number stands for two tiles, and no running sum is needed.
    """
    segment = -1
    for first in range(0, num_segments, SEARCHED):
        s = first + tl.arange(0, SEARCHED)
        number = tl.load(starts + s, mask=s < num_segments, other=0) // SIZE + s
        segment += tl.sum(((s < num_segments) & (number <= tile)).to(tl.int32))
    begin = tl.load(starts + segment)
    begin += (tile - begin // SIZE - segment) * SIZE
    return segment, begin, tl.load(starts + segment + 1)


def arrange(
    ids: Tensor, row_factors: tuple[int, int, int], num_rows: int, count: Tensor | None = None, *, shared: bool = True
) -> Arrangement:
    """Sorts ids by (i₂, i₁, i₃) and says where prefixes and groups begin.

    Args:
        ids: int64 `[N]`: distinct, or each makes a row of its own.
        row_factors: p₁, p₂, p₃.
        num_rows: ids are 0 … num_rows − 1.
        count: `[1]`: how many of them are valid; None for all.
        shared: False to make every id a prefix of its own, for comparison.

    Source: EL-Rec (SC'22) §III-A, Algorithm 1. Differs: see `rowmesh.ops.tensor_train`.
    """
    check("ids", ids, (torch.int64,), 1, ids.device)
    (p1, p2, p3), device, num_ids = row_factors, ids.device, ids.numel()
    narrow = torch.int32 if p1 * p2 * p3 < 2**31 else torch.int64
    keys = torch.empty(num_ids, dtype=narrow, device=device)
    programs = ceil_div(num_ids, BLOCK)
    launch(_keys_of, programs, ids, count, keys, num_rows, num_ids, p1, p2, p3, BLOCK=BLOCK)
    keys, order = torch.sort(keys, stable=True)
    flags, prefixes, lasts = (torch.empty(num_ids, dtype=torch.int32, device=device) for _ in range(3))
    most = min(num_ids, p1 * p2) if shared else num_ids
    sizes = num_ids + 1, most, p2 + 1
    starts, firsts, group_starts = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    launch(
        _flag_heads,
        ceil_div(max(sizes), BLOCK),
        keys,
        flags,
        starts,
        firsts,
        group_starts,
        num_ids,
        most,
        p1,
        p2,
        p3,
        SHARED=shared,
        BLOCK=BLOCK,
    )
    ranks = torch.cumsum(flags, 0, dtype=torch.int32)
    launch(
        _list_prefixes,
        programs,
        keys,
        ranks,
        prefixes,
        lasts,
        starts,
        firsts,
        group_starts,
        num_ids,
        p1,
        p2,
        p3,
        BLOCK=BLOCK,
    )
    num_prefixes = ranks[-1:] if num_ids else starts
    return Arrangement(row_factors, order, prefixes, lasts, starts, firsts, group_starts, num_prefixes)


def sort_distinct(
    ids: Tensor, num_rows: int, row_factors: tuple[int, int, int], num: Tensor, first: Tensor | None = None
) -> DevicePrefixes:
    """The handle of distinct ids; see `rowmesh.ops.prefixes.sort_ids`."""
    arrangement = arrange(ids, row_factors, num_rows, num)
    if first is not None:
        arrangement = replace(arrangement, order=arrangement.order + first)
    return DevicePrefixes(arrangement, num_rows, ids, num, first)


def find_distinct(ids: Tensor, num_rows: int, row_factors: tuple[int, int, int]) -> DevicePrefixes:
    """The handle of ids that may be equal; those that are no rows have no part in anything."""
    # One segment; from the host its bounds would have to be copied.
    unique = segment_unique(ids, torch.arange(2, device=ids.device) * ids.numel())
    found = sort_distinct(unique.unique, num_rows, row_factors, unique.num_unique)
    found.unique = unique
    return found


def merge(found: Sequence[tuple[DevicePrefixes, Tensor]]) -> tuple[DevicePrefixes, Tensor]:
    """The distinct ids of several, and the sums of their rows' gradients, in the order of `found`."""
    ids, entries = [], []
    for each, gradients in found:
        places = torch.arange(each.num_unique, device=each.ids.device)
        ids.append(torch.where(places < each.num, each.ids, NO_ID))
        # The gradients of this table's rows among those of several.
        entries.append(gradients if each.first is None else gradients.index_select(0, each.first + places))
    one, _ = found[0]
    merged, entries = find_distinct(torch.cat(ids), one.num_rows, one.arrangement.row_factors), torch.cat(entries)
    # Distinct ids are numbered from 0 without a gap, so that sums by ascending number are in their order.
    return merged, sum_merged(merge_slots(merged.inverse), entries, torch.empty_like(entries))


def starts_of(keys: Tensor, num_keys: int) -> Tensor:
    """Int32 `[num_keys + 1]`: where each of the sorted keys begins."""
    wanted = torch.arange(num_keys + 1, dtype=keys.dtype, device=keys.device)
    return torch.searchsorted(keys, wanted, out_int32=True)


SIGNATURES = (
    Signature(_keys_of, "*i64 *i32 i64 i32 i32 i32 i32", {"BLOCK": BLOCK, "count": None}),
    Signature(_keys_of, "*i64 *i32 *i64 i64 i32 i32 i32 i32", {"BLOCK": BLOCK}),
    Signature(_flag_heads, "*i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32 i32", {"BLOCK": BLOCK, "SHARED": True}),
    Signature(_list_prefixes, "*i32 *i32 *i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32", {"BLOCK": BLOCK}),
)
