"""DevicePart: the tables of a collection whose rows are in a device's memory, as one rank sees them.

It takes part in a collection as `rowmesh.exchange.part.Part` does. There are no replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.choice import TransportName
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.device_choice import DeviceTransport, choose_device_transport
from rowmesh.exchange.device_route import DeviceExchange, DeviceRoute, DeviceRoutePart
from rowmesh.exchange.migration import Moved
from rowmesh.exchange.route import Route, RouteGroup
from rowmesh.exchange.update import Update
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import AddressMap, Piece, Plan
from rowmesh.tables import TableGroup, Tiers


class DevicePart:
    """Groups of tables, their rows on this rank's device, and how they travel.

    Args:
        device: of this rank.
        mesh: all ranks.
        plan: of all tables, for all ranks.
        replicas: 1.
        groups: of the collection.
        indices: numbers of those that are here.
        transport: how rows travel.
        synchronization: of replicas, of which there are none.
        common: counts what serves all groups.
        tiers: None.

    Attributes: those of `Part`.
    """

    averages = False

    def __init__(
        self,
        device: torch.device,
        mesh: Mesh,
        plan: Plan,
        replicas: int,
        groups: Sequence[TableGroup],
        indices: Sequence[int],
        transport: TransportName,
        synchronization: Synchronization,
        common: CommonCounters,
        tiers: Tiers | None = None,
    ) -> None:
        assert replicas == 1
        self.mesh, self.plan, self.replicas, self.indices = mesh, plan, replicas, list(indices)
        self.device, self._groups = device, [groups[index] for index in indices]
        self.transport: DeviceTransport = choose_device_transport(transport, mesh, device)
        self.reason = self.transport.reason
        self.transport.common = common
        self.exchanges: list[DeviceExchange] = []

    def allocate(self) -> None:
        """Makes room for the rows that this rank holds.

        Raises:
            ConfigurationError: a rank would hold more rows than can be told apart.
            MemoryError: there is no room.
        """
        self.exchanges = []
        for group in self._groups:
            address_map = AddressMap(self.plan, [table.name for table in group.tables], self.mesh.rank)
            rows = self.transport.make_rows(group, address_map.num_slots)
            self.exchanges.append(DeviceExchange(group, address_map, self.device, rows))

    def connect(self) -> None:
        """Makes ranks known to each other, when all rows have their values. Collective."""
        self.transport.connect(self.exchanges)

    @property
    def title(self) -> str:
        """What it holds, for people."""
        return f"tables on {self.device}"

    @property
    def transport_name(self) -> str:
        """Of the transport."""
        return self.transport.name

    def fill_from(self, before: Any) -> Moved:
        """Not possible: rows would leave the device."""
        raise ConfigurationError(f"rows on {self.device} cannot migrate; load a checkpoint under the other plan")

    @property
    def num_bytes(self) -> int:
        """Of what is kept; other buffers are those of torch's allocator."""
        return self.transport.num_bytes

    def fetch(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Brings the rows of a batch within reach. Collective."""
        assert isinstance(route, DeviceRoute)
        self.transport.fetch(DeviceRoutePart(route, self.indices), meanwhile)

    def push(self, routes: Sequence[Any], lrs: Sequence[float], step: int) -> None:
        """Sends gradients to the owners, which update. Collective.

        Args:
            routes: with gradients.
            lrs: of all groups of the collection.
            step: which update this is, from 1.
        """
        scaling = 1.0 / self.mesh.world_size  # the mean over ranks, as DistributedDataParallel takes it
        mine = [DeviceRoutePart(route, self.indices) for route in routes]
        self.transport.push(mine, [Update(lrs[index], scaling, step) for index in self.indices])
        for group in (group for route in mine for group in route.groups):
            group.gradients = None  # may be large, and the route may live on

    def synchronize(self) -> None:
        """There are no replicas."""

    def forget(self) -> None:
        """Somebody sets rows: there are no replicas to differ from."""

    def settle_own(self) -> None:
        """Rows are always up to date."""

    def share(self, piece: Piece) -> Piece:
        """What this rank answers for: all that it holds."""
        return piece

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.transport.barrier()

    def close(self) -> None:
        """Gives back what the transport holds."""
        self.transport.close()
