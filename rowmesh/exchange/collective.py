"""Collective transport: requests, rows and gradients travel as all-to-alls between the ranks.

A step has one round for the counts of all groups, for each group one for the keys, one for the rows and one for the
gradients, however many tables the group has, and before the gradients one in which ranks compare what they push. The
messages of one group travel while those of another are made. A rank's requests to itself never leave it.

A rank merges the requests that others send it, replies with the rows, and later gets their gradients in the same order.
It owns most of these rows; rows that go in two hops it relays, as the node leader.

Source: FusedRec §3, Algorithm 1, lines 4–6.
Differs: the owner's look-up and recovery (b.1, b.2) are one pass that reads each distinct row once and writes it to
every request for it; the same merge serves the update.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rowmesh._support.faults import reach
from rowmesh.errors import ConfigurationError
from rowmesh.exchange.collective_group import CollectiveGroup
from rowmesh.exchange.handshake import Handshake, Step, after_hearing
from rowmesh.exchange.host_group import HostGroupExchange, HostRouteGroup, route_of_nothing
from rowmesh.exchange.micro_batch import windows_on_hosts
from rowmesh.exchange.route import Routed, ShardGroupRoute
from rowmesh.exchange.summing import SummingExchange, SummingGroup
from rowmesh.exchange.transport import Meanwhile, Transport
from rowmesh.exchange.windows import StoredTables, WindowOptions, Windows
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.waiting import barrier
from rowmesh.tables.update_rules import Update


class CollectiveTransport(Transport[HostGroupExchange]):
    """torch.distributed over gloo."""

    name = "collective"

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._mesh = mesh
        self._everyone = Channel.between_hosts(mesh)
        self._num_fetches = self._num_pushes = 0

    def connect(self, exchanges: Sequence[HostGroupExchange]) -> None:
        """Prepares the message that opens every fetch and push, and the channels of the second hop."""
        super().connect(exchanges)
        mesh = self._mesh
        how = self._everyone, mesh.ranks_per_node, self.common
        self._groups = [
            SummingGroup(each, *how) if isinstance(each, SummingExchange) else CollectiveGroup(each, *how)
            for each in exchanges
        ]
        if any(group.needs_nodes for group in self._groups):
            between, within = _make_channels(mesh)
            for group in self._groups:
                group.connect_nodes(between, within)
        self._copied = [group for group in self._groups if group.has_copies]
        # To each rank: which fetch (above 0) or push (below 0) this is; then the counts, or what is pushed, and of how
        # many copied rows this rank will have sums, group by group.
        width = 1 + sum(group.num_columns for group in self._groups)
        self._handshake = Handshake(mesh, self._everyone, width, self.common)
        self.barrier()

    def windows(self, tables: StoredTables, options: WindowOptions) -> Windows:
        """See `Transport.windows`."""
        return windows_on_hosts(tables, options, self._exchanges, self.common)

    def fetch(self, route: Routed, meanwhile: Meanwhile) -> None:
        """Sends requests to the owners and receives their rows."""
        self._num_fetches += 1
        self._exchange_counts(route.groups)
        pairs = list(zip(self._groups, route.groups, strict=True))
        keys = [messages.post_keys(group) for messages, group in pairs]
        rows = [messages.post_rows(group, message) for (messages, group), message in zip(pairs, keys, strict=True)]
        for group in route.groups:
            meanwhile(group)
        for message in rows:
            message.wait()

    def _exchange_counts(self, groups: Sequence[HostRouteGroup]) -> None:
        pairs = [*zip(self._groups, groups, strict=True)]
        mine = [numbers for messages, group in pairs for numbers in messages.counts(group)]
        counts, column = self._handshake(self._num_fetches, None, mine), 1
        for messages, group in pairs:
            messages.expect(group, counts[:, column : column + messages.num_columns])
            column += messages.num_columns

    def prepare(self, routes: Sequence[Routed], updates: Sequence[Update], step: Step) -> None:
        """Merges the requests of all ranks for these routes, as far as this rank has them, and pins their rows."""
        for messages, groups in zip(self._groups, self._by_group(routes), strict=True):
            messages.prepare(groups)
        self._pushed = routes, updates, step

    def _by_group(self, routes: Sequence[Routed]) -> list[list[HostRouteGroup]]:
        """The parts of some routes that are trained, group by group."""
        frozen = [messages.exchange.is_frozen for messages in self._groups]
        return [[] if frozen[index] else [route.groups[index] for route in routes] for index in range(len(frozen))]

    def agree(self, step: Step, refusal: Exception | None) -> Exception | None:
        """Compares what ranks push, and whether they can; makes them push the same routes."""
        self._num_pushes += 1
        routes = () if refusal is not None or self._pushed is None else self._pushed[0]
        mine = [len(routes), hash(tuple([route.number for route in routes]))]
        refusal, pushed = self._compare(step, refusal, mine)
        if refusal is None and pushed.count(mine) != len(pushed):
            refusal = self._align(max(count for count, _ in pushed))
        if refusal is None and any(self._sums_growing()):
            refusal = self._grow(step)
        if refusal is not None:
            self._num_pushes -= 1
        return refusal

    def _compare(
        self, step: Step, refusal: Exception | None, pushed: Sequence[int] = (0, 0)
    ) -> tuple[Exception | None, list[list[int]]]:
        """Exchanges the handshake; returns why the step is not taken, and what each rank has given for `pushed`."""
        copied, refuses = self._copied, refusal is not None
        mine = np.array([[*pushed, *(0 if refuses else messages.num_copied for messages in copied)]])
        try:
            rows = self._handshake(-self._num_pushes, step, [mine], refuses=refuses)
        except ConfigurationError as error:
            return refusal or error, []
        for column, messages in enumerate(copied, start=3):
            messages.expect_copied(rows[:, column].tolist())
        return after_hearing(self._mesh, rows[:, 0].tolist(), refusal), rows[:, 1:3].tolist()

    def _sums_growing(self) -> list[CollectiveGroup]:
        """Groups whose ranks send each other more sums of copied rows than in any step before; alike on all ranks."""
        return [messages for messages in self._copied if messages.is_growing]

    def _grow(self, step: Step) -> Exception | None:
        """Makes room for sums of copied rows, and has ranks agree on it."""
        growing, refusal = self._sums_growing(), None
        try:
            for messages in growing:
                messages.make_room_for_copies()
        except Exception as error:
            refusal = error
        if (refusal := self._compare(step, refusal)[0]) is None:
            for messages in growing:
                messages.end_growing()
        return refusal

    def _align(self, most: int) -> Exception | None:
        """Makes all ranks push equally many routes: they send their requests once more, or none where they have none.

        Owners know the requests of the look-ups, but not which of them each rank pushes. It happens seldom, so ranks
        agree once more before each part that may fail.
        """
        assert self._pushed is not None
        self._withdraw_groups()
        (routes, updates, step), refusal = self._pushed, None
        aligned, indices = [*routes], range(len(self._exchanges))
        try:
            while len(aligned) < most:
                aligned.append(ShardGroupRoute(route_of_nothing(self._exchanges), indices))
        except Exception as error:
            refusal = error
        if (refusal := self._compare(step, refusal)[0]) is not None:
            return refusal
        for route in aligned:
            self._exchange_counts(route.groups)
        pairs = [pair for route in aligned for pair in zip(self._groups, route.groups, strict=True)]
        try:
            for messages, group in pairs:
                messages.make_room(group)
        except Exception as error:
            refusal = error
        if (refusal := self._compare(step, refusal)[0]) is not None:
            return refusal
        for messages, group in pairs:
            messages.post_keys(group).wait()
        for messages in self._groups:
            messages.forget()
        try:
            self.prepare(aligned, updates, step)
        except Exception as error:
            refusal = error
        return self._compare(step, refusal)[0]

    def apply(self) -> None:
        """Sends gradients to the owners, which merge them in the order of the ranks and update."""
        assert self._pushed is not None
        routes, updates, _ = self._pushed
        pushed = self._by_group(routes)
        reach("collective.gradients")
        gradients = [
            [messages.post_gradients(group) for group in groups]
            for messages, groups in zip(self._groups, pushed, strict=True)
        ]
        for messages, groups, under_way, update in zip(self._groups, pushed, gradients, updates, strict=True):
            messages.push(groups, under_way, update)
        self._pushed = None

    def withdraw(self) -> None:
        """Forgets what was prepared."""
        super().withdraw()
        self._withdraw_groups()

    def _withdraw_groups(self) -> None:
        for exchange in self._exchanges:
            exchange.withdraw()

    def barrier(self) -> None:
        """Waits for all ranks."""
        barrier(self._mesh, "waiting at a barrier")

    @property
    def num_bytes(self) -> int:
        """Memory of the second hop, of copies, and of the message that opens a step."""
        return self._handshake.num_bytes + sum(group.num_bytes for group in self._groups)


def _make_channels(mesh: Mesh) -> tuple[Channel, Channel]:
    """The ranks with this one's place in their nodes, and the ranks of this node; every rank must call it."""
    size, world_size = mesh.ranks_per_node, mesh.world_size
    between = mesh.subgroup([range(place, world_size, size) for place in range(size)])
    within = mesh.subgroup([range(first, first + size) for first in range(0, world_size, size)])
    return (
        Channel(mesh, between, mesh.rank // size, world_size // size),
        Channel(mesh, within, mesh.rank % size, size),
    )
