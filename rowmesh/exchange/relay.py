"""The second hop: agents ask homes on other nodes for what the ranks of their node asked of them.

The ranks that have the same place in their nodes are a *column*. For a row that goes in two hops, every rank asks the
agent of its own node, the rank in the home's column; agents merge what their node asked, so that one request, one row
and one summed gradient cross between two nodes, however many ranks of a node want the row.

Sums keep their tree: the agent adds the gradients of its node in the order of the ranks, the home adds the sums of the
nodes in their order, as it does with gradients that come straight to it (`rowmesh.ops.merge_update`).

Source: OPER §5 (one lookup for rows of any parallelism) and the two-level merge measured for rowmesh; see
docs/oper.md.
"""

from __future__ import annotations

import numpy as np
import torch

from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.messages import Parts, bounds_of, post_parts
from rowmesh.exchange.route import GroupExchange
from rowmesh.exchange.update import Update
from rowmesh.exchange.workspace import held_bytes
from rowmesh.mesh.channel import Channel
from rowmesh.ops import gather
from rowmesh.ops.memory import Scratch
from rowmesh.ops.merge_update import Merger, sum_kernels
from rowmesh.ops.relay import sort_relay
from rowmesh.ops.simd import STORAGE
from rowmesh.placement.address_map import RELAYS, REPLIES


class Relay:
    """What this rank relays for one group, and what other agents ask of it.

    Args:
        exchange: the group's.
        column: the ranks that have this one's place in their nodes, in the order of the nodes.
        common: counts what is not rows, keys or gradients.

    Attributes:
        addresses: address of int64: where the row of each merged key is, of the kinds that get replies.
        merger: the rows this rank is home of, over the sums of all nodes; its segments are the relayed ones.
    """

    def __init__(self, exchange: GroupExchange, column: Channel, common: CommonCounters) -> None:
        address_map = exchange.address_map
        self._exchange, self._column, self._common = exchange, column, common
        self._segments = address_map.segments(RELAYS)
        self._num_fetched = len(address_map.segments({"relayed"}))
        num_node = len(address_map.segments({"node"}))
        self.node_part = (self._num_fetched, self._num_fetched + num_node)  # relayed segments with a copy on agents
        self.forwarded_part = (self._num_fetched + num_node, len(self._segments))  # and on all ranks
        self._num_replying = len(address_map.segments(REPLIES))
        shape = (column.size, len(self._segments) + 1)
        self._offsets = np.zeros(shape, np.int64)
        self._incoming = np.zeros(shape, np.int64)
        self._reply_offsets = np.zeros(column.size + 1, np.int64)
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
        """Tells the homes which rows this node needs; after the requests of the node were merged.

        Args:
            relayed: where `fetch` will put the rows of other nodes; None where nobody will fetch. This rank may be one
                of those that asked, and reads them there, so it belongs to the route.
        """
        exchange, column, merger = self._exchange, self._column, self._exchange.merger
        first, num_fetched = self._segments.start, self._num_fetched
        begin, fetched, end, replying = merger.merged_offsets[
            [first, first + num_fetched, self._segments.stop, self._num_replying]
        ].tolist()
        most = end - begin
        received = relayed.reserve((fetched - begin) * exchange.row_bytes) if relayed else 0
        sort_relay(
            merger.merged_slots, merger.merged_offsets.ctypes.data, merger.heads, first, len(self._segments),
            num_fetched, self._num_replying, column.size, column.member, exchange.address_map.key_stride,
            exchange.arena.address, exchange.row_bytes, received, self._slots.reserve(4 * most),
            self._heads.reserve(4 * most), self._offsets.ctypes.data, self._reply_offsets.ctypes.data,
            self._addresses.reserve(8 * replying),
        )  # fmt: skip
        counts = column.exchange_equal(torch.from_numpy(self._offsets), self._common, self._doing)
        self._incoming[:] = counts.numpy()
        self._incoming_bounds = bounds_of(self._incoming[:, -1] - self._incoming[:, 0]).tolist()
        self._requests.reserve(4 * self._incoming_bounds[-1])
        out = Parts(self._slots.buffer.bytes, 0, self._out_bounds(), 4)
        into = Parts(self._requests.buffer.bytes, 0, self._incoming_bounds, 4)
        post_parts(column, out, into, exchange.counters, self._doing).wait()

    def _out_bounds(self) -> list[int]:
        return [*self._offsets[:, 0].tolist(), int(self._offsets[-1, -1])]

    def fetch(self, relayed: Scratch) -> None:
        """Brings the rows of other nodes here; those that have a copy here need not travel."""
        exchange, column, bounds = self._exchange, self._column, self._incoming_bounds
        wanted = self._incoming[:, self._num_fetched] - self._incoming[:, 0]
        wanted[column.member] = 0
        reply_bounds = bounds_of(wanted).tolist()
        replies = self._replies.reserve(reply_bounds[-1] * exchange.row_bytes)
        for node, count in enumerate(wanted.tolist()):
            slots = self._requests.buffer.address + 4 * bounds[node]
            into = replies + reply_bounds[node] * exchange.row_bytes
            self._gather.gather_slots(exchange.arena.address, slots, count, into)
        out = Parts(self._replies.buffer.bytes, 0, reply_bounds, exchange.row_bytes)
        received = Parts(relayed.buffer.bytes, 0, self._reply_offsets.tolist(), exchange.row_bytes)
        post_parts(column, out, received, exchange.counters, self._doing).wait()

    def push(self, update: Update) -> None:
        """Sends this node's sums to the homes, merges those of all nodes, and updates rows without copies."""
        exchange, column, merger = self._exchange, self._column, self._exchange.merger
        out_bounds, size = self._out_bounds(), exchange.gradient_bytes
        sums = self._sums.reserve(out_bounds[-1] * size)
        self._sum.sum_merged(
            self._heads.buffer.address, merger.nexts, merger.addresses, 0, out_bounds[-1], merger.node_ends,
            merger.num_nodes, sums,
        )  # fmt: skip
        gradients = self._replies.reserve(self._incoming_bounds[-1] * size)
        out = Parts(self._sums.buffer.bytes, 0, out_bounds, size)
        into = Parts(self._replies.buffer.bytes, 0, self._incoming_bounds, size)
        post_parts(column, out, into, exchange.counters, self._doing).wait()
        sources = []
        for node in range(column.size):
            if node == column.member:
                sources.append((self._slots.buffer.address, self._offsets[node].ctypes.data, sums))
                continue
            # Entries are counted over all nodes here, requests from each sender's own beginning.
            ahead = self._incoming_bounds[node] - int(self._incoming[node, 0])
            slots = self._requests.buffer.address + 4 * ahead
            sources.append((slots, self._incoming[node].ctypes.data, gradients + size * ahead))
        self.merger(sources, size, self._incoming_bounds[-1])
        part = (0, int(self.merger.merged_offsets[self._num_fetched]))
        exchange.apply(self.merger, update, part)
