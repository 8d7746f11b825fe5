"""Copies: rows that several ranks hold are kept equal, and rows in two hops go through node leaders.

Every rank sums its own gradients of a row first (pool's backward did) and sends them to the row's owner, which merges
the touched rows of all ranks and adds in their order: a reduce-scatter of the union of touched rows, without the zeros
of rows that a rank did not touch. `Copies` is the second half, an all-gather: the owner sends the sums to the other
ranks that hold a copy, and each applies the same update to the same state, so that copies stay equal to the bit.

For a row that goes in two hops, every rank asks the *leader* of its own node, the rank that has the owner's place
there. Leaders merge the requests of their node, so that one request, one row and one summed gradient cross between two
nodes, however many ranks of a node want the row (`Relay`). Sums keep their tree: the leader adds the gradients of its
node in the order of the ranks, the owner adds the sums of the nodes in their order, as it does with gradients that come
straight to it (`rowmesh.ops.merge_update`).

Source: OPER §5.3 and Fig. 5 (local-aggregated sparse all-reduce), §5 (one look-up for rows of any parallelism); the
two-level merge measured for rowmesh, see docs/oper.md.
Differs: the paper pads every rank's gradients with zeros to the union and reduces the block with a dense ring. Owners
that merge send no zeros, and add in a fixed order whatever the library does.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh.exchange.host_group import HostGroupExchange
from rowmesh.mesh.channel import Channel, Wire
from rowmesh.ops import gather
from rowmesh.ops.memory import Buffer, Scratch, held_bytes, round_up
from rowmesh.ops.merge_update import HostMerged, Merger, Singles, sum_kernels
from rowmesh.ops.relay import sort_relay
from rowmesh.ops.simd import STORAGE
from rowmesh.placement.address_map import RELAYS, REPLIES
from rowmesh.tables.update_rules import Update

_SLOT_BYTES = 4


Sums = tuple[Tensor, Tensor]
"""Some rows' summed gradients, as they stand in a message, uint8: the gradients, then the rows' slots."""


class Copies:
    """Shares the sums of one group's copied rows among the ranks that hold them.

    Args:
        exchange: the group's.
        common: counts what is not slots or gradients.
    """

    def __init__(self, exchange: HostGroupExchange, common: CommonCounters) -> None:
        self._exchange, self._common = exchange, common
        self._sum = sum_kernels(exchange.group.dim, STORAGE[exchange.group.dtype])
        self._singles = Singles()
        self._message, self._received = Scratch(), Scratch()
        self._doing = f"keeping the copies of group {exchange.group.name} equal"

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return held_bytes(self) + held_bytes(self._singles)

    def share(
        self,
        merger: HostMerged,
        part: tuple[int, int],
        channel: Channel,
        update: Update,
        counts: list[int] | None = None,
    ) -> list[Sums]:
        """Updates the merged rows of `part` here and on the other members; collective among them.

        Args:
            merger: the rows, and their gradients here.
            part: which of them, first and one past the last.
            channel: the members.
            update: how.
            counts: how many rows each member has; by default they tell each other.

        Returns:
            The contributions of all members, for `pass_on`; valid until the next call.
        """
        first, end = part
        if counts is None:
            counts = self._counts(end - first, channel)
        assert counts[channel.member] == end - first
        gradients, slots = self._room(counts, channel)
        if end > first:
            self._sum.sum_merged(
                merger.heads,
                merger.nexts,
                merger.addresses,
                first,
                end,
                merger.node_ends,
                merger.num_nodes,
                gradients.data_ptr(),
            )
            ctypes.memmove(slots.data_ptr(), merger.merged_slots + _SLOT_BYTES * first, len(slots))
        everyone = self._gather(counts, channel)
        for sums in everyone:
            self._apply(sums, update)
        return everyone

    def make_room(self, counts: list[int], channel: Channel) -> None:
        """For `share` among the members of a channel, with so many rows of each."""
        num_bytes = self._message_bytes(counts)
        self._message.reserve(num_bytes)
        self._received.reserve(num_bytes * channel.size)
        self._singles.make_room(max(counts))

    def pass_on(self, received: list[Sums], channel: Channel, update: Update) -> None:
        """Sends the members of another channel what `share` returned; all members do, and apply what they receive."""
        counts = self._counts(sum(map(_num_rows, received)), channel)
        for mine, of_members in zip(self._room(counts, channel), zip(*received, strict=True), strict=True):
            torch.cat(of_members, out=mine)
        for member, sums in enumerate(self._gather(counts, channel)):
            if member != channel.member:
                self._apply(sums, update)

    def _counts(self, count: int, channel: Channel) -> list[int]:
        """How many rows every member has sums of."""
        counts = torch.empty(channel.size, 1, dtype=torch.int64, device="cpu")
        own = torch.tensor([count], dtype=torch.int64, device="cpu")
        channel.gather(own, counts, self._common, self._doing)
        return counts.flatten().tolist()

    def _room(self, counts: list[int], channel: Channel) -> Sums:
        """Where this rank's sums go; messages are as long as the longest, and bytes behind the sums are unused."""
        num_bytes = self._message_bytes(counts)
        self._message.reserve(num_bytes)
        return self._cut(self._message.buffer.tensor(torch.uint8, num_bytes), counts[channel.member])

    def _gather(self, counts: list[int], channel: Channel) -> list[Sums]:
        """Every member's sums."""
        num_bytes = self._message_bytes(counts)
        self._received.reserve(num_bytes * channel.size)
        everyone = self._received.buffer.tensor(torch.uint8, channel.size, num_bytes)
        if num_bytes:
            mine = self._message.buffer.tensor(torch.uint8, num_bytes)
            channel.gather(mine, everyone, self._exchange.counters, self._doing)
        return [self._cut(theirs, count) for theirs, count in zip(everyone, counts, strict=True)]

    def _message_bytes(self, counts: list[int]) -> int:
        exchange = self._exchange
        number_bytes = exchange.gradient_bytes // exchange.group.dim  # gradients of every member are aligned to it
        return round_up((exchange.gradient_bytes + _SLOT_BYTES) * max(counts), number_bytes)

    def _cut(self, message: Tensor, count: int) -> Sums:
        split = self._exchange.gradient_bytes * count
        return message[:split], message[split : split + _SLOT_BYTES * count]

    def _apply(self, sums: Sums, update: Update) -> None:
        if count := _num_rows(sums):
            gradients, slots = sums
            self._singles(slots.data_ptr(), gradients.data_ptr(), self._exchange.gradient_bytes, count)
            self._exchange.apply(self._singles, update)


