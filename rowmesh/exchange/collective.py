"""Collective transport: requests, rows and gradients travel as all-to-alls between the ranks.

A step has one round for the counts of all groups, for each group one for the keys, one for the rows and one for the
gradients, however many tables the group has, and before the gradients one in which ranks compare what they push. The
messages of one group travel while those of another are made. What a rank asks of itself never leaves it.

Source: FusedRec §3, Algorithm 1, lines 4–6.
Differs: the owner's look-up and recovery (b.1, b.2) are one pass that reads each distinct row once and writes it to
every request for it; the same merge serves the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rowmesh.exchange.collective_group import CollectiveGroup
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.handshake import Handshake, Step
from rowmesh.exchange.route import GroupExchange, Route, Routed, RouteGroup
from rowmesh.exchange.update import Update
from rowmesh.exchange.workspace import Outbox, private_outbox
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.waiting import barrier
from rowmesh.ops.memory import Buffer, Memory


class CollectiveTransport:
    """torch.distributed over gloo."""

    name = "collective"

    def __init__(self, mesh: Mesh) -> None:
        self.common = CommonCounters()
        self._mesh = mesh
        self._all = Channel.between_hosts(mesh)
        self._num_fetches = self._num_pushes = 0

    def allocate(self, num_bytes: int) -> Memory:
        """Private memory."""
        return Buffer(num_bytes)

    def make_outbox(self, num_segments: int) -> Outbox:
        """Private memory."""
        return private_outbox(self._mesh.world_size, num_segments)

    def connect(self, exchanges: Sequence[GroupExchange]) -> None:
        """Prepares the message that opens every fetch and push, and the channels of the second hop."""
        per_node = self._mesh.ranks_per_node
        self._groups = [CollectiveGroup(exchange, self._all, per_node, self.common) for exchange in exchanges]
        if any(group.needs_nodes for group in self._groups):
            column, node = _make_channels(self._mesh)
            for group in self._groups:
                group.connect_nodes(column, node)
        # To each rank: which fetch (above 0) or push (below 0) this is, then the counts, or what is pushed.
        width = 1 + sum(2 * exchange.num_segments + 1 for exchange in exchanges)
        self._handshake = Handshake(self._mesh, self._all, width, self.common)
        self._exchanges = exchanges
        self.barrier()

    def fetch(self, route: Routed, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Tells the owners which rows are needed and receives them."""
        self._num_fetches += 1
        self._exchange_counts(route.groups)
        pairs = list(zip(self._groups, route.groups, strict=True))
        keys = [messages.post_keys(group) for messages, group in pairs]
        rows = [messages.post_rows(group, work) for (messages, group), work in zip(pairs, keys, strict=True)]
        for group in route.groups:
            meanwhile(group)
        for message in rows:
            message.wait()

    def _exchange_counts(self, groups: Sequence[RouteGroup]) -> None:
        out, column = self._handshake.numbers, 1
        for group in groups:
            segments, outbox = group.exchange.num_segments, group.workspace.outbox
            out[:, column : column + segments + 1] = outbox.segment_offsets
            out[:, column + segments + 1 : column + 2 * segments + 1] = outbox.accesses
            column += 2 * segments + 1
        counts, column = self._handshake(self._num_fetches), 1
        for messages, group in zip(self._groups, groups, strict=True):
            segments = group.exchange.num_segments
            split = column + segments + 1
            messages.expect(group, counts[:, column:split], counts[:, split : split + segments])
            column += 2 * segments + 1

    def push(self, routes: Sequence[Routed], updates: Sequence[Update], step: Step) -> None:
        """Sends gradients to the owners, which merge them in the order of the ranks and update."""
        most, is_equal = self._compare(routes, step)
        if not is_equal:
            routes = self._request_again(routes, most)
        pushed = [[route.groups[index] for route in routes] for index in range(len(self._groups))]
        gradients = [messages.post_gradients(groups) for messages, groups in zip(self._groups, pushed, strict=True)]
        for messages, groups, works, update in zip(self._groups, pushed, gradients, updates, strict=True):
            messages.push(groups, works, update)

    def _compare(self, routes: Sequence[Routed], step: Step) -> tuple[int, bool]:
        """The most routes that a rank pushes, and whether all ranks push the same ones."""
        self._num_pushes += 1
        mine = [len(routes), hash(tuple(route.number for route in routes))]
        self._handshake.numbers[:, 1:3] = mine
        pushed = self._handshake(-self._num_pushes, step)[:, 1:3].tolist()
        return max(count for count, _ in pushed), pushed.count(mine) == len(pushed)

    def _request_again(self, routes: Sequence[Routed], most: int) -> list[Routed]:
        """Brings routes that not all ranks push in line: ranks without one ask for nothing, the others once more.

        Owners know the requests of the look-ups, but not those of the ranks that push alone: seldom, and never twice.
        """
        aligned = [*routes]
        while len(aligned) < most:
            aligned.append(Route.of_nothing(self._exchanges))
        for route in aligned:
            self._exchange_counts(route.groups)
            for messages, group in zip(self._groups, route.groups, strict=True):
                messages.post_keys(group).wait()
        for messages in self._groups:
            messages.forget()
        return aligned

    @property
    def num_bytes(self) -> int:
        """Of the second hop, of copies, and of what opens a step."""
        return self._handshake.num_bytes + sum(group.num_bytes for group in self._groups)

    def barrier(self) -> None:
        """Waits for all ranks."""
        barrier(self._mesh, "waiting at a barrier")

    def close(self) -> None:
        """Nothing is held that does not go with the collection."""


def _make_channels(mesh: Mesh) -> tuple[Channel, Channel]:
    """The ranks with this one's place in their nodes, and the ranks of this node; every rank must call it."""
    size, world_size = mesh.ranks_per_node, mesh.world_size
    column = mesh.subgroup([range(place, world_size, size) for place in range(size)])
    node = mesh.subgroup([range(first, first + size) for first in range(0, world_size, size)])
    return (
        Channel(mesh, column, mesh.rank // size, world_size // size),
        Channel(mesh, node, mesh.rank % size, size),
    )
