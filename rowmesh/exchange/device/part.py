"""DevicePart: the tables of a collection that have equally many replicas, their rows in a device's memory, as one rank
sees them.

Of which ranks a replica group is, and when replicas are told what, is the same wherever rows are, see
`rowmesh.exchange.part`. How rows travel, and what is told, differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rowmesh.exchange.choice import TransportName
from rowmesh.exchange.device.choice import choose_device_transport
from rowmesh.exchange.device.route import DeviceExchange, DeviceRoute, DeviceRoutePart
from rowmesh.exchange.device.tiered import DeviceTieredExchange
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.part import Part
from rowmesh.exchange.replica_sync import ReplicaSync, make_synchronizer
from rowmesh.exchange.route import Route
from rowmesh.mesh import Mesh
from rowmesh.mesh.grid import Grid
from rowmesh.placement import AddressMap, Plan
from rowmesh.tables import DenseArena, TableGroup


class DevicePart(Part):
    """Some groups of tables, their rows on this rank's device, and how they travel.

    Args:
        device: of this rank.
        arguments: those of `Part`.

    Attributes: those of `Part`.
    """

    exchanges: list[DeviceExchange]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, device: torch.device, *arguments: Any) -> None:
        self.device = device
        super().__init__(*arguments)

    def _make_transport(self, name: TransportName, mesh: Mesh, grid: Grid) -> tuple[Any, str]:
        if self._tiers is not None:
            self._check_tiers()
        transport = choose_device_transport("collective" if self._tiers else name, self.mesh, self.device)
        if self._tiers is not None and name == "one_sided":
            transport.reason += "; not one_sided: owners bring the rows that they are asked for into fast memory"
        parts = (part for table in self.plan.tables for part in table.ranges)
        if self.plan.num_nodes > 1 and any(part.two_hop for part in parts):
            transport.reason += "; rows planned for two hops go in one"
        return transport, transport.reason

    def _make_exchange(self, group: TableGroup) -> Any:
        address_map = AddressMap(one_hop(self.plan), [table.name for table in group.tables], self.mesh.rank)
        num_slots = address_map.num_slots[self.mesh.rank]
        if self._tiers is not None:
            arena = self._tiers.make_arena(group, num_slots, self.mesh.rank, self.device)
            return DeviceTieredExchange(group, address_map, arena)
        rows = self.transport.make_rows(group, address_map.num_slots)
        arena = DenseArena(group, num_slots, self.device, rows)
        return DeviceExchange(group, address_map, arena, asks_homes=self.transport_name != "one_sided")

    def _make_synchronizer(self, column: Mesh) -> ReplicaSync:
        return make_synchronizer(self._setting, self.exchanges, column, self.device)

    @property
    def title(self) -> str:
        """What it holds, for people."""
        return f"{super().title} on {self.device}"

    def push(self, routes: Sequence[Any], step: Step) -> None:
        """Sends gradients to the owners, which update; what replicas tell each other arrives by `settle`. Collective.

        Args:
            routes: with gradients.
            step: of all groups of the collection.
        """
        super().push(routes, step)
        for group in (route.groups[index] for route in routes for index in self.indices):
            group.gradients = None  # may be large, and the route may live on

    def _mine(self, route: Route) -> Any:
        assert isinstance(route, DeviceRoute)
        return DeviceRoutePart(route, self.indices)


def one_hop(plan: Plan) -> Plan:
    """The plan with all rows asked for in one hop, which devices take everywhere: it holds them at the same places."""
    return replace(
        plan,
        tables=tuple(
            replace(table, ranges=tuple(replace(part, two_hop=False) for part in table.ranges)) for table in plan.tables
        ),
    )
