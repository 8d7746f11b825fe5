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

import torch
from torch import Tensor

from rowmesh.ops.merge_update import cpu, merging
from rowmesh.ops.merge_update.cpu import sum_kernels
from rowmesh.ops.merge_update.handles import DeviceMerged, HostMerged, Merged
from rowmesh.ops.merge_update.merging import Merger, Singles

__all__ = [
    "DeviceMerged",
    "HostMerged",
    "Merged",
    "Merger",
    "Singles",
    "copy_slots",
    "merge",
    "singles",
    "sum_kernels",
    "sum_merged",
    "update",
]


def merge(slots: Sequence[Tensor], gradients: Sequence[Tensor] = (), into: Merger | None = None) -> Merged:
    """Merges lists of slots, each distinct within itself: a slot's gradients are added in the order of the lists.

    Args:
        slots: of each list, `[n]`: uint32 in the host's memory, int32 or int64 on a device. Lists that are one and the
            same tensor are not sorted on a device.
        gradients: of each list, `[n, D]`; in the host's memory they must stay where they are.
        into: a merger of one segment, for the host's; None: a device's kernels merge.

    Returns:
        The distinct slots and their gradients: in the host's memory `into`.

    Example:
        >>> lists = [torch.tensor([7, 3], dtype=torch.uint32), torch.tensor([3, 8], dtype=torch.uint32)]
        >>> gradients = [torch.ones(2, 1), torch.ones(2, 1)]
        >>> merged = merge(lists, gradients, Merger(1))
        >>> out = torch.zeros(3, 1)
        >>> sum_merged(merged, out)
        >>> out.flatten().tolist()
        [1.0, 2.0, 1.0]
    """
    if into is not None:
        merging.merge(into, slots, gradients)
        return into
    from rowmesh.ops.merge import cuda

    if all(each is slots[0] for each in slots):
        merged = cuda.merge_equal(slots[0], len(slots))
    else:
        merged = cuda.merge(torch.cat(list(slots)), most=len(slots))
    return merged.with_gradients(torch.cat(list(gradients))) if gradients else merged


def singles(slots: Tensor, gradients: Tensor, into: Singles | None = None) -> Merged:
    """Distinct slots with one gradient each; arguments as those of `merge`, of one list."""
    if into is not None:
        into(slots.data_ptr(), gradients.data_ptr(), gradients.shape[1] * gradients.itemsize, len(slots))
        return into
    from rowmesh.ops.merge import cuda

    count = torch.full((1,), len(slots), dtype=torch.int32, device=slots.device)
    return cuda.singles(slots.to(torch.int64), count).with_gradients(gradients)


def sum_merged(merged: Merged, out: Tensor, first: int = 0, part: tuple[int, int] | None = None) -> None:
    """The sums of gradients that `update` would apply, one a distinct slot.

    Args:
        merged: the slots and their gradients.
        out: `[…, D]`, float32 or float64, of the type of the arithmetic, contiguous.
        first: the row of `out` where sums begin.
        part: which of the distinct slots, as for `update`.
    """
    if isinstance(merged, HostMerged):
        cpu.sum_merged(merged, out, first, part)
        return
    from rowmesh.ops.merge_update import cuda

    if part is not None:
        raise ValueError(f"a device sums all merged slots, not the part {part}")
    assert merged.gradients is not None
    cuda.sum_merged(merged, merged.gradients, out[first:])


def copy_slots(merged: Merged, out: Tensor, first: int = 0, part: tuple[int, int] | None = None) -> None:
    """Copies distinct slots to `out[first:]`, uint32 in the host's memory, int32 or int64 on a device.

    Args:
        merged: the slots; of a device's as many are copied as there is room for, valid or not.
        out: `[n]`.
        first: where the first goes.
        part: which of the slots, as for `update`.
    """
    if isinstance(merged, HostMerged):
        cpu.copy_slots(merged, out, first, part)
    else:
        slots = merged.slots[: len(out) - first]
        out[first : first + len(slots)] = slots


def update(
    rows: Tensor,
    state: Sequence[Tensor],
    merged: Merged,
    rule: str,
    numbers: tuple[float, ...],
    part: tuple[int, int] | None = None,
) -> None:
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
        cpu.update(rows, state, merged, rule, numbers, part)
        return
    from rowmesh.ops.merge_update import cuda

    if part is not None:
        raise ValueError(f"a device updates all merged slots, not the part {part}")
    if merged.gradients is None:
        raise ValueError("the gradients of merged slots are not known yet: see `with_gradients`")
    cuda.update(rows, tuple(state), merged, merged.gradients, rule, numbers)
