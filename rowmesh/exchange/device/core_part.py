"""DeviceCorePart: the tensor-train tables of a collection whose cores are in a device's memory, on every rank.

As on a CPU (`rowmesh.exchange.core_part`): rows are computed where they are looked up, and on several ranks the
gradients of all cores are added up in one fused vector, in the order of the ranks. All that is long stays on the
device; the host waits for nothing but what [Note: what the host waits for] in `rowmesh.exchange.devices` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rowmesh.exchange.core_part import CorePart, Fetched, core_map
from rowmesh.exchange.core_sums import CollectiveSums, CoreSums
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.device.checks import Unread, check_everywhere, count_unique
from rowmesh.exchange.device.route import (
    DeviceGroupExchange,
    DevicePooledGroup,
    DeviceRoute,
    DeviceRoutePart,
    table_bounds,
)
from rowmesh.exchange.handshake import Handshake, Step
from rowmesh.exchange.layout import GroupLayout
from rowmesh.exchange.route import Route, RouteGroup
from rowmesh.exchange.transports import TransportName
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.tables import TableGroup
from rowmesh.tensor_train.device_arena import DeviceCoreArena
from rowmesh.tensor_train.device_lookup import DeviceLookup

if TYPE_CHECKING:
    from rowmesh.ops.pool.cuda import Bags
    from rowmesh.ops.segment_unique.cuda import Unique


class DeviceCoreGroup(DevicePooledGroup):
    """One group's part of a route whose rows are computed from cores.

    Attributes:
        source: the rows of the unique ids, in their order.
        fetched: how they were computed; None before that, and after they were updated.
    """

    def __init__(
        self, exchange: DeviceCoreExchange, layout: GroupLayout, bags: Bags | None, unique: Unique
    ) -> None:  # fmt: skip
        super().__init__(exchange, layout, bags, unique)
        self.fetched: Fetched | None = None


class DeviceCoreExchange(DeviceGroupExchange):
    """What stays the same from batch to batch for one group of tensor-train tables.

    Args:
        group: the tables.
        device: where.
    """

    def __init__(self, group: TableGroup, device: torch.device) -> None:
        super().__init__(group, core_map(group), device)
        self.arena = DeviceCoreArena(group, device)

    def route(self, ids: Tensor, offsets: Tensor, layout: GroupLayout, bags: Bags | None) -> DeviceCoreGroup:
        """Finds the unique ids; arguments as for `DeviceExchange.route`."""
        return DeviceCoreGroup(self, layout, bags, self.unique(ids, offsets))

    def fetch(self, group: DeviceCoreGroup, version: int) -> None:
        """Computes the rows of a batch's distinct ids."""
        group.source = torch.empty(group.num_unique, self.group.dim, dtype=self.group.dtype, device=self.device)
        sizes = [end - begin for begin, end in pairwise(table_bounds(self.group, group.layout))]
        group.fetched = Fetched([self._look_up(group, table, size) for table, size in enumerate(sizes)], version)

    def _look_up(self, group: DeviceCoreGroup, table: int, size: int) -> DeviceLookup:
        """Computes the rows of one table, of which the batch has `size` ids; the device knows how many distinct ones.

        The unique ids of a table do not begin behind where its ids do, so that so many can be read from there.
        """
        unique = group.unique
        first, end = unique.offsets[table : table + 1], unique.offsets[table + 1 : table + 2]
        ids = unique.unique.index_select(0, first + torch.arange(size, device=self.device))
        return self.arena.look_up(table, ids, end - first, first, group.source, keep=torch.is_grad_enabled())

    def gradients(
        self, groups: Sequence[DeviceCoreGroup], table: int, version: int
    ) -> tuple[DeviceLookup, Tensor] | None:  # fmt: skip
        """The distinct ids of a table in all batches, and the gradients of their rows; None where there are no ids."""
        taken = []
        for group in groups:
            assert group.fetched is not None
            lookup = group.fetched.lookups[table]
            if not lookup.num_unique:
                continue
            if group.fetched.version != version:
                lookup.release_products()  # gradients go through the cores as they are now
            taken.append((lookup, group.summed))
        if len(taken) < 2:
            return taken[0] if taken else None
        return DeviceLookup.merged(taken)

    def finish(self, groups: Sequence[DeviceCoreGroup]) -> None:
        """Counts what was asked for; forgets what only the update needed: it may be large, and routes may live on."""
        for group in groups:
            self.count_alone(group)
            group.fetched = group.gradients = None


