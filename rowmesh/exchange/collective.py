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
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh._support.faults import reach
from rowmesh.errors import ConfigurationError
from rowmesh.exchange.copies import Copies, Relay
from rowmesh.exchange.handshake import Handshake, Step, after_hearing
from rowmesh.exchange.host_group import HostGroupExchange, HostRouteGroup, route_of_nothing
from rowmesh.exchange.incoming import KEY_BYTES, Incoming, merged_requests, sizes_of
from rowmesh.exchange.micro_batch import windows_on_hosts
from rowmesh.exchange.route import Routed, ShardGroupRoute
from rowmesh.exchange.transport import Meanwhile, Transport
from rowmesh.exchange.windows import StoredTables, WindowOptions, Windows
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel, Message, Wire
from rowmesh.mesh.waiting import barrier
from rowmesh.ops import gather
from rowmesh.ops.memory import Scratch, held_bytes
from rowmesh.ops.simd import STORAGE
from rowmesh.placement.address_map import RELAYS, REPLIES
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
        self._groups = [
            CollectiveGroup(exchange, self._everyone, mesh.ranks_per_node, self.common) for exchange in exchanges
        ]
        if any(group.needs_nodes for group in self._groups):
            between, within = _make_channels(mesh)
            for group in self._groups:
                group.connect_nodes(between, within)
        self._copied = [group for group in self._groups if group.has_copies]
        # To each rank: which fetch (above 0) or push (below 0) this is; then the counts, or what is pushed, and of how
        # many copied rows this rank will have sums, group by group.
        width = 1 + sum(2 * exchange.num_segments + 1 for exchange in exchanges)
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
        sends = [group.look_up.send for group in groups]
        mine = [numbers for send in sends for numbers in (send.segment_offsets, send.accesses)]
        counts, column = self._handshake(self._num_fetches, None, mine), 1
        for messages, group in zip(self._groups, groups, strict=True):
            segments = group.exchange.num_segments
            split = column + segments + 1
            messages.expect(group, counts[:, column:split], counts[:, split : split + segments])
            column += 2 * segments + 1

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


