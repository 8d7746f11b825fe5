"""Collective group: the messages of one group of tables under the collective transport."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh.exchange.copies import Copies, Relay
from rowmesh.exchange.host_group import HostGroupExchange, HostRouteGroup
from rowmesh.exchange.incoming import KEY_BYTES, Incoming, merged_requests, sizes_of
from rowmesh.mesh.channel import Channel, Message, Wire
from rowmesh.ops import gather
from rowmesh.ops.memory import Scratch, held_bytes
from rowmesh.ops.simd import STORAGE
from rowmesh.placement.address_map import RELAYS, REPLIES
from rowmesh.tables.update_rules import Update


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

    @property
    def num_columns(self) -> int:
        """Numbers that say what a rank asks of another."""
        return 2 * self.exchange.num_segments + 1

    def counts(self, group: HostRouteGroup) -> list[np.ndarray]:
        """These numbers, of a look-up of this rank: int64 `[W, …]`, side by side."""
        send = group.look_up.send
        return [send.segment_offsets, send.accesses]

    def expect(self, group: HostRouteGroup, counts: np.ndarray) -> None:
        """Takes the numbers of all ranks, int64 `[W, num_columns]`: the requests that will come."""
        split = self.exchange.num_segments + 1
        group.keep(Incoming(counts[:, :split], counts[:, split:], self._num_replying))

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
