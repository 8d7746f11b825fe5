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
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.route import GroupExchange, Routed, RouteGroup
from rowmesh.exchange.update import Update
from rowmesh.exchange.workspace import Outbox
from rowmesh.ops.memory import Memory
from rowmesh.ops.merge_update import Merger


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

    def fetch(self, route: Routed, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Brings the route's rows within reach; calls `meanwhile` for each group while its rows travel."""
        ...

    def push(self, routes: Sequence[Routed], updates: Sequence[Update], step: Step) -> None:
        """Sends the gradients of routes to the owners, which update their rows.

        Raises:
            ConfigurationError: ranks have different learning rates in this step; on all alike.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of this rank that messages need, beside what batches hold."""
        ...

    def barrier(self) -> None:
        """Waits for all ranks."""
        ...

    def close(self) -> None:
        """Gives back what the transport holds."""
        ...


class Sources:
    """The lists of requests that a rank merges, in the order of the ranks.

    Args:
        exchange: the group's.
        merger: holds what is merged; default: the group's own.
    """

    __slots__ = ("_exchange", "_keep", "_lists", "_merger", "_node_ends", "accesses", "num_entries")

    def __init__(self, exchange: GroupExchange, merger: Merger | None = None) -> None:
        self._exchange = exchange
        self._merger = merger or exchange.merger
        self._lists: list[tuple[int, int, int]] = []
        self._node_ends: list[int] = []
        self._keep: list[np.ndarray] = []
        self.num_entries = 0
        self.accesses = np.zeros(exchange.num_segments, np.int64)

    def add(self, slots: int, offsets: np.ndarray, gradients: int, accesses: np.ndarray | None) -> None:
        """One rank's requests: `offsets` int64 `[S′ + 1]` into lists that begin at the two addresses."""
        self._lists.append((slots, offsets.ctypes.data, gradients))
        self.num_entries += int(offsets[-1]) - int(offsets[0])
        if accesses is not None:
            self.accesses += accesses

    def add_own(self, group: RouteGroup) -> None:
        """The requests this rank makes of itself."""
        outbox, rank = group.workspace.outbox, group.exchange.rank
        slots = outbox.lists.address + outbox.slots_offset
        self.add(slots, outbox.segment_offsets[rank], outbox.gradients.address, outbox.accesses[rank])

    def add_copied(self, slots: int, offsets: np.ndarray, gradients: int) -> None:
        """What one rank asks of the homes elsewhere about rows that have a copy here; `offsets` int64 `[W, S′ + 1]`."""
        clipped = np.maximum(offsets, offsets[:, self._exchange.copies.start, None])
        sizes = clipped[:, -1] - clipped[:, 0]
        sizes[self._exchange.rank] = 0
        begin, stride = clipped.ctypes.data, clipped.strides[0]
        self._lists += [(slots, begin + stride * stop, gradients) for stop in np.flatnonzero(sizes).tolist()]
        self._keep.append(clipped)
        self.num_entries += int(sizes.sum())

    def end_node(self) -> None:
        """What is added next comes from the next node."""
        self._node_ends.append(self.num_entries)

    def merge(self) -> None:
        """Finds the distinct slots."""
        self._merger(self._lists, self._exchange.gradient_bytes, self.num_entries, self._node_ends)

    def apply(self, update: Update, num_segments: int | None = None) -> None:
        """Updates the merged rows, of the first segments where a number is given."""
        part = None
        if num_segments is not None:
            part = (0, int(self._merger.merged_offsets[num_segments]))
        self._exchange.apply(self._merger, update, part)

    def count(self, num_segments: int | None = None) -> None:
        """Counts what was asked of this rank, of the first segments where a number is given."""
        offsets = self._merger.merged_offsets
        if num_segments is not None:
            offsets = np.minimum(offsets, offsets[num_segments])
        self._exchange.counters.count_tables(self.accesses, offsets)
