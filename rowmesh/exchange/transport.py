"""Transport: the contract between routing and the wires.

    fetch(route)   afterwards every `addresses[u]` of every group can be read
    push(routes)   owners merge the gradients of all ranks and update their rows

Both are collective: every rank calls them equally often and in the same order, or all ranks get a PeerError that says
who did what. The routes that ranks push need not be the same, nor as many: a rank whose loss did not use a look-up has
none to push, and adds nothing.

All transports give the same results to the bit: requests are merged in the order of the ranks by one kernel, whatever
brought them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.route import GroupExchange, Route, RouteGroup
from rowmesh.exchange.workspace import Outbox
from rowmesh.ops.memory import Memory


class Transport(Protocol):
    """How rows and gradients reach other ranks.

    Attributes:
        name: as it is asked for.
        common: what the messages that serve all groups moved.
    """

    name: str
    common: CommonCounters

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
        exchange.counters.count_tables(self.accesses, exchange.merger.merged_offsets)
