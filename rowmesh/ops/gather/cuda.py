"""Gather on a GPU, of one arena or of those of all ranks: one program a tile of rows.

See [Note: GPU kernels] in `rowmesh.ops.gpu`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import MOST_PROGRAMS, Signature, ceil_div, check, launch, next_power_of_2, tile_of_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
_MOST = tl.constexpr(2**63 - 1)


# Sizes that change from batch to batch are not specialized on: a kernel is compiled once.
@triton.jit(do_not_specialize=("num_slots",))
def _gather(table, slots, out, count, num_slots, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    end = num_slots
    if count is not None:
        end = tl.minimum(tl.load(count), num_slots)
    columns = tl.arange(0, COLUMNS)
    for tile in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = tile + tl.arange(0, ROWS).to(tl.int64)
        slot = tl.load(slots + row, mask=row < end, other=-1).to(tl.int64)
        mask = (slot >= 0)[:, None] & (columns < DIM)[None, :]
        values = tl.load(table + slot[:, None] * DIM + columns[None, :], mask=mask)
        tl.store(out + row[:, None] * DIM + columns[None, :], values, mask=mask)


@triton.jit(do_not_specialize=("num_slots",))
def _gather_from(
    bases,
    ends,
    slots,
    places,
    out,
    num_slots,
    WORLD: tl.constexpr,
    RANKS: tl.constexpr,
    DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    ranks = tl.arange(0, RANKS)
    limits = tl.load(ends + ranks, mask=ranks < WORLD, other=_MOST)
    end = tl.minimum(tl.load(ends + WORLD - 1), num_slots).to(tl.int32)
    columns = tl.arange(0, COLUMNS)
    for tile in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = tile + tl.arange(0, ROWS).to(tl.int64)
        owner = tl.sum((row[:, None] >= limits[None, :]).to(tl.int32), axis=1)
        base = tl.load(bases + owner, mask=row < end, other=0)
        slot = tl.load(slots + row, mask=row < end, other=0).to(tl.int64)
        mask = (row < end)[:, None] & (columns < DIM)[None, :]
        # Arenas begin where 16-byte loads may; that of a pointer from memory the compiler would not know.
        first = tl.multiple_of(base[:, None].to(tl.pointer_type(out.dtype.element_ty)), (16, 16))
        values = tl.load(first + (slot[:, None] * DIM + columns[None, :]), mask=mask)
        place = tl.load(places + row, mask=row < end, other=0).to(tl.int64)
        tl.store(out + place[:, None] * DIM + columns[None, :], values, mask=mask)


def gather(table: Tensor, slots: Tensor, out: Tensor | None = None, count: Tensor | None = None) -> Tensor:
    """`out[i] = table[slots[i]]`; moves 2·M·D elements and reads M slots.

    Args:
        table: `[R, D]`, float32, float64 or bfloat16.
        slots: `[M]` int64 or int32, each less than R: not checked. Where one is negative, the row of `out` stays as it
            is.
        out: `[M, D]` of the table's dtype; made where it is None.
        count: `[1]` int64 or int32: only the first `count` slots are read, and rows of `out` past them stay as they
            are. None for all.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.

    Example:
        >>> gather(torch.arange(6.0, device=device).view(3, 2), torch.tensor([2, 0], device=device)).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    check("table", table, DTYPES, 2, table.device)
    check("slots", slots, (torch.int64, torch.int32), 1, table.device)
    num_slots, dim = slots.numel(), table.shape[1]
    out = table.new_empty(num_slots, dim) if out is None else out
    check("out", out, (table.dtype,), 2, table.device)
    if out.shape != (num_slots, dim):
        raise ValueError(f"out must be [{num_slots}, {dim}], got {list(out.shape)}")
    if count is not None:
        check("count", count, (torch.int64, torch.int32), 1, table.device)
    columns, rows = tile_of_rows(dim, table.dtype)
    programs = ceil_div(num_slots, rows)
    if count is not None:
        programs = min(programs, MOST_PROGRAMS)
    launch(_gather, programs, table, slots, out, count, num_slots, DIM=dim, COLUMNS=columns, ROWS=rows)
    return out


def gather_from(bases: Tensor, ends: Tensor, slots: Tensor, places: Tensor, out: Tensor) -> Tensor:
    """`out[places[i]] = arena of rank r [slots[i]]`, for `ends[r − 1] ≤ i < ends[r]`: reads rows where ranks have them.

    Args:
        bases: int64 `[W]`: the address of every rank's arena `[R_r, D]`, as this device sees it; each a multiple of 16.
        ends: int64 `[W]`: how many slots there are for ranks up to each; the last says how many in all.
        slots: `[M]` int64 or int32, each less than R_r: not checked. `ends` may say that fewer are valid.
        places: int32 `[M]`, each less than M and none twice, as far as they are valid: not checked.
        out: `[M, D]` of the arenas' dtype; rows that are no places stay as they are.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.

    Example:
        >>> arenas = torch.arange(8.0, device=device).view(2, 4, 1)  # of two ranks
        >>> bases = torch.tensor([arena.data_ptr() for arena in arenas], device=device)
        >>> slots, ends = torch.tensor([3, 0, 1], device=device), torch.tensor([1, 3], device=device)
        >>> places = torch.tensor([1, 2, 0], dtype=torch.int32, device=device)
        >>> gather_from(bases, ends, slots, places, torch.empty(3, 1, device=device)).flatten().tolist()
        [5.0, 3.0, 4.0]

    Source: OPER §5.1 (direct reads of remote rows).
    """
    check("out", out, DTYPES, 2, out.device)
    check("bases", bases, (torch.int64,), 1, out.device)
    check("ends", ends, (torch.int64,), 1, out.device)
    check("slots", slots, (torch.int64, torch.int32), 1, out.device)
    check("places", places, (torch.int32,), 1, out.device)
    (num_slots, dim), world_size = out.shape, bases.numel()
    if slots.numel() != num_slots or places.numel() != num_slots or ends.numel() != world_size:
        raise ValueError(
            f"out has {num_slots} rows and needs as many slots and places, got {slots.numel()} and {places.numel()}; "
            f"{world_size} bases need as many ends, got {ends.numel()}"
        )
    columns, rows = tile_of_rows(dim, out.dtype)
    programs = min(ceil_div(num_slots, rows), MOST_PROGRAMS)
    launch(
        _gather_from,
        programs,
        bases,
        ends,
        slots,
        places,
        out,
        num_slots,
        WORLD=world_size,
        RANKS=next_power_of_2(world_size),
        DIM=dim,
        COLUMNS=columns,
        ROWS=rows,
    )
    return out


SIGNATURES = tuple(
    Signature(_gather, f"*{storage} *{index} *{storage} *i64 i32", {"DIM": dim, "COLUMNS": columns, "ROWS": rows})
    for storage, index, dim, columns, rows in (
        ("fp32", "i64", 64, 64, 32),
        ("fp32", "i64", 128, 128, 16),
        ("bf16", "i32", 100, 128, 32),
        ("fp64", "i64", 3, 4, 256),
    )
) + tuple(
    Signature(
        _gather_from,
        f"*i64 *i64 *i32 *i32 *{storage} i32",
        {"WORLD": world, "RANKS": ranks, "DIM": dim, "COLUMNS": columns, "ROWS": rows},
    )
    for storage, world, ranks, dim, columns, rows in (
        ("fp32", 8, 8, 64, 64, 32),
        ("fp32", 6, 8, 128, 128, 16),
        ("bf16", 2, 2, 100, 128, 32),
        ("fp64", 4, 4, 3, 4, 256),
    )
)
