"""Average of rows on a GPU: mark what is touched, collect it in order, pack rows, average, put means into place.

Rows that a group touches between two synchronizations are appended, step by step, to a list whose length stays on the
device. Flags and their running sum place every slot, so that the list has the order of the slots that came, as on a
CPU, whatever the order of programs. See [Note: GPU kernels] in `rowmesh.ops.gpu`.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import MOST_PROGRAMS, Signature, ceil_div, check, launch, tile_of_rows
from rowmesh.ops.merge_update.handles import DeviceMerged as Merged

BLOCK = 1024
_MOST_ROWS = 256  # of one mean each, where the value is one a row
_ROWS = (torch.float32, torch.bfloat16, torch.float64)
_COUNTS = (torch.int32, torch.int64)


@triton.jit(do_not_specialize=("num_slots",))
def _mark(slots, count, marks, flags, num_slots, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_slot = i < tl.minimum(tl.load(count), num_slots)
    slot = tl.load(slots + i, mask=is_slot, other=0)
    is_new = is_slot & (tl.load(marks + slot, mask=is_slot, other=1) == 0)
    tl.store(marks + slot, tl.full([BLOCK], 1, tl.uint8), mask=is_new)
    tl.store(flags + i, is_new.to(tl.int32), mask=i < num_slots)


@triton.jit(do_not_specialize=("num_slots",))
def _append(slots, ranks, used, bounds, out, num_slots, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    rank = tl.load(ranks + i, mask=i < num_slots, other=0)
    before = tl.load(ranks + i - 1, mask=(i > 0) & (i < num_slots), other=0)
    begin = tl.load(used)
    slot = tl.load(slots + i, mask=i < num_slots, other=0)
    tl.store(out + begin + rank - 1, slot, mask=(i < num_slots) & (rank != before))
    tl.store(bounds + tl.zeros_like(i), begin + tl.zeros_like(i), mask=i == 0)
    tl.store(bounds + 1 + tl.zeros_like(i), begin + rank, mask=i == num_slots - 1)


@triton.jit(do_not_specialize=("most",))
def _clear(slots, bounds, marks, most, BLOCK: tl.constexpr):
    i = tl.load(bounds) + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_slot = i < tl.load(bounds + 1)
    slot = tl.load(slots + i, mask=is_slot, other=0)
    tl.store(marks + slot, tl.zeros([BLOCK], tl.uint8), mask=is_slot)


@triton.jit
def _pack(table, slots, bounds, out, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    end, columns = tl.load(bounds + 1), tl.arange(0, COLUMNS)
    first = tl.load(bounds) + tl.program_id(0).to(tl.int64) * ROWS
    for begin in range(first, end, tl.num_programs(0) * ROWS):
        i = begin + tl.arange(0, ROWS)
        inside = (i < end)[:, None] & (columns < D)[None, :]
        slot = tl.load(slots + i, mask=i < end, other=0)
        row = tl.load(table + slot[:, None] * D + columns[None, :], mask=inside)
        tl.store(out + i[:, None] * D + columns[None, :], row, mask=inside)


@triton.jit(do_not_specialize=("num_rows",))
def _put(table, slots, rows, count, num_rows, D: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    end, columns = tl.minimum(tl.load(count).to(tl.int64), num_rows), tl.arange(0, COLUMNS)
    for begin in range(tl.program_id(0).to(tl.int64) * ROWS, end, tl.num_programs(0) * ROWS):
        i = begin + tl.arange(0, ROWS)
        inside = (i < end)[:, None] & (columns < D)[None, :]
        slot = tl.load(slots + i, mask=i < end, other=0)
        row = tl.load(rows + i[:, None] * D + columns[None, :], mask=inside)
        tl.store(table + slot[:, None] * D + columns[None, :], row, mask=inside)


@triton.jit
def _value(order, sent, ends, group, at, end, before, inside, columns, D: tl.constexpr, DTYPE: tl.constexpr):
    """The rows of a group, sent or from before, and whether they are sent; `at` are its entries' places in `order`."""
    entry = tl.load(order + at, mask=at < end, other=0)
    is_sent = (at < end) & (entry < tl.load(ends + group + 1))
    row = tl.load(sent + entry[:, None] * D + columns[None, :], mask=is_sent[:, None] & inside, other=0)
    return tl.where(is_sent[:, None], row, before).to(DTYPE), is_sent.to(tl.int32)


