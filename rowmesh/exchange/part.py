"""Part: the tables of a collection that have equally many replicas, as one rank sees them.

Rows travel within this rank's replica group, by a transport of its own; replicas are kept together along its column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.choice import TransportName, choose_transport
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.migration import Moved, move_rows
from rowmesh.exchange.replica_sync import ReplicaSync, make_synchronizer
from rowmesh.exchange.route import GroupExchange, Route, Routed, RouteGroup, RoutePart
from rowmesh.exchange.tiered import TieredExchange
from rowmesh.exchange.update import Update
from rowmesh.mesh import Mesh
from rowmesh.mesh.grid import Grid
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import AddressMap, Piece, Plan
from rowmesh.tables import DenseArena, TableGroup, Tiers


class Part:
    """Some groups of tables, their rows on this rank, and how they travel.

    Making one is collective and so is `connect`, which must follow.

    Args:
        mesh: all ranks.
        plan: of all tables, for all ranks.
        replicas: M of these tables.
        groups: them.
        indices: their numbers in the collection.
        transport: how rows travel within a replica group.
        synchronization: how replicas are kept together.
        common: counts what serves all groups.
        tiers: where rows are, of tiered tables.

    Attributes:
        mesh: the ranks of this rank's replica group.
        plan: of these tables, for those ranks.
        transport: between them.
        reason: why that transport.
        exchanges: of the groups, in their order; made by `allocate`.
        indices: their numbers in the collection.
        is_behind: whether rows of this replica group change until the next look-up, by `settle`.
    """

    def __init__(
        self,
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
        grid = plan.grid(replicas)
        self.replicas, self.plan, self.indices = replicas, plan.part(replicas), list(indices)
        self._replica = grid.place(mesh.rank)[0]
        self.mesh = mesh.part(grid.groups, grid.ranks_per_node(plan.ranks_per_node))
        self._column = mesh.part(grid.columns) if replicas > 1 else None
        self._groups, self._setting = [groups[index] for index in indices], synchronization
        self._world_size = mesh.world_size
        self._tiers = tiers
        self.transport, self.reason = self._make_transport(transport, mesh, grid)
        self.transport.common = common
        self.exchanges: list[GroupExchange] = []
        self.synchronizer: ReplicaSync | None = None
        self.is_behind = False

    def _make_transport(self, name: TransportName, mesh: Mesh, grid: Grid) -> tuple[Any, str]:
        """The transport within the replica group, and why that one; makes what keeps replicas together beside it."""
        self._second = None
        if self.replicas == 2 and len(grid.columns) > 1:  # groups are known by the order in which ranks are named
            self._second = mesh.subgroup([column[::-1] for column in grid.columns])
        if self._tiers is not None:
            self._check_tiers()
        name = _common("collective" if self._tiers is not None else name, mesh, grid)
        transport, reason = choose_transport(name, self.mesh, len(self._groups))
        if self._tiers is not None:
            reason = "owners bring the rows that they are asked for into fast memory"
        return transport, reason

    def allocate(self) -> None:
        """Makes room for the rows that this rank holds.

        Raises:
            ConfigurationError: a rank would hold more rows than can be told apart.
            MemoryError, OSError: there is no room.
        """
        self.exchanges = [self._make_exchange(group) for group in self._groups]

    def _make_exchange(self, group: TableGroup) -> GroupExchange:
        try:
            address_map = AddressMap(self.plan, [table.name for table in group.tables], self.mesh.rank)
        except ConfigurationError as error:
            raise ConfigurationError(f"group {group.name} of {error}") from error
        make_outbox = partial(self.transport.make_outbox, address_map.num_segments)
        num_slots = address_map.num_slots[self.mesh.rank]
        if self._tiers is not None:
            arena = self._tiers.make_arena(group, num_slots, self.mesh.rank)
            return TieredExchange(group, address_map, arena, make_outbox)
        memory = self.transport.allocate(num_slots * group.dim * group.dtype.itemsize)
        rows = memory.tensor(group.dtype, num_slots, group.dim)
        return GroupExchange(group, address_map, DenseArena(group, num_slots, rows=rows), make_outbox)

    def _check_tiers(self) -> None:
        """Raises ConfigurationError where these tables have copies of rows, which tiers could not keep equal."""
        names = [table.name for group in self._groups for table in group.tables]
        copied = [
            table.shape.name
            for table in self.plan.tables
            if table.shape.name in names
            and any(part.rule not in ("dealt", "fixed") or part.two_hop for part in table.ranges)
        ]
        if self.replicas > 1 or copied:
            raise ConfigurationError(
                f"tiered tables {copied or names} have replicas or copied rows; give them one replica and a plan "
                "that deals rows (leave placement.plan and placement.strategy out), or storage='dense'"
            )

    def connect(self) -> None:
        """Makes ranks known to each other, when all rows have their values. Collective."""
        self.transport.connect(self.exchanges)
        if self._column is not None:
            self.synchronizer = self._make_synchronizer(self._column)

    def _make_synchronizer(self, column: Mesh) -> ReplicaSync:
        return make_synchronizer(self._setting, self.exchanges, column, second=self._second)

    @property
    def title(self) -> str:
        """What it holds, for people."""
        return f"tables of {self.replicas} replica(s)"

    @property
    def transport_name(self) -> str:
        """Of the transport."""
        return self.transport.name

    def fill_from(self, before: Part) -> Moved:
        """Copies all rows and states from those of another plan. Collective; returns what came to this rank."""
        return move_rows(before.exchanges, self.exchanges, self.mesh)

    @property
    def scaling(self) -> float:
        """What summed gradients are multiplied by: the mean over ranks, as DistributedDataParallel takes it.

        Over all ranks where their gradients are summed, over those of the replica group where groups update for
        themselves.
        """
        return 1.0 / (self.mesh.world_size if self.averages else self._world_size)

    @property
    def averages(self) -> bool:
        """Whether replicas differ between two averages."""
        return self.synchronizer is not None and self._setting.mode == "average"

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        own = 0 if self.synchronizer is None else self.synchronizer.num_bytes
        return own + self.transport.num_bytes + sum(exchange.num_bytes for exchange in self.exchanges)

    def fetch(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Brings the rows of these groups within reach. Collective."""
        self.settle()
        self.transport.fetch(self._mine(route), meanwhile)

    def push(self, routes: Sequence[Route], step: Step) -> None:
        """Sends gradients to the owners, which update; what replicas tell each other arrives by `settle`. Collective.

        Args:
            routes: with gradients.
            step: of all groups of the collection.
        """
        self.settle()
        updates = self.updates(step)
        self.transport.push([self._mine(route) for route in routes], updates, step)
        self.tell_replicas(updates, step)

    def updates(self, step: Step) -> list[Update]:
        """How the rows of these groups change."""
        rates = [step.rates[index] for index in self.indices]
        return [Update(rate.lr, self.scaling * rate.factor, step.number) for rate in rates]

    def tell_replicas(self, updates: Sequence[Update], step: Step) -> None:
        """Tells the other replicas, if that is due, what was pushed; theirs arrives by `settle`. Collective."""
        if self.synchronizer is not None:
            self.is_behind = self.synchronizer.begin(updates, step)

    def synchronize(self) -> None:
        """Makes replicas equal now, if they are only averaged now and then. Collective."""
        self.settle()
        if self.averages:
            assert self.synchronizer
            self.transport.barrier()  # ranks of this group may still read the rows that are about to change
            self.synchronizer.start()
            self.is_behind = True
            self.settle()

    def forget(self) -> None:
        """Takes the rows of this rank, which somebody sets, as equal to those of the other replicas."""
        self.settle_own()
        if self.synchronizer is not None:
            self.synchronizer.forget()

    def settle(self) -> None:
        """Brings the rows of this replica group up to date. Collective."""
        if self.synchronizer is not None and self.is_behind:
            self.synchronizer.finish()
            self.is_behind = False
            if self.transport.name == "one_sided":  # under the others, who replies with rows has settled before
                self.transport.publish()

    def settle_own(self) -> None:
        """Brings the rows that this rank holds up to date."""
        if self.synchronizer is not None:
            self.synchronizer.finish()

    def share(self, piece: Piece) -> Piece:
        """What this replica answers for of the rows that all replicas have: every row is in the share of one."""
        first, end = (len(piece.rows) * number // self.replicas for number in (self._replica, self._replica + 1))
        return Piece(piece.rows[first:end], piece.slots[first:end])

    def barrier(self) -> None:
        """Waits for all ranks of the replica group, whose rows are then up to date."""
        self.settle()
        self.transport.barrier()

    def close(self) -> None:
        """Gives back what the transport holds; rows are up to date where that needs no other rank."""
        if self.replicas == 2:
            self.settle_own()
        for exchange in self.exchanges:
            exchange.arena.close()
        self.transport.close()

    def _mine(self, route: Route) -> Routed:
        return route if len(self.indices) == len(route.groups) else RoutePart(route, self.indices)


def _common(name: TransportName, mesh: Mesh, grid: Grid) -> TransportName:
    """One transport for all replica groups, as far as it must be.

    Raises:
        ConfigurationError: one-sided was asked for, and a group is on several hosts; on all ranks.
    """
    spread = [group for group in grid.groups if len({mesh.hosts[rank] for rank in group}) > 1]
    if not spread:
        return name
    if name == "one_sided":
        raise ConfigurationError(
            f"transport 'one_sided' cannot work: ranks {list(spread[0])} hold a replica and are on several hosts; use "
            "'collective' or 'auto'"
        )
    return name if len(spread) == grid.replicas else "collective"
