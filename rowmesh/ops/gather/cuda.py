"""Gather on a GPU: one program a tile of rows. See [Note: GPU kernels] in `rowmesh.ops.gpu`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import MOST_PROGRAMS, Signature, ceil_div, check, launch, tile_of_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


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


SIGNATURES = tuple(
    Signature(
        _gather, f"*{storage} *{index} *{storage} *i64 i32", {"DIM": dim, "COLUMNS": columns, "ROWS": rows}
    )
    for storage, index, dim, columns, rows in (
        ("fp32", "i64", 64, 64, 32),
        ("fp32", "i64", 128, 128, 16),
        ("bf16", "i32", 100, 128, 32),
        ("fp64", "i64", 3, 4, 256),
    )
)  # fmt: skip
