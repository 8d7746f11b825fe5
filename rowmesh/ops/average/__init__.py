"""Average of rows over replicas, each of which sends only the rows it touched.

`mark` lists the slots that are touched for the first time since marks were cleared, and `pack` copies rows of such a
list. `average` takes, for every slot that some replica sent, the mean over all replicas: of those that did not send it
the value from before it was touched.

A list of slots in the host's memory is uint32, and the host's kernels read it; one of int64 is read by a device's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.ops.average import cpu
from rowmesh.ops.merge_update.handles import HostMerged, Merged

__all__ = ["average", "clear", "mark", "pack", "put"]


def mark(
    merged: Merged,
    marks: Tensor,
    bounds: Tensor,
    out: Tensor,
    part: tuple[int, int] | None = None,
    num: int | None = None,
) -> Tensor:
    """Marks distinct slots, and appends those that were not marked to a list.

    Args:
        merged: the slots.
        marks: uint8 `[R]`, one a slot.
        bounds: int64 `[2]`, of which the last is the length of the list: zeros, then what the last call returned.
        out: the list, uint32 or int64; it must have room for all slots.
        part: which of the slots, first and one past the last, in the host's memory; default: all.
        num: at most how many slots there are, where a caller knows it of a device's.

    Returns:
        Int64 `[2]`: where in the list the new ones begin and end; of the host's `bounds`, which has changed.
    """
    if isinstance(merged, HostMerged):
        first, end = part or (0, merged.num_merged)
        cpu.mark(merged, first, end, marks, bounds, out)
        return bounds
    from rowmesh.ops.average import cuda

    return cuda.mark(merged.slots[:num], merged.num, marks, bounds[1:], out)


def clear(slots: Tensor, bounds: Tensor, marks: Tensor, most: int) -> None:
    """Takes the marks off `slots[bounds[0] : bounds[1]]`, of which there are at most `most`."""
    if slots.dtype == torch.uint32:
        begin, end = bounds.tolist()
        marks.numpy()[slots.numpy()[begin:end]] = 0
        return
    from rowmesh.ops.average import cuda

    cuda.clear(slots, bounds, marks, most)


def pack(table: Tensor, slots: Tensor, bounds: Tensor, out: Tensor, most: int) -> None:
    """`out[i] = table[slots[i]]` for bounds[0] ≤ i < bounds[1].

    Args:
        table: `[R, D]`, float32, float64 or bfloat16, contiguous.
        slots: uint32 or int64.
        bounds: int64 `[2]`.
        out: `[…, D]` of the table's dtype.
        most: the most rows there may be between the bounds, as far as the host knows.
    """
    if slots.dtype == torch.uint32:
        cpu.pack(table, slots, bounds, out)
        return
    from rowmesh.ops.average import cuda

    cuda.pack(table, slots, bounds, out, most)


def put(table: Tensor, slots: Tensor, rows: Tensor) -> None:
    """`table[slots[i]] = rows[i]`.

    Args:
        table: `[R, D]`, float32, float64 or bfloat16, contiguous.
        slots: uint32 or int64 `[n]`, distinct.
        rows: `[n, D]` of the table's dtype.
    """
    if slots.dtype == torch.uint32:
        cpu.put(table, slots, rows)
        return
    from rowmesh.ops.average import cuda

    cuda.put(table, slots, rows, torch.full((1,), len(slots), dtype=torch.int32, device=slots.device))


def average(
    table: Tensor,
    merged: Merged,
    rows: Sequence[Tensor],
    ends: Tensor,
    own: int,
    before: Tensor,
    out: Tensor | None = None,
) -> None:
    """The mean over replicas of the rows that some replica sent; the formula of `reference.average`.

    A replica that did not send a row has the value from before it was touched: in `before`, where this rank's replica
    sent it, else in the table.

    Args:
        table: `[R, D]`, float32, float64 or bfloat16, contiguous: of this rank.
        merged: of the slots that all replicas sent, replica after replica; those of one replica are distinct.
        rows: `[n, D]` of each replica, or those of all as one.
        ends: int64 `[replicas + 1]`: 0, then one past the last entry of each replica, where the table is.
        own: the replica of this rank.
        before: `[n, D]`: what the rows that it sent were before.
        out: `[M, D]`, where means go, one a distinct slot; None for the table.

    Source: two-dimensional sparse parallelism, Algorithm 1, lines 8-9.
    """
    if isinstance(merged, HostMerged):
        cpu.average(table, merged, rows, ends, own, before, out)
        return
    from rowmesh.ops.average import cuda

    cuda.average(table, merged, rows[0] if len(rows) == 1 else torch.cat(list(rows)), ends, own, before, out)
