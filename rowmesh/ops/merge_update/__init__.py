"""Merge of duplicate keys, and the optimizer's update in place.

An owner receives, from every rank, a list of slots and their gradients. Merging finds the distinct slots and lists the
requests for each in the order of the ranks; `update` sums the gradients of a slot and changes the row and its state in
the same pass, so that no merged gradient is ever written. Where requests come from several nodes, each node's are
summed first, then the nodes' sums: the order that an exchange in two hops has too.

The merge is FusedRec's owner-side unique (§3 "Lossless Lookup"): the collective transport also answers look-ups
through it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rowmesh.ops.merge_update.cpu import Merger, Singles, sum_kernels
from rowmesh.ops.merge_update.cpu import update as _update_on_host
from rowmesh.ops.merge_update.handles import DeviceMerged, HostMerged, Merged

__all__ = ["DeviceMerged", "HostMerged", "Merged", "Merger", "Singles", "sum_kernels", "update"]


def update(
    rows: Tensor, state: Sequence[Tensor], merged: Merged, rule: str, numbers: tuple[float, ...],
    part: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Changes the rows of merged slots and their states, in place.

    Args:
        rows: `[R, D]`, float32, float64 or bfloat16, contiguous.
        state: of the rule, in the order of its `state`; float32, or float64 where rows are: `[R, D]`, or `[R]` where it
            has one value a row.
        merged: the slots and their gradients; what filled it says which kernels update.
        rule: the name of an update rule.
        numbers: what its `numbers` returned.
        part: which of the distinct slots, first and one past the last; default: all, which a device takes alone.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a layout or device does not fit.
        ConfigurationError: rows are longer than a device's kernels take.

    Example:
        >>> import torch
        >>> rows, slots, gradients = torch.zeros(4, 2), torch.tensor([3, 1], dtype=torch.int32), torch.ones(2, 2)
        >>> singles = Singles()
        >>> singles(slots.data_ptr(), gradients.data_ptr(), gradient_bytes=8, count=2)
        >>> update(rows, (), singles, "sgd", (0.5, 1.0, 0.0, 0.0, 0.0, 1.0))
        >>> rows[:, 0].tolist()
        [0.0, -0.5, 0.0, -0.5]
    """
    if isinstance(merged, HostMerged):
        _update_on_host(rows, state, merged, rule, numbers, part)
        return
    from rowmesh.ops.merge_update import cuda

    if part is not None:
        raise ValueError(f"a device updates all merged slots, not the part {part}")
    if merged.gradients is None:
        raise ValueError("the gradients of merged slots are not known yet: see `with_gradients`")
    cuda.update(rows, tuple(state), merged, merged.gradients, rule, numbers)