class CollectiveGroup:
    """The messages of one group.

    Args:
        exchange: the group's.
        everyone: all ranks.
        ranks_per_node: G, of the mesh: gradients are summed node by node.
        common: counts what is not rows, keys or gradients.

    Attributes:
        num_copied: of how many copied rows this rank, their owner, will have sums.
        copied_counts: the same of every rank.
    """

    def __init__(
        self, exchange: HostGroupExchange, everyone: Channel, ranks_per_node: int, common: CommonCounters
    ) -> None:
        address_map = exchange.address_map
        self.exchange = exchange
        self._everyone, self._ranks_per_node = everyone, ranks_per_node
        self._within: Channel | None = None
        self._between: Channel | None = None
        self._relay: Relay | None = None
        self._common = common
        self._copies = Copies(exchange, common)
        self._num_replying = len(address_map.segments(REPLIES))
        self._num_direct = len(address_map.segments({"direct"}))
        self._replicated = address_map.segments({"replicated"})
        self._gather = gather.kernels(exchange.group.dim, STORAGE[exchange.group.dtype])
        self._doing = f"exchanging group {exchange.group.name}"
        self._merged: HostRouteGroup | None = None  # whose requests the merger holds
        self._sources = exchange.sources()
        self._row_addresses = Scratch()
        self._relays_again = False  # requests of this push between nodes
        self.num_copied, self._most_copied = 0, 0
        self.copied_counts: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers that are kept from step to step, without those of routes."""
        relayed = self._relay.num_bytes if self._relay else 0
        return held_bytes(self) + self._copies.num_bytes + relayed

    @property
    def needs_nodes(self) -> bool:
        """Whether rows go in two hops."""
        return bool(set(self.exchange.address_map.kinds) & RELAYS)

    def connect_nodes(self, between: Channel, within: Channel) -> None:
        """Takes the channels of the second hop: between nodes, and within this one."""
        if self.needs_nodes:
            self._relay = Relay(self.exchange, between, self._common)
            self._between, self._within = between, within

    def expect(self, group: HostRouteGroup, offsets: np.ndarray, accesses: np.ndarray) -> None:
        """Takes the counts of the requests that will come."""
        group.keep(Incoming(offsets, accesses, self._num_replying))

    def post_keys(self, group: HostRouteGroup) -> Message:
        """Sends requests to owners and node leaders."""
        look_up, incoming = group.look_up, group.opened_as(Incoming)
        send, count = look_up.send, incoming.num_entries
        self.make_room(group)
        out = send.lists.items(KEY_BYTES, group.num_unique, offset=send.slots_offset)
        into = look_up.requests.buffer.items(KEY_BYTES, count)
        return self._post(out, sizes_of(look_up.bounds), incoming.sizes, into)

    def make_room(self, group: HostRouteGroup) -> None:
        """For what other ranks ask for, the rows they get, and gradients."""
        look_up, exchange, count = group.look_up, self.exchange, group.opened_as(Incoming).num_entries
        look_up.send.reserve_gradients(group.num_unique * exchange.gradient_bytes)
        look_up.replies.reserve(count * max(exchange.gradient_bytes, exchange.row_bytes))
        look_up.requests.reserve(KEY_BYTES * count)

    def post_rows(self, group: HostRouteGroup, keys: Message) -> Message:
        """Merges the requests, once they are here, and replies; relayed rows are fetched before."""
        keys.wait()
        self._merge([group])
        look_up, row_bytes = group.look_up, self.exchange.row_bytes
        if self._relay:
            self._relay.request(look_up.relayed)
            self._relay.fetch(look_up.relayed)
        self._reply(group)
        bounds = group.opened_as(Incoming).reply_bounds.tolist()
        out = look_up.replies.buffer.items(row_bytes, bounds[-1])
        into = look_up.received.buffer.items(row_bytes, look_up.reply_bounds[-1])
        return self._post(out, sizes_of(bounds), sizes_of(look_up.reply_bounds), into, self.exchange.row_wire)

    def _post(
        self, out: Tensor, sizes_out: list[int], sizes_in: list[int], into: Tensor, wire: Wire | None = None
    ) -> Message:
        counters = self.exchange.counters
        return self._everyone.post(out, sizes_out, sizes_in, counters, self._doing, into, copies_own=False, wire=wire)

    def _reply(self, group: HostRouteGroup) -> None:
        exchange, merger, incoming = self.exchange, self.exchange.merger, group.opened_as(Incoming)
        rank, look_up = exchange.rank, group.look_up
        out = look_up.replies.buffer.address
        pinned = exchange.pin(merger)
        group.pin(pinned)
        places = merger.merged_slots if pinned is None else pinned.cache_slots.ctypes.data
        if self._num_replying == exchange.num_segments and self._relay is None:
            own, end = int(incoming.bounds[rank]), int(incoming.bounds[rank + 1])
            self._gather.reply(
                exchange.arena.address, places, merger.heads, merger.nexts, merger.num_merged, own, end, out
            )
            if pinned is not None:
                exchange.place_own(group, merger, own)
            return
        shifts = incoming.reply_bounds[:-1] - incoming.bounds[:-1]
        self._gather.reply_from(
            self._addresses(places),
            merger.heads,
            merger.nexts,
            int(merger.merged_offsets[self._num_replying]),
            incoming.bounds.ctypes.data,
            shifts.ctypes.data,
            rank,
            look_up.uniques + KEY_BYTES * look_up.bounds[rank],
            look_up.addresses,
            out,
        )

    def _addresses(self, places: int) -> int:
        """Where the row of each merged key that gets a reply is, given where it is in the arena."""
        if self._relay:
            return self._relay.addresses
        merger, exchange = self.exchange.merger, self.exchange
        count = int(merger.merged_offsets[self._num_replying])
        address = self._row_addresses.reserve(8 * count)
        self._gather.locate_slots(exchange.arena.address, places, count, address)
        return address

    def post_gradients(self, group: HostRouteGroup) -> Message:
        """Sends the gradients of a route."""
        size, look_up, incoming = self.exchange.gradient_bytes, group.look_up, group.opened_as(Incoming)
        out = look_up.send.gradients.items(size, group.num_unique)
        into = look_up.replies.buffer.items(size, incoming.num_entries)
        return self._post(out, sizes_of(look_up.bounds), incoming.sizes, into, self.exchange.gradient_wire)

    def prepare(self, groups: Sequence[HostRouteGroup]) -> None:
        """Does what may fail of `push`, without messages."""
        self._relays_again, self.num_copied = False, 0
        if not groups:
            return
        if len(groups) > 1 or self._merged is not groups[0]:
            self._merge(groups)
            self._relays_again = self._relay is not None
        merger = self.exchange.merger
        self.exchange.hold(merger, merger.num_merged + self._most_copied * self.exchange.world_size)
        if self._replicated:
            first, end = merger.merged_offsets[[self._replicated.start, self._replicated.stop]].tolist()
            self.num_copied = end - first
        if self._relay and not self._relays_again:
            self._relay.make_room()

    def expect_copied(self, counts: list[int]) -> None:
        """Takes the number of copied rows of which each rank will have sums."""
        self.copied_counts = counts

    @property
    def has_copies(self) -> bool:
        """Whether all ranks hold copies of rows, whose sums they send each other."""
        return bool(self._replicated)

    @property
    def is_growing(self) -> bool:
        """Whether there are more sums of copied rows than there is room for, on any rank."""
        return max(self.copied_counts) > self._most_copied

    def make_room_for_copies(self) -> None:
        """For the sums of as many copied rows as ranks have now."""
        self._copies.make_room(self.copied_counts, self._everyone)
        if self.exchange.replicated is not None:
            num_copied = max(self.copied_counts) * self.exchange.world_size
            self.exchange.replicated.make_room(self.exchange.merger.num_merged + num_copied)

    def end_growing(self) -> None:
        """All ranks have made that room."""
        self._most_copied = max(self.copied_counts)

    def push(self, groups: Sequence[HostRouteGroup], gradients: Sequence[Message], update: Update) -> None:
        """Relays gradients, once they are here, updates rows and their copies."""
        if not groups:
            return
        if self._relays_again:
            assert self._relay
            self._relay.request(None)
        for message in gradients:
            message.wait()
        self._merged = None
        merger = self.exchange.merger
        self.exchange.apply(merger, update, (0, int(merger.merged_offsets[self._num_direct])))
        self.exchange.count_merged(self._sources)
        if self._relay:
            self._relay.push(update)
            self._share_relayed(self._relay, update)
        if self._replicated:
            offsets = self.exchange.merger.merged_offsets
            part = (int(offsets[self._replicated.start]), int(offsets[self._replicated.stop]))
            self._copies.share(self.exchange.merger, part, self._everyone, update, self.copied_counts)

    def _share_relayed(self, relay: Relay, update: Update) -> None:
        assert self._between
        assert self._within
        if relay.node_part[0] < relay.node_part[1]:
            self._copies.share(relay.merger, relay.merged(relay.node_part), self._between, update)
        if relay.forwarded_part[0] < relay.forwarded_part[1]:
            part = relay.merged(relay.forwarded_part)
            received = self._copies.share(relay.merger, part, self._between, update)
            self._copies.pass_on(received, self._within, update)

    def forget(self) -> None:
        """The merged requests are no longer those that will be pushed."""
        self._merged = None

    def _merge(self, groups: Sequence[HostRouteGroup]) -> None:
        """Merges the requests of all ranks for these routes; where their gradients will be is known already."""
        self._sources = merged_requests(self.exchange, groups, self._ranks_per_node)
        self._merged = groups[0] if len(groups) == 1 else None
