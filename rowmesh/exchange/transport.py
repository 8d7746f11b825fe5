"""Transport: the contract between routing and the wires, and the choice of one.

    fetch(route)   afterwards every `addresses[u]` of every group can be read
    push(routes)   owners merge the gradients of all ranks and update their rows

Both are collective. All transports give the same results to the bit: requests are merged in the order of the ranks by
one kernel, whatever brought them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.route import GroupExchange, Route, RouteGroup
from rowmesh.exchange.workspace import Outbox, private_outbox
from rowmesh.mesh import Mesh
from rowmesh.mesh.shared_memory import is_supported
from rowmesh.ops.memory import Buffer, Memory

TransportName = Literal["auto", "collective", "one_sided"]


class Transport(Protocol):
    """How rows and gradients reach other ranks."""

    name: str

    def allocate(self, num_bytes: int) -> Memory:
        """Memory for an arena."""
        ...

    def make_outbox(self, num_segments: int) -> Outbox:
        """Memory for requests and gradients."""
        ...

    def connect(self, exchanges: Sequence[GroupExchange]) -> None:
        """Makes the arenas known to each other; collective, once, after all are initialised."""
        ...

    def fetch(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Brings the route's rows within reach; calls `meanwhile` for each group while its rows travel."""
        ...

    def push(self, routes: Sequence[Route], updates: Sequence[Update]) -> None:
        """Sends the gradients of routes to the owners, which update their rows."""
        ...

    def barrier(self) -> None:
        """Waits for all ranks."""
        ...

    def close(self) -> None:
        """Gives back what the transport holds."""
        ...


class Update:
    """The optimizer's numbers for one group and step."""

    __slots__ = ("lr", "scaling", "step")

    def __init__(self, lr: float, scaling: float, step: int) -> None:
        self.lr = lr
        self.scaling = scaling
        self.step = step


class Sources:
    """The lists of requests that an owner merges, in the order of the ranks."""

    __slots__ = ("_lists", "accesses", "num_entries")

    def __init__(self, num_segments: int) -> None:
        self._lists: list[tuple[int, int, int]] = []
        self.num_entries = 0
        self.accesses = np.zeros(num_segments, np.int64)

    def add(self, slots: int, offsets: np.ndarray, gradients: int, accesses: np.ndarray) -> None:
        """One rank's requests: `offsets` int64 `[S + 1]` into lists that begin at the two addresses."""
        self._lists.append((slots, offsets.ctypes.data, gradients))
        self.num_entries += int(offsets[-1]) - int(offsets[0])
        self.accesses += accesses

    def add_own(self, group: RouteGroup) -> None:
        """The requests this rank makes of itself."""
        outbox, rank = group.workspace.outbox, group.exchange.rank
        slots = outbox.lists.address + outbox.slots_offset
        self.add(slots, outbox.segment_offsets[rank], outbox.gradients.address, outbox.accesses[rank])

    def merge(self, exchange: GroupExchange) -> None:
        """Finds the distinct slots."""
        exchange.merger(self._lists, exchange.gradient_bytes, self.num_entries)

    def apply(self, exchange: GroupExchange, update: Update) -> None:
        """Updates the rows of a merged group."""
        exchange.arena.apply(exchange.merger, update.lr, update.scaling, update.step)
        exchange.counters.pushes += 1
        exchange.counters.count_tables(self.accesses, exchange.merger.merged_offsets)


class LocalTransport:
    """One rank: rows are read and updated in place."""

    name = "local"

    def allocate(self, num_bytes: int) -> Memory:
        """Private memory."""
        return Buffer(num_bytes)

    def make_outbox(self, num_segments: int) -> Outbox:
        """Private memory."""
        return private_outbox(1, num_segments)

    def connect(self, exchanges: Sequence[GroupExchange]) -> None:
        """Nobody to connect to."""
        self._exchanges = exchanges

    def fetch(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """All rows are here."""

    def push(self, routes: Sequence[Route], updates: Sequence[Update]) -> None:
        """Merges the routes' gradients and updates."""
        for index, (exchange, update) in enumerate(zip(self._exchanges, updates, strict=True)):
            sources = Sources(exchange.num_segments)
            for route in routes:
                sources.add_own(route.groups[index])
            if sources.num_entries:
                sources.merge(exchange)
                sources.apply(exchange, update)

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to give back."""


def choose_transport(name: TransportName, mesh: Mesh, num_groups: int) -> tuple[Transport, str]:
    """The transport for a mesh, and why.

    Raises:
        ConfigurationError: the name is unknown, or one-sided was asked for where it cannot work.
    """
    from rowmesh.exchange.collective import CollectiveTransport
    from rowmesh.exchange.one_sided import OneSidedTransport

    if name not in ("auto", "collective", "one_sided"):
        raise ConfigurationError(f"transport must be 'auto', 'collective' or 'one_sided', got {name!r}")
    if mesh.world_size == 1:
        return LocalTransport(), "there is one rank"
    obstacle = None
    if not mesh.is_one_host:
        obstacle = f"the {mesh.world_size} ranks are on {len(set(mesh.hosts))} hosts (or in separate containers)"
    elif not is_supported():
        obstacle = "this system has no memfd_create (Linux has)"
    if name == "one_sided" and obstacle:
        raise ConfigurationError(f"transport 'one_sided' cannot work: {obstacle}; use 'collective' or 'auto'")
    if name == "one_sided" or (name == "auto" and obstacle is None):
        reason = "asked for" if name == "one_sided" else f"all {mesh.world_size} ranks share a host's memory"
        return OneSidedTransport(mesh, num_groups), reason
    return CollectiveTransport(mesh), "asked for" if name == "collective" else str(obstacle)
