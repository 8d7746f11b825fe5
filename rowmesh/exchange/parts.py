"""Parts: all tables of a collection, by how many replicas they have under one plan, or as cores under none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.choice import TransportName
from rowmesh.exchange.cores import CorePart
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.migration import Moved
from rowmesh.exchange.part import Part
from rowmesh.exchange.route import Route, RouteGroup
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.mesh.waiting import barrier, gather_objects
from rowmesh.placement import Plan
from rowmesh.tables import TableGroup, Tiers

CORES_ON_HOST = partial(CorePart, None)


class Parts:
    """A `Part` for each number of replicas, and a `CorePart` for all tensor-train tables.

    Making them is collective, as are `allocate` and `connect`, which follow.

    Args:
        mesh: all ranks.
        plan: of all tables with rows.
        groups: of tables that have equally many replicas, or are tensor-train tables.
        transport: how rows travel within a replica group, and gradients of cores between all ranks.
        synchronization: how replicas are kept together.
        tiers: where rows of tiered tables are.
        common: counts what serves all groups.
        make_part: makes a part with rows.
        make_core_part: makes that of the tensor-train tables.
    """

    def __init__(
        self,
        mesh: Mesh,
        plan: Plan,
        groups: Sequence[TableGroup],
        transport: TransportName,
        synchronization: Synchronization,
        tiers: Tiers,
        common: CommonCounters,
        make_part: Callable[..., Part] = Part,
        make_core_part: Callable[..., CorePart] = CORES_ON_HOST,
    ) -> None:
        self._mesh, self._plan = mesh, plan
        replicas = plan.replicas
        indices: dict[tuple[str, int], list[int]] = {}
        of_cores: list[int] = []
        for index, group in enumerate(groups):
            if group.storage == "tensor_train":
                of_cores.append(index)
            else:
                indices.setdefault((group.storage, replicas[group.tables[0].name]), []).append(index)
        how = (transport, synchronization, common)
        self.parts: list[Part | CorePart] = []
        try:
            for (storage, count), chosen in sorted(indices.items()):
                of_tiers = tiers if storage == "tiered" else None
                self.parts.append(make_part(mesh, plan, count, groups, chosen, *how, of_tiers))
            if of_cores:
                self.parts.append(make_core_part(mesh, groups, of_cores, transport, common))
        except BaseException:
            self.close()
            raise

    def allocate(self, outcome: str = "") -> None:
        """Makes room for the rows of this rank.

        Args:
            outcome: the end of the message.

        Raises:
            ConfigurationError: on all ranks alike, where one would hold more rows than can be told apart, or cannot
                make the file of a tiered table; names it.
            MemoryError: on all ranks alike, where one has no room; names it.
        """
        obstacle: tuple[str, str] | None = None
        try:
            for part in self.parts:
                part.allocate()
        except ConfigurationError as error:
            obstacle = "configuration", str(error)
        except (MemoryError, OSError) as error:  # anonymous memory fails with the second
            obstacle = "memory", str(error)
        for rank, theirs in enumerate(gather_objects(self._mesh, obstacle, "making room for rows")):
            if theirs is None:
                continue
            kind, text = theirs
            if kind == "configuration":
                raise ConfigurationError(f"rank {rank}: {text}")
            raise MemoryError(
                f"rank {rank} has no room for the {self._plan.memory_bytes[rank]:,} bytes of rows and optimizer "
                f"state that the plan gives it: {text}{outcome}"
            )

    def connect(self) -> None:
        """Makes ranks known to each other, when all rows have their values."""
        for part in self.parts:
            part.connect()

    def fill_from(self, old: Parts) -> list[Moved]:
        """Copies all rows and states from those of another plan. Collective; returns what came to this rank."""
        return [after.fill_from(cast("Any", before)) for before, after in zip(old.parts, self.parts, strict=True)]

    @property
    def exchanges(self) -> list[GroupExchange]:
        """Of all groups, in their order."""
        pairs = [pair for part in self.parts for pair in zip(part.indices, part.exchanges, strict=True)]
        return [exchange for _, exchange in sorted(pairs, key=lambda pair: pair[0])]

    @property
    def transport(self) -> str:
        """The transport's name; several joined by "+"."""
        return "+".join(dict.fromkeys(part.transport_name for part in self.parts))

    @property
    def reason(self) -> str:
        """Why that one."""
        if len({part.reason for part in self.parts}) == 1:
            return self.parts[0].reason
        return "; ".join(f"{part.title}: {part.reason}" for part in self.parts)

    @property
    def averages(self) -> bool:
        """Whether some replicas differ between two averages."""
        return any(part.averages for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(part.num_bytes for part in self.parts)

    def find(self, table: str) -> tuple[Part | CorePart, GroupExchange, int]:
        """Where a table is: its part, its group, its number there; what this rank holds of it is up to date.

        Raises:
            KeyError: there is no such table.
        """
        for part in self.parts:
            for exchange in part.exchanges:
                for number, spec in enumerate(exchange.group.tables):
                    if spec.name == table:
                        part.settle_own()
                        return part, exchange, number
        names = [spec.name for exchange in self.exchanges for spec in exchange.group.tables]
        raise KeyError(f"no table {table!r}; there are {names}")

    def fetch(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Brings the rows of a route within reach. Collective; one at a time. `compute` must follow."""
        for part in self.parts:
            if not isinstance(part, CorePart):
                part.fetch(route, meanwhile)

    def compute(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Computes the rows of a route that are nowhere, on this rank."""
        for part in self.parts:
            if isinstance(part, CorePart):
                part.fetch(route, meanwhile)

    @property
    def is_behind(self) -> bool:
        """Whether rows change by `settle`, before they can be looked up."""
        return any(part.is_behind for part in self.parts)

    def settle(self) -> None:
        """Brings the rows of this rank's replica groups up to date. Collective."""
        for part in self.parts:
            if not isinstance(part, CorePart):
                part.settle()

    def push(self, routes: Sequence[Route], step: Step) -> None:
        """Sends gradients to the owners, which update. Collective."""
        for part in self.parts:
            part.push(routes, step)

    def synchronize(self) -> None:
        """Makes replicas equal now. Collective."""
        for part in self.parts:
            part.synchronize()

    def forget(self) -> None:
        """Takes the rows of this rank, which somebody sets, as equal to those of other replicas."""
        for part in self.parts:
            part.forget()

    def barrier(self) -> None:
        """Waits for all ranks, whose rows are then up to date."""
        for part in self.parts:
            part.barrier()
        if any(part.replicas > 1 for part in self.parts):  # those waited for their own replica group alone
            barrier(self._mesh, "waiting at a barrier")

    def close(self) -> None:
        """Gives back what transports hold."""
        for part in self.parts:
            part.close()
