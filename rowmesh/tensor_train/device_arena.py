"""Device core arena: the cores of a group's tensor-train tables, and their optimizer state, in a GPU's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.tables import TableGroup
from rowmesh.tensor_train.arena import CoreTables
from rowmesh.tensor_train.device_lookup import DeviceLookup


class DeviceCoreArena(CoreTables):
    """What `rowmesh.tensor_train.arena.CoreArena` is on a CPU, where first values are drawn.

    Args:
        group: of tensor-train tables.
        device: where.

    Raises:
        MemoryError: the device has no room.
    """

    def __init__(self, group: TableGroup, device: torch.device) -> None:
        from rowmesh.ops.update_slices.cuda import update_slices

        try:
            super().__init__(group, device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"group {group.name} on {device}: {error}") from error
        self._update_slices = update_slices

    def look_up(
        self, table: int, ids: Tensor, count: Tensor, first: Tensor, out: Tensor, *, keep: bool
    ) -> DeviceLookup:  # fmt: skip
        """Computes the rows of distinct ids of a table; `keep`: a backward may come.

        Args:
            table: its number.
            ids: int64 `[N]`, the first `count` valid.
            count: int64 `[1]`.
            first: int64 `[1]`: where their rows begin in `out`.
            out: `[M, D]`.
            keep: whether products are kept for it.
        """
        cores = self.tables[table]
        lookup = DeviceLookup(cores.shape, cores.cores[0].dtype, ids, count, first)
        lookup.rows(cores.cores, out, keep)
        return lookup

    def apply(
        self, table: int, gradients: Sequence[Tensor], touched: Sequence[Tensor], numbers: tuple[float, ...]
    ) -> None:  # fmt: skip
        """Updates slices of a table, given the gradients of its cores; arguments as for the CPU's."""
        cores, rule = self.tables[table], self.group.optimizer.name
        for core, states, gradient, marks in zip(cores.cores, cores.states, gradients, touched, strict=True):
            self._update_slices(core, states, gradient, marks, rule, numbers)
