"""Group exchange: what stays the same from batch to batch for one group of tables on one rank.

It has the group's rows (dense, or cached before a backing store), knows which rank owns each row, finds what a batch
needs, and updates rows by merged gradients. Transports bring rows and gradients. How a batch is looked up, and which
side knows what of it, differs: see `rowmesh.exchange.host_group` and `rowmesh.exchange.device_group`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rowmesh._support.counters import GroupCounters
from rowmesh.exchange.replica_rows import ReplicatedMeans, ReplicatedSums
from rowmesh.exchange.route import AnyRouteGroup
from rowmesh.mesh.channel import Wire
from rowmesh.ops.merge_update import Merged
from rowmesh.placement import AddressMap
from rowmesh.placement.drift import Traffic
from rowmesh.tables import CachedArena, DenseArena, TableGroup
from rowmesh.tables.cores import CoreArena
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.update_rules import Update


def never() -> bool:
    """May not wait: no other batch unpins rows meanwhile where look-ups and updates take turns."""
    return False


class GroupExchange:
    """A group of tables on one rank: a `HostGroupExchange` or a `DeviceGroupExchange`.

    Args:
        group: the tables.
        address_map: where rows are asked for.
        arena: the rows of this rank; or cores, from which rows are computed where they are looked up.
        device: whose kernels look rows up; None: the host's.
        wire_dtype: how rows and gradients travel between ranks, where that is narrower than they are.

    Attributes:
        row_wire, gradient_wire: the same, for each.
        is_tiered: whether rows must be brought into fast memory before they are read.
        is_dynamic: whether rows are frames that ids are given.
        features: name and table of each.
        look_ups: what is found of batches.
        replicated: keeps replicas together, where there are any.
        is_frozen: whether rows are looked up and not updated; `freeze` sets it.
        sums_gradients: whether backward sums their gradients: on a device also those of frozen rows, for nothing.
    """

    look_ups: Any  # what a subclass has

    def __init__(
        self,
        group: TableGroup,
        address_map: AddressMap,
        arena: DenseArena | CachedArena | CoreArena,
        device: torch.device | None,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.group, self.address_map, self.device = group, address_map, device
        # Typed as what all but `CoreGroup` find here, which has the cores itself.
        self.arena: DenseArena | CachedArena = arena  # pyright: ignore[reportAttributeAccessIssue]
        self.rank, self.world_size = address_map.rank, address_map.plan.world_size
        self.num_segments = address_map.num_segments
        self.is_tiered, self.is_dynamic = isinstance(arena, CachedArena), group.takes_any_id
        self.features = [(name, table) for table in group.tables for name in table.features]
        self.row_bytes = group.dim * group.dtype.itemsize
        self.gradient_bytes = group.dim * compute_dtype(group.dtype).itemsize
        self.row_wire, self.gradient_wire = (
            Wire(dtype, wire_dtype) if wire_dtype is not None and wire_dtype.itemsize < dtype.itemsize else None
            for dtype in (group.dtype, compute_dtype(group.dtype))
        )
        self.freeze(is_frozen=group.tables[0].frozen)
        self.replicated: ReplicatedSums | ReplicatedMeans | None = None
        self.counters = GroupCounters(group.name, tables=tuple(table.name for table in group.tables), device=device)

    def count_on(self, counters: GroupCounters) -> None:
        """Counts on where another exchange of the group ended."""
        self.counters = counters

    def replicate(self, replicated: ReplicatedSums | ReplicatedMeans) -> None:
        """Takes what keeps replicas of its rows together."""
        self.replicated = replicated

    def freeze(self, *, is_frozen: bool) -> None:
        """Rows are looked up and not updated from now on, or are trained again."""
        self.is_frozen, self.sums_gradients = is_frozen, not is_frozen or self.device is not None

    @property
    def num_lent(self) -> int:
        """Routes that are under way."""
        return self.look_ups.num_lent

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, lent or idle; without the arena."""
        return self.look_ups.num_bytes

    def apply(
        self, merged: Merged, update: Update, part: tuple[int, int] | None = None, num: int | None = None
    ) -> None:
        """Updates merged rows, as far as this rank's replica group knows.

        Args:
            merged: distinct slots, and the gradients for each.
            update: the optimizer's numbers.
            part: on the host, which of the rows: first and one past the last; default: all.
            num: on a device, how many rows there are, where the host knows it.
        """
        if self.is_frozen:
            return
        if isinstance(self.replicated, ReplicatedSums):
            self.replicated.keep(merged, part, num=num)
        elif self.is_tiered:
            self._apply_tiered(merged, update, part)
        else:
            if self.replicated is not None:
                self.replicated.touch(merged, part, num=num)
            self.arena.apply(merged, update.lr, update.scaling, update.step, part)

    def _apply_tiered(self, merged: Merged, update: Update, part: tuple[int, int] | None) -> None:
        self.arena.apply(merged, update.lr, update.scaling, update.step, part)

    def count_into(self, group: AnyRouteGroup, traffic: Traffic) -> None:
        """Adds what a batch asks for to counted traffic; tensor-train tables ask no rank."""
        if self.group.stores_rows:
            self._count_into(group, traffic)

    def _count_into(self, group: AnyRouteGroup, traffic: Traffic) -> None:
        raise NotImplementedError

    # On a rank alone

    def prefetch(self, group: AnyRouteGroup) -> None:
        """Makes sure that a rank alone finds the rows of tiered tables that it asked for in fast memory.

        Raises:
            NoRoomError: they do not fit into fast memory.
        """
        raise NotImplementedError

    def prepare_alone(self, groups: Sequence[AnyRouteGroup]) -> None:
        """Does what may fail of `update_alone`, which follows, or `withdraw`; changes no row."""

    def update_alone(self, groups: Sequence[AnyRouteGroup], update: Update) -> None:
        """Updates the rows of some batches by their gradients, where no other rank has a part."""
        raise NotImplementedError

    def withdraw(self) -> None:
        """Forgets what was prepared: rows that were pinned for it may leave fast memory."""

    def count_alone(self, group: AnyRouteGroup) -> None:
        """Counts what a batch asked for and is updated now, where no other batch or rank has a part."""
        raise NotImplementedError
