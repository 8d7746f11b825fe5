"""Core group: a group of tensor-train tables on one rank, whose rows are computed where they are looked up.

On a device all that is long stays there; the host waits for nothing but what [Note: what the host waits for] in
`rowmesh.ops.look_up.device` says.

Source: EL-Rec §III (look-up, gradients).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.device_group import DeviceGroupExchange, DeviceRouteGroup
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.host_group import HostGroupExchange, HostRouteGroup
from rowmesh.exchange.route import AnyRouteGroup, Opened, table_bounds
from rowmesh.ops.memory import array_at
from rowmesh.ops.tensor_train import Lookup
from rowmesh.placement import AddressMap, Plan, TableShape
from rowmesh.placement.address_map import MAX_KEY
from rowmesh.tables import TableGroup
from rowmesh.tables.cores import CoreArena


class CoreLookUps(Opened):
    """The look-up of each table of a group, from the fetch to the update."""

    __slots__ = ("tables",)

    def __init__(self, tables: Sequence[Lookup]) -> None:
        self.tables = tables


class CoreGroup:
    """A group of tensor-train tables, routed as if one rank held all their rows; slots are row numbers.

    Args:
        group: the tables.
        arena: their cores.
        exchange: routes batches.

    Attributes: the same.
    """

    def __init__(self, group: TableGroup, arena: CoreArena, exchange: GroupExchange) -> None:
        self.group, self.arena, self.exchange = group, arena, exchange

    def fetch(self, group: AnyRouteGroup) -> None:
        """Computes the rows of a batch's distinct ids."""
        group.keep(CoreLookUps(self._look_up(group, keep=torch.is_grad_enabled())))

    def _look_up(self, group: AnyRouteGroup, *, keep: bool) -> list[Lookup]:
        raise NotImplementedError

    def gradients(self, groups: Sequence[AnyRouteGroup], table: int) -> tuple[Lookup, Tensor] | None:
        """The distinct ids of a table in all batches, and the gradients of their rows; None where there are no ids."""
        taken = []
        for group in groups:
            lookup = group.opened_as(CoreLookUps).tables[table]
            if not lookup.num_unique:
                continue
            if lookup.version != self.arena.version:
                lookup.release_products()  # gradients go through the cores as they are now
            taken.append((lookup, self._row_gradients(group, table, lookup)))
        if len(taken) < 2:
            return taken[0] if taken else None
        return Lookup.merged(taken)

    def _row_gradients(self, group: AnyRouteGroup, table: int, lookup: Lookup) -> Tensor:
        raise NotImplementedError

    def finish(self, groups: Sequence[AnyRouteGroup]) -> None:
        """Counts what this rank's batches asked for, distinct within each; forgets what only the update needed."""
        for group in groups:
            group.keep(CoreLookUps(()))
            self.exchange.count_alone(group)


class HostCoreGroup(CoreGroup):
    """The same on the host.

    Args:
        group: the tables.
    """

    def __init__(self, group: TableGroup) -> None:
        arena, address_map = CoreArena(group, None), virtual_addresses(group)
        super().__init__(group, arena, HostGroupExchange(group, address_map, arena))
        self._first_slots = [next(address_map.held(number)).slots.start for number in range(len(group.tables))]

    def _look_up(self, group: HostRouteGroup, *, keep: bool) -> list[Lookup]:
        look_up, send, row_bytes = group.look_up, group.look_up.send, group.exchange.row_bytes
        rows = look_up.received.reserve(group.num_unique * row_bytes)
        addresses = array_at(look_up.addresses, np.int64, group.num_unique)
        addresses[:] = rows + row_bytes * np.arange(group.num_unique)
        slots = send.lists.array(np.uint32, group.num_unique, offset=send.slots_offset).astype(np.int64)
        lookups = []
        for table, first in enumerate(self._first_slots):
            begin, end = send.segment_offsets[0, table : table + 2].tolist()
            ids = torch.from_numpy(slots[begin:end] - first)
            lookups.append(self.arena.look_up(table, ids, rows + begin * row_bytes, keep=keep))
        return lookups

    def _row_gradients(self, group: HostRouteGroup, table: int, lookup: Lookup) -> Tensor:
        first = int(group.look_up.send.segment_offsets[0, table])
        return group.look_up.summed[first : first + lookup.num_unique]


class DeviceCoreGroup(CoreGroup):
    """The same on a device, which alone knows how many distinct ids there are.

    Args:
        group: the tables.
        device: where cores are and look-ups run.
    """

    def __init__(self, group: TableGroup, device: torch.device) -> None:
        arena, self._device = CoreArena(group, device), device
        super().__init__(group, arena, DeviceGroupExchange(group, virtual_addresses(group), arena, device))

    def _look_up(self, group: DeviceRouteGroup, *, keep: bool) -> list[Lookup]:
        # The unique ids of a table do not begin behind where its ids do, so that as many can be read from there.
        look_up, unique, device = group.look_up, group.look_up.unique, self._device
        look_up.read_from(torch.empty(group.num_unique, self.group.dim, dtype=self.group.dtype, device=device))
        lookups = []
        for table, (begin, end) in enumerate(pairwise(table_bounds(self.group, group.layout))):
            first, last = unique.offsets[table : table + 1], unique.offsets[table + 1 : table + 2]
            ids = unique.unique.index_select(0, first + torch.arange(end - begin, device=device))
            lookups.append(self.arena.look_up(table, ids, look_up.source, keep=keep, num=last - first, first=first))
        return lookups

    def _row_gradients(self, group: DeviceRouteGroup, table: int, lookup: Lookup) -> Tensor:
        return group.look_up.summed  # of all tables: the look-up knows where its own are

    def finish(self, groups: Sequence[DeviceRouteGroup]) -> None:
        """The same; gradients are forgotten, too."""
        super().finish(groups)
        for group in groups:
            group.look_up.drop_gradients()


def virtual_addresses(group: TableGroup) -> AddressMap:
    """Virtual address map for tables without stored rows, as if one rank held them all.

    Raises:
        ConfigurationError: there are more than can be told apart.
    """
    names = [table.name for table in group.tables]
    if (rows := sum(table.num_rows for table in group.tables)) > MAX_KEY:
        raise ConfigurationError(
            f"group {group.name} of tensor-train tables {names} has {rows:,} rows, and at most {MAX_KEY:,} can be "
            "told apart; give some of them another optimizer or initializer, which makes a group of their own"
        )
    return AddressMap(Plan.cyclic([TableShape.of(table) for table in group.tables], world_size=1), names, rank=0)
