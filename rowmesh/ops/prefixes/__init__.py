"""Prefixes of tensor-train ids: which distinct ids share the product of two slices.

A handle holds the distinct ids of one table, sorted by (i₂, i₁) as `rowmesh.ops.tensor_train` reads them. On a CPU they
are found by a hash and sorted by counting, in memory of a workspace; on a device everything is sorted, and how many
there are stays there. Whether there is a workspace says which: tensors of a CPU may be a device's, interpreted.

Source: EL-Rec (SC'22) §III-A, Algorithm 1. Differs: prefixes are sorted, as `rowmesh.ops.tensor_train` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rowmesh.ops.prefixes.cpu import HostPrefixes, Loan, Workspace, refusal
from rowmesh.ops.prefixes.cpu import merge as _merge_on_host
from rowmesh.ops.prefixes.handles import NO_ID, DevicePrefixes

__all__ = ["NO_ID", "DevicePrefixes", "HostPrefixes", "Loan", "Prefixes", "Workspace", "merge", "refusal", "sort_ids"]

Prefixes = HostPrefixes | DevicePrefixes


def sort_ids(
    ids: Tensor,
    num_rows: int,
    row_factors: tuple[int, int, int],
    workspace: Workspace | None,
    *,
    is_distinct: bool = False,
    num: Tensor | None = None,
    first: Tensor | None = None,
) -> Prefixes:
    """The distinct ids of one table.

    Args:
        ids: int64 `[N]`, contiguous. On a device those that are no rows have no part in anything.
        num_rows: ids are 0 … num_rows − 1.
        row_factors: p₁, p₂, p₃.
        workspace: memory on a CPU; None on a device.
        is_distinct: whether the ids are known to differ; inverse and counts are then not made.
        num: of distinct ids on a device int `[1]`: how many are valid.
        first: of distinct ids on a device int64 `[1]`: where their rows begin among those of several tables, or None.

    Raises:
        IdRangeError: on a CPU, ids are no rows.
    """
    if workspace is not None:
        return HostPrefixes(ids, num_rows, row_factors, workspace, is_distinct)
    from rowmesh.ops.prefixes import cuda

    if not is_distinct:
        return cuda.find_distinct(ids, num_rows, row_factors)
    assert num is not None
    return cuda.sort_distinct(ids, num_rows, row_factors, num, first)


def merge(found: Sequence[tuple[Prefixes, Tensor]]) -> tuple[Prefixes, Tensor]:
    """Several handles of one table, with the gradients of their rows, as one: those of equal ids are summed.

    The sums are in the order of `found`.
    """
    given: Any = found
    if isinstance(found[0][0], HostPrefixes):
        return _merge_on_host(given)
    from rowmesh.ops.prefixes import cuda

    return cuda.merge(given)
