"""Local transport: one rank, whose rows are read and updated in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.route import GroupExchange, Routed, RouteGroup
from rowmesh.exchange.tiered import TieredExchange
from rowmesh.exchange.transport import Sources
from rowmesh.exchange.update import Update
from rowmesh.exchange.workspace import Outbox, private_outbox
from rowmesh.ops.memory import Buffer, Memory


class LocalTransport:
    """One rank: rows are read and updated in place."""

    name = "local"

    def __init__(self) -> None:
        self.common = CommonCounters()

    def allocate(self, num_bytes: int) -> Memory:
        """Private memory."""
        return Buffer(num_bytes)

    def make_outbox(self, num_segments: int) -> Outbox:
        """Private memory."""
        return private_outbox(1, num_segments)

    def connect(self, exchanges: Sequence[GroupExchange]) -> None:
        """Nobody to connect to."""
        self._exchanges = exchanges

    def fetch(self, route: Routed, meanwhile: Callable[[RouteGroup], None]) -> None:
        """All rows are here; those of tiered tables are brought into fast memory."""
        for group in route.groups:
            if isinstance(group.exchange, TieredExchange):
                group.exchange.bring_own(group)

    def push(self, routes: Sequence[Routed], updates: Sequence[Update], step: Step) -> None:
        """Merges the routes' gradients and updates."""
        for index, (exchange, update) in enumerate(zip(self._exchanges, updates, strict=True)):
            sources = Sources(exchange)
            for route in routes:
                sources.add_own(route.groups[index])
            if sources.num_entries:
                sources.merge()
                sources.apply(update)
                sources.count()

    @property
    def num_bytes(self) -> int:
        """No messages."""
        return 0

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to give back."""
