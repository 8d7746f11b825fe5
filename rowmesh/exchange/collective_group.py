"""What the collective transport does for one group: keys, rows and gradients as all-to-alls.

A rank is the *stop* of the requests that others send it: it merges them, replies with the rows, and later gets their
gradients in the same order. For most rows it is their home; for rows that go in two hops it is an agent, which relays.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.messages import Parts, bounds_of, post_parts
from rowmesh.exchange.relay import Relay
from rowmesh.exchange.replicas import Replicas
from rowmesh.exchange.route import GroupExchange, RouteGroup
from rowmesh.exchange.tiered import TieredExchange
from rowmesh.exchange.transport import Sources
from rowmesh.exchange.update import Update
from rowmesh.exchange.workspace import held_bytes
from rowmesh.mesh.channel import Channel, Message
from rowmesh.ops import gather
from rowmesh.ops.memory import Scratch
from rowmesh.ops.simd import STORAGE
from rowmesh.placement.address_map import RELAYS, REPLIES


class Incoming:
    """What other ranks asked of this one for one group of one route.

    Attributes:
        offsets: int64 `[W, S′ + 1]`, of every rank's requests, in that rank's numbering.
        accesses: int64 `[W, S′]`.
        bounds: int64 `[W + 1]`: where each rank's entries begin, over the requests of all ranks in order.
        reply_bounds: int64 `[W + 1]`: where the replies to each rank begin.
    """

    __slots__ = ("accesses", "bounds", "offsets", "reply_bounds")

    def __init__(self, offsets: np.ndarray, accesses: np.ndarray, num_replying: int) -> None:
        self.offsets = np.ascontiguousarray(offsets)
        self.accesses = accesses
        self.bounds = bounds_of(offsets[:, -1] - offsets[:, 0])
        self.reply_bounds = bounds_of(offsets[:, num_replying] - offsets[:, 0])

    @property
    def num_entries(self) -> int:
        """Requests of all ranks."""
        return int(self.bounds[-1])


class CollectiveGroup:
    """One group's messages.

    Args:
        exchange: the group's.
        everyone: all ranks.
        ranks_per_node: G, of the mesh: gradients are summed node by node.
        common: counts what is not rows, keys or gradients.
    """

    def __init__(
        self, exchange: GroupExchange, everyone: Channel, ranks_per_node: int, common: CommonCounters
    ) -> None:  # fmt: skip
        address_map = exchange.address_map
        self.exchange = exchange
        self._everyone, self._ranks_per_node = everyone, ranks_per_node
        self._node: Channel | None = None
        self._column: Channel | None = None
        self._relay: Relay | None = None
        self._common = common
        self._replicas = Replicas(exchange, common)
        self._num_replying = len(address_map.segments(REPLIES))
        self._num_direct = len(address_map.segments({"direct"}))
        self._replicated = address_map.segments({"replicated"})
        self._gather = gather.kernels(exchange.group.dim, STORAGE[exchange.group.dtype])
        self._doing = f"exchanging group {exchange.group.name}"
        self._merged: RouteGroup | None = None  # whose requests the merger holds
        self._sources = Sources(exchange)
        self._row_addresses = Scratch()

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers that are kept from step to step, without those of routes."""
        relayed = self._relay.num_bytes if self._relay else 0
        return held_bytes(self) + self._replicas.num_bytes + relayed

    @property
    def needs_nodes(self) -> bool:
        """Whether rows go in two hops."""
        return bool(set(self.exchange.address_map.kinds) & RELAYS)

    def connect_nodes(self, column: Channel, node: Channel) -> None:
        """Takes the channels of the second hop."""
        if self.needs_nodes:
            self._relay, self._column, self._node = Relay(self.exchange, column, self._common), column, node

    def expect(self, group: RouteGroup, offsets: np.ndarray, accesses: np.ndarray) -> None:
        """Takes what ranks say that they will ask."""
        group.incoming = Incoming(offsets, accesses, self._num_replying)

    def post_keys(self, group: RouteGroup) -> Message:
        """Tells the stops which rows are needed."""
        outbox, incoming, workspace, exchange = group.workspace.outbox, group.incoming, group.workspace, self.exchange
        outbox.reserve_gradients(group.num_unique * exchange.gradient_bytes)
        workspace.replies.reserve(incoming.num_entries * max(exchange.gradient_bytes, exchange.row_bytes))
        workspace.requests.reserve(4 * incoming.num_entries)
        out = Parts(outbox.lists.bytes, outbox.slots_offset, group.stop_bounds, 4)
        into = Parts(workspace.requests.buffer.bytes, 0, incoming.bounds.tolist(), 4)
        return post_parts(self._everyone, out, into, exchange.counters, self._doing)

    def post_rows(self, group: RouteGroup, keys: Message) -> Message:
        """Merges what was asked, once it is here, and replies; relayed rows are fetched before."""
        keys.wait()
        self._merge([group])
        if self._relay:
            self._relay.request(group.workspace.relayed)
            self._relay.fetch(group.workspace.relayed)
        self._reply(group)
        workspace, row_bytes = group.workspace, self.exchange.row_bytes
        out = Parts(workspace.replies.buffer.bytes, 0, group.incoming.reply_bounds.tolist(), row_bytes)
        into = Parts(workspace.received.buffer.bytes, 0, group.reply_bounds, row_bytes)
        return post_parts(self._everyone, out, into, self.exchange.counters, self._doing)

    def _reply(self, group: RouteGroup) -> None:
        exchange, merger, incoming = self.exchange, self.exchange.merger, group.incoming
        rank, out = exchange.rank, group.workspace.replies.buffer.address
        if self._num_replying == exchange.num_segments and self._relay is None:
            own = int(incoming.bounds[rank])
            held = exchange.hold(merger)
            group.keep(held)
            self._gather.reply(
                exchange.arena.address, held.places, merger.heads, merger.nexts, merger.num_merged,
                own, int(incoming.bounds[rank + 1]), out,
            )  # fmt: skip
            if isinstance(exchange, TieredExchange):
                exchange.place_own(group, merger, held, own)
            return
        shifts = incoming.reply_bounds[:-1] - incoming.bounds[:-1]
        uniques = group.workspace.uniques.buffer.address + 4 * group.stop_bounds[rank]
        self._gather.reply_from(
            self._addresses(), merger.heads, merger.nexts,
            int(merger.merged_offsets[self._num_replying]), incoming.bounds.ctypes.data, shifts.ctypes.data, rank,
            uniques, group.workspace.addresses.buffer.address, out,
        )  # fmt: skip

    def _addresses(self) -> int:
        """Where the row of each merged key that gets a reply is."""
        if self._relay:
            return self._relay.addresses
        merger, exchange = self.exchange.merger, self.exchange
        count = int(merger.merged_offsets[self._num_replying])
        address = self._row_addresses.reserve(8 * count)
        self._gather.locate_slots(exchange.arena.address, merger.merged_slots, count, address)
        return address

    def post_gradients(self, groups: Sequence[RouteGroup]) -> list[Message]:
        """Sends the gradients of several routes to the stops."""
        return [self._send_gradients(group) for group in groups]

    def push(self, groups: Sequence[RouteGroup], gradients: Sequence[Message], update: Update) -> None:
        """Merges gradients, once they are here, relays them, updates rows and their copies."""
        if not groups:
            return
        if len(groups) > 1 or self._merged is not groups[0]:
            self._merge(groups)
            if self._relay:
                self._relay.request(None)
        for work in gradients:
            work.wait()
        self._merged = None
        self._sources.apply(update, self._num_direct)
        self._sources.count()
        if self._relay:
            self._relay.push(update)
            self._share_relayed(self._relay, update)
        if self._replicated:
            offsets = self.exchange.merger.merged_offsets
            part = (int(offsets[self._replicated.start]), int(offsets[self._replicated.stop]))
            self._replicas.share(self.exchange.merger, part, self._everyone, update)

    def _share_relayed(self, relay: Relay, update: Update) -> None:
        assert self._column
        assert self._node
        if relay.node_part[0] < relay.node_part[1]:
            self._replicas.share(relay.merger, relay.merged(relay.node_part), self._column, update)
        if relay.forwarded_part[0] < relay.forwarded_part[1]:
            part = relay.merged(relay.forwarded_part)
            received = self._replicas.share(relay.merger, part, self._column, update)
            self._replicas.pass_on(received, self._node, update)

    def forget(self) -> None:
        """What was merged is no longer what will be pushed."""
        self._merged = None

    def _send_gradients(self, group: RouteGroup) -> Message:
        size, workspace = self.exchange.gradient_bytes, group.workspace
        out = Parts(workspace.outbox.gradients.bytes, 0, group.stop_bounds, size)
        into = Parts(workspace.replies.buffer.bytes, 0, group.incoming.bounds.tolist(), size)
        return post_parts(self._everyone, out, into, self.exchange.counters, self._doing)

    def _merge(self, groups: Sequence[RouteGroup]) -> None:
        """Merges the requests of all ranks for these routes; where their gradients will be is known already."""
        exchange, size = self.exchange, self.exchange.gradient_bytes
        sources = Sources(exchange)
        for rank in range(exchange.world_size):
            for group in groups:
                if rank == exchange.rank:
                    sources.add_own(group)
                    continue
                workspace, incoming = group.workspace, group.incoming
                # Entries are counted over all ranks here, requests from each sender's own beginning.
                ahead = int(incoming.bounds[rank]) - int(incoming.offsets[rank, 0])
                sources.add(
                    workspace.requests.buffer.address + 4 * ahead,
                    incoming.offsets[rank],
                    workspace.replies.buffer.address + size * ahead,
                    incoming.accesses[rank],
                )
            if (rank + 1) % self._ranks_per_node == 0 and self._ranks_per_node < exchange.world_size:
                sources.end_node()
        sources.merge()
        self._sources = sources
        self._merged = groups[0] if len(groups) == 1 else None