class Relay:
    """The second hop of one group: what this rank relays, and the requests that other leaders send it.

    Args:
        exchange: the group's.
        between: the ranks with this one's place in their nodes, in the order of the nodes.
        common: counts what is not rows, keys or gradients.

    Attributes:
        addresses: address of int64: where the row of each merged key is, of the kinds that get replies.
        merger: the rows this rank owns, over the sums of all nodes; its segments are the relayed ones.
    """

    def __init__(self, exchange: HostGroupExchange, between: Channel, common: CommonCounters) -> None:
        address_map = exchange.address_map
        self._exchange, self._between, self._common = exchange, between, common
        self._segments = address_map.segments(RELAYS)
        self._num_fetched = len(address_map.segments({"relayed"}))
        num_node = len(address_map.segments({"node"}))
        self.node_part = (self._num_fetched, self._num_fetched + num_node)  # relayed segments with a copy on leaders
        self.forwarded_part = (self._num_fetched + num_node, len(self._segments))  # and on all ranks
        self._num_replying = len(address_map.segments(REPLIES))
        shape = (between.size, len(self._segments) + 1)
        self._offsets = np.zeros(shape, np.int64)
        self._incoming = np.zeros(shape, np.int64)
        self._reply_offsets = np.zeros(between.size + 1, np.int64)
        self._slots, self._heads = Scratch(), Scratch()
        self._addresses, self._sums = Scratch(), Scratch()
        self._requests, self._replies = Scratch(), Scratch()
        self._gather = gather.kernels(exchange.group.dim, STORAGE[exchange.group.dtype])
        self._sum = sum_kernels(exchange.group.dim, STORAGE[exchange.group.dtype])
        self.merger = Merger(len(self._segments), exchange.arena.address, exchange.row_bytes)
        self._doing = f"exchanging group {exchange.group.name} between nodes"

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return held_bytes(self) + held_bytes(self.merger)

    @property
    def addresses(self) -> int:
        """Where the row of each merged key is."""
        return self._addresses.buffer.address

    def merged(self, segments: tuple[int, int]) -> tuple[int, int]:
        """Which of the merged rows are of some relayed segments."""
        first, end = self.merger.merged_offsets[list(segments)].tolist()
        return first, end

    def request(self, relayed: Scratch | None) -> None:
        """Sends the owners the requests of this node, once they are merged.

        Args:
            relayed: where `fetch` will put the rows of other nodes; None where no `fetch` follows. It belongs to the
                route, since this rank may have requested some of them itself, and reads them there.
        """
        exchange, between, merger = self._exchange, self._between, self._exchange.merger
        first, num_fetched = self._segments.start, self._num_fetched
        begin, fetched, end, replying = merger.merged_offsets[
            [first, first + num_fetched, self._segments.stop, self._num_replying]
        ].tolist()
        most = end - begin
        received = relayed.reserve((fetched - begin) * exchange.row_bytes) if relayed else 0
        sort_relay(
            merger.merged_slots,
            merger.merged_offsets.ctypes.data,
            merger.heads,
            first,
            len(self._segments),
            num_fetched,
            self._num_replying,
            between.size,
            between.member,
            exchange.address_map.key_stride,
            exchange.arena.address,
            exchange.row_bytes,
            received,
            self._slots.reserve(4 * most),
            self._heads.reserve(4 * most),
            self._offsets.ctypes.data,
            self._reply_offsets.ctypes.data,
            self._addresses.reserve(8 * replying),
        )
        counts = between.exchange_equal(torch.from_numpy(self._offsets), self._common, self._doing)
        self._incoming[:] = counts.numpy()
        self._incoming_bounds = _bounds_of(self._incoming[:, -1] - self._incoming[:, 0])
        self._requests.reserve(4 * self._incoming_bounds[-1])
        self._send(self._slots.buffer, self._out_bounds(), self._requests.buffer, self._incoming_bounds, _SLOT_BYTES)

    def _out_bounds(self) -> list[int]:
        return [*self._offsets[:, 0].tolist(), int(self._offsets[-1, -1])]

    def fetch(self, relayed: Scratch) -> None:
        """Fetches rows from other nodes, except those with a copy here."""
        exchange, between, bounds = self._exchange, self._between, self._incoming_bounds
        wanted = self._incoming[:, self._num_fetched] - self._incoming[:, 0]
        wanted[between.member] = 0
        reply_bounds = _bounds_of(wanted)
        replies = self._replies.reserve(reply_bounds[-1] * exchange.row_bytes)
        for node, count in enumerate(wanted.tolist()):
            slots = self._requests.buffer.address + 4 * bounds[node]
            into = replies + reply_bounds[node] * exchange.row_bytes
            self._gather.gather_slots(exchange.arena.address, slots, count, into)
        into, bounds_in = relayed.buffer, self._reply_offsets.tolist()
        self._send(self._replies.buffer, reply_bounds, into, bounds_in, exchange.row_bytes, exchange.row_wire)

    def _send(
        self,
        out: Buffer,
        bounds_out: list[int],
        into: Buffer,
        bounds_in: list[int],
        item_bytes: int,
        wire: Wire | None = None,
    ) -> None:
        """Sends items to the nodes, and waits for theirs; this rank's own stay where they are."""
        sizes_out, sizes_in = np.diff(bounds_out).tolist(), np.diff(bounds_in).tolist()
        sent, received = out.items(item_bytes, bounds_out[-1]), into.items(item_bytes, bounds_in[-1])
        counters = self._exchange.counters
        posted = self._between.post(
            sent, sizes_out, sizes_in, counters, self._doing, received, copies_own=False, wire=wire
        )
        posted.wait()

    def make_room(self) -> None:
        """For `push`, once requests have come."""
        size, num_entries = self._exchange.gradient_bytes, self._incoming_bounds[-1]
        self._sums.reserve(self._out_bounds()[-1] * size)
        self._replies.reserve(num_entries * size)
        self.merger.make_room(num_entries + self._out_bounds()[-1], self._between.size)

    def push(self, update: Update) -> None:
        """Sends this node's sums to the owners, merges those of all nodes, and updates rows without copies."""
        exchange, between, merger = self._exchange, self._between, self._exchange.merger
        out_bounds, size = self._out_bounds(), exchange.gradient_bytes
        sums = self._sums.reserve(out_bounds[-1] * size)
        self._sum.sum_merged(
            self._heads.buffer.address,
            merger.nexts,
            merger.addresses,
            0,
            out_bounds[-1],
            merger.node_ends,
            merger.num_nodes,
            sums,
        )
        gradients = self._replies.reserve(self._incoming_bounds[-1] * size)
        into, bounds_in = self._replies.buffer, self._incoming_bounds
        self._send(self._sums.buffer, out_bounds, into, bounds_in, size, exchange.gradient_wire)
        sources = []
        for node in range(between.size):
            if node == between.member:
                sources.append((self._slots.buffer.address, self._offsets[node].ctypes.data, sums))
                continue
            # Entries are counted over all nodes here, requests from each sender's own beginning.
            ahead = self._incoming_bounds[node] - int(self._incoming[node, 0])
            slots = self._requests.buffer.address + 4 * ahead
            sources.append((slots, self._incoming[node].ctypes.data, gradients + size * ahead))
        self.merger(sources, size, self._incoming_bounds[-1])
        part = (0, int(self.merger.merged_offsets[self._num_fetched]))
        exchange.apply(self.merger, update, part)


def _num_rows(sums: Sums) -> int:
    return len(sums[1]) // _SLOT_BYTES


def _bounds_of(sizes: np.ndarray) -> list[int]:
    """Where each piece begins, and where the last one ends."""
    return [0, *np.cumsum(sizes).tolist()]