class DeviceCorePart(CorePart):
    """Groups of tensor-train tables on one rank's device.

    Args:
        device: of this rank.
        mesh: all ranks.
        groups: of the collection.
        indices: numbers of those with tensor-train tables.
        transport: of rows, of which there are none: sums are always made by messages.
        common: counts the messages.

    Attributes: those of `CorePart`.
    """

    def __init__(
        self,
        device: torch.device,
        mesh: Mesh,
        groups: Sequence[TableGroup],
        indices: Sequence[int],
        transport: TransportName,
        common: CommonCounters,
    ) -> None:
        super().__init__(mesh, groups, indices, "collective", common)
        self.device, self.reason = device, f"there is one rank, on {device}"
        self._channel: Channel | None = None
        if mesh.world_size > 1:
            self._channel = Channel.between_devices(mesh, device)
            self.reason = self._channel.reason
            if transport == "one_sided":
                self.reason += "; not one_sided: devices add gradients of cores up by messages"
        # Where there are dense tables, their messages bring what ranks must know of each other.
        self._compares = mesh.world_size > 1 and len(indices) == len(groups)
        self._unread = Unread(mesh.name(mesh.rank))
        self._num_fetches = self._num_pushes = 0

    def allocate(self) -> None:
        """Makes room for the cores.

        Raises:
            MemoryError: there is none.
        """
        self.exchanges = cast("Any", [DeviceCoreExchange(group, self.device) for group in self._groups])

    def connect(self) -> None:
        """Makes ranks known to each other. Collective."""
        super().connect()
        if self._compares:
            hosts = Channel.between_hosts(self.mesh)
            self._handshake = Handshake(self.mesh, hosts, 2, self._common)

    def _make_sums(self, size: int, dtype: torch.dtype) -> CoreSums | None:
        if self._channel is None:
            return None
        return CollectiveSums(self.mesh, self._channel, size, dtype, self._common, self.device)

    def fetch(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Computes the rows of this rank's distinct ids; no communication but to compare what ranks do.

        Raises:
            IdRangeError: a batch of this rank has ids that are no rows.
            PeerError: one of another rank has.
        """
        assert isinstance(route, DeviceRoute)
        self._look_at(DeviceRoutePart(route, self.indices))
        super().fetch(route, meanwhile)

    def _look_at(self, route: DeviceRoutePart) -> None:
        """Sees to it that ids which are no rows are noticed."""
        self._unread.read()
        if self._compares:
            self._compare(route)
            return
        self._unread.add(route)
        if not torch.is_grad_enabled():  # perhaps nothing comes that would look later
            self._unread.read()

    def _compare(self, route: DeviceRoutePart) -> None:
        """All ranks learn which of them refuse their batch; the host waits for this rank's numbers."""
        self._num_fetches += 1
        unique = [group.unique.num_unique for group in route.groups]
        refused, *numbers = torch.cat([route.refused, route.outside, *unique]).tolist()
        self._handshake.numbers[:, 1] = refused
        everyone = self._handshake(self._num_fetches)[:, 1].tolist()
        check_everywhere(route, self.mesh, numbers[: len(route.outside)], everyone)
        for group, count in zip(route.groups, numbers[len(route.outside) :], strict=True):
            count_unique(group, [count])

    def push(self, routes: Sequence[Route], step: Step) -> None:
        """Updates the cores by the gradients of all ranks. Collective; arguments as on a CPU."""
        self._unread.read()
        if self._compares:
            self._num_pushes += 1
            self._handshake(-self._num_pushes, step)
        super().push(routes, step)

    def _tell(self, vector: Tensor, step: Step) -> None:
        """Hosts compare what they do."""

    def _check_told(self, total: Tensor, step: Step) -> None:
        """They have."""

    def barrier(self) -> None:
        """Waits for all ranks, and for what their devices do; says what is wrong with batches not looked at yet."""
        self._unread.read()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        super().barrier()

    def close(self) -> None:
        """Gives back what is held for other ranks."""
        self._unread.clear()
        super().close()