@triton.jit(do_not_specialize=("own", "num_groups"))
def _average(
    table,
    order,
    slots,
    starts,
    num,
    sent,
    ends,
    old,
    out,
    own,
    num_groups,
    share: tl.float64,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The mean over groups of each merged slot's row: w₀ + Σ (wₘ − w₀) / M, in the order of the groups."""
    dtype: tl.constexpr = tl.float64 if table.dtype.element_ty == tl.float64 else tl.float32
    count, columns = tl.load(num), tl.arange(0, COLUMNS)
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        m = first + tl.arange(0, ROWS)
        is_slot = m < count
        inside = is_slot[:, None] & (columns < D)[None, :]
        at = tl.load(starts + m, mask=is_slot, other=0)
        end = tl.load(starts + m + 1, mask=is_slot, other=0)
        slot = tl.load(slots + m, mask=is_slot, other=0)
        place = slot[:, None] * D + columns[None, :]
        before = tl.load(table + place, mask=inside, other=0)
        own_first, own_end = tl.load(ends + own), tl.load(ends + own + 1)
        for j in range(num_groups):  # a slot has one entry of a group at most
            entry = tl.load(order + at + j, mask=at + j < end, other=-1)
            is_own = ((entry >= own_first) & (entry < own_end))[:, None]
            kept = tl.load(old + (entry - own_first)[:, None] * D + columns[None, :], mask=is_own & inside, other=0)
            before = tl.where(is_own, kept, before)
        base, is_sent = _value(order, sent, ends, 0, at, end, before, inside, columns, D, dtype)
        total = tl.zeros([ROWS, COLUMNS], dtype)
        for group in range(1, num_groups):
            at += is_sent
            row, is_sent = _value(order, sent, ends, group, at, end, before, inside, columns, D, dtype)
            total += row - base
        mean = (base + tl.full((), share, dtype) * total).to(table.dtype.element_ty)
        if out is None:
            tl.store(table + place, mean, mask=inside)
        else:
            tl.store(out + m.to(tl.int64)[:, None] * D + columns[None, :], mean, mask=inside)


def mark(slots: Tensor, count: Tensor, marks: Tensor, used: Tensor, out: Tensor) -> Tensor:
    """Marks slots and appends those that were not marked to a list.

    Args:
        slots: int64 `[M]`, distinct: what `merge` returned.
        count: `[1]`: how many of them are valid.
        marks: uint8 `[R]`, one a slot.
        used: int64 `[1]`: the length of the list.
        out: int64, the list; `used` + M must not be more than it holds.

    Returns:
        Int64 `[2]`: where in the list the new ones begin and end, the `used` of the next call.

    Example:
        >>> marks, out = (
        ...     torch.zeros(9, dtype=torch.uint8, device=device),
        ...     torch.zeros(9, dtype=torch.int64, device=device),
        ... )
        >>> used, two = torch.tensor([0], device=device), torch.tensor([2], device=device)
        >>> bounds = mark(torch.tensor([3, 5], device=device), two, marks, used, out)
        >>> bounds = mark(torch.tensor([5, 8], device=device), two, marks, bounds[1:], out)
        >>> bounds.tolist(), out[:3].tolist()
        ([2, 3], [3, 5, 8])
    """
    check("slots", slots, (torch.int64,), 1, marks.device)
    check("count", count, _COUNTS, 1, marks.device)
    check("marks", marks, (torch.uint8,), 1, marks.device)
    check("used", used, (torch.int64,), 1, marks.device)
    check("out", out, (torch.int64,), 1, marks.device)
    num_slots = slots.numel()
    if num_slots == 0:
        return used.repeat(2)
    flags, bounds = torch.empty_like(slots, dtype=torch.int32), torch.empty(2, dtype=torch.int64, device=marks.device)
    programs = ceil_div(num_slots, BLOCK)
    launch(_mark, programs, slots, count, marks, flags, num_slots, BLOCK=BLOCK)
    ranks = torch.cumsum(flags, 0, dtype=torch.int32)
    launch(_append, programs, slots, ranks, used, bounds, out, num_slots, BLOCK=BLOCK)
    return bounds


def clear(slots: Tensor, bounds: Tensor, marks: Tensor, most: int) -> None:
    """Takes the marks off `slots[bounds[0] : bounds[1]]`, of which there are at most `most`."""
    launch(_clear, ceil_div(most, BLOCK), slots, bounds, marks, most, BLOCK=BLOCK)


def pack(table: Tensor, slots: Tensor, bounds: Tensor, out: Tensor, most: int) -> Tensor:
    """Copies rows; see `rowmesh.ops.average.pack`. Returns `out`."""
    check("table", table, _ROWS, 2, table.device)
    check("slots", slots, (torch.int64,), 1, table.device)
    check("bounds", bounds, (torch.int64,), 1, table.device)
    check("out", out, (table.dtype,), 2, table.device)
    columns, rows = tile_of_rows(table.shape[1], table.dtype)
    programs = min(ceil_div(most, rows), MOST_PROGRAMS)
    launch(_pack, programs, table, slots, bounds, out, D=table.shape[1], COLUMNS=columns, ROWS=rows)
    return out


def put(table: Tensor, slots: Tensor, rows: Tensor, count: Tensor) -> None:
    """`table[slots[i]] = rows[i]` for i < count.

    Args:
        table: `[R, D]`, float32, float64 or bfloat16.
        slots: int64 `[M]`, distinct.
        rows: `[M, D]` of the table's dtype.
        count: `[1]`.
    """
    check("table", table, _ROWS, 2, table.device)
    check("slots", slots, (torch.int64,), 1, table.device)
    check("rows", rows, (table.dtype,), 2, table.device)
    check("count", count, _COUNTS, 1, table.device)
    num_rows, dim = slots.numel(), table.shape[1]
    columns, height = tile_of_rows(dim, table.dtype)
    programs = min(ceil_div(num_rows, height), MOST_PROGRAMS)
    launch(_put, programs, table, slots, rows, count, num_rows, D=dim, COLUMNS=columns, ROWS=height)


def average(
    table: Tensor, merged: Merged, sent: Tensor, ends: Tensor, own: int, old: Tensor, out: Tensor | None = None
) -> None:
    """Averages rows; see `rowmesh.ops.average.average`. `sent` has the rows of all groups, `old` is `before`."""
    for name, tensor in (("table", table), ("sent", sent), ("old", old)):
        check(name, tensor, (table.dtype,), 2, table.device)
    check("ends", ends, (torch.int64,), 1, table.device)
    num_groups, dim = ends.numel() - 1, table.shape[1]
    columns, rows = tile_of_rows(dim, table.dtype)
    rows = max(min(rows // 2, _MOST_ROWS), 1)  # a program holds four tiles
    programs = min(ceil_div(merged.slots.numel(), rows), MOST_PROGRAMS)
    launch(
        _average,
        programs,
        table,
        merged.order,
        merged.slots,
        merged.starts,
        merged.num,
        sent,
        ends,
        old,
        out,
        own,
        num_groups,
        1.0 / num_groups,
        D=dim,
        COLUMNS=columns,
        ROWS=rows,
    )


_TILE = {"D": 64, "COLUMNS": 64, "ROWS": 16}
SIGNATURES = (
    Signature(_mark, "*i64 *i32 *u8 *i32 i32", {"BLOCK": BLOCK}),
    Signature(_append, "*i64 *i32 *i64 *i64 *i64 i32", {"BLOCK": BLOCK}),
    Signature(_clear, "*i64 *i64 *u8 i32", {"BLOCK": BLOCK}),
    Signature(_pack, "*fp32 *i64 *i64 *fp32", _TILE),
    Signature(_put, "*fp32 *i64 *fp32 *i32 i32", _TILE),
    Signature(_average, "*fp32 *i64 *i64 *i32 *i32 *fp32 *i64 *fp32 i32 i32 fp64", {"out": None, **_TILE}),
    Signature(
        _average,
        "*bf16 *i64 *i64 *i32 *i32 *bf16 *i64 *bf16 *bf16 i32 i32 fp64",
        {"D": 1, "COLUMNS": 1, "ROWS": _MOST_ROWS},
    ),
)
