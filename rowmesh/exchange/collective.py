"""Collective transport: requests, rows and gradients travel as all-to-alls between the ranks.

A step has one round for the counts of all groups, and for each group one for the slots, one for the rows and one for
the gradients, however many tables the group has. What a rank asks of itself never leaves it.

Source: FusedRec §3, Algorithm 1, lines 4–6.
Differs: the owner's look-up and recovery (b.1, b.2) are one pass that reads each distinct row once and writes it to
every request for it; the same merge serves the update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.exchange.route import GroupExchange, Route, RouteGroup
from rowmesh.exchange.transport import Sources, Update
from rowmesh.exchange.workspace import Outbox, private_outbox
from rowmesh.mesh import Mesh
from rowmesh.ops import gather
from rowmesh.ops.memory import Buffer, Memory
from rowmesh.ops.simd import STORAGE


class Incoming:
    """What other ranks asked of this one for one group of one route.

    Attributes:
        offsets: int64 `[W, S + 1]`, of every rank's requests, in that rank's numbering.
        accesses: int64 `[W, S]`.
        bounds: where each rank's entries begin, over the requests of all ranks in order; W + 1 values.
    """

    __slots__ = ("accesses", "bounds", "offsets")

    def __init__(self, offsets: np.ndarray, accesses: np.ndarray) -> None:
        self.offsets = np.ascontiguousarray(offsets)
        self.accesses = accesses
        sizes = offsets[:, -1] - offsets[:, 0]
        self.bounds = [0, *np.cumsum(sizes).tolist()]

    @property
    def num_entries(self) -> int:
        """Requests of all ranks."""
        return self.bounds[-1]


class CollectiveTransport:
    """torch.distributed over gloo."""

    name = "collective"

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def allocate(self, num_bytes: int) -> Memory:
        """Private memory."""
        return Buffer(num_bytes)

    def make_outbox(self, num_segments: int) -> Outbox:
        """Private memory."""
        return private_outbox(self._mesh.world_size, num_segments)

    def connect(self, exchanges: Sequence[GroupExchange]) -> None:
        """Prepares the message of the counts."""
        self._exchanges = exchanges
        self._gathers = [gather.kernels(e.group.dim, STORAGE[e.group.dtype]) for e in exchanges]
        width = sum(2 * exchange.num_segments + 1 for exchange in exchanges)
        self._counts_out = torch.zeros(self._mesh.world_size, width, dtype=torch.int64, device="cpu")
        self._merged: list[RouteGroup | None] = [None] * len(exchanges)  # whose requests each merger holds
        self._sources: list[Sources] = [Sources(exchange.num_segments) for exchange in exchanges]
        self.barrier()

    def fetch(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Tells the owners which rows are needed and receives them."""
        self._exchange_counts(route)
        for index, group in enumerate(route.groups):
            self._exchange_slots(group)
            self._merge(index, [group])
            waiting = self._send_rows(index, group)
            meanwhile(group)
            self._wait(group, waiting)

    def _exchange_counts(self, route: Route) -> None:
        out = self._counts_out.numpy()
        column = 0
        for group in route.groups:
            segments, outbox = group.exchange.num_segments, group.workspace.outbox
            out[:, column : column + segments + 1] = outbox.segment_offsets
            out[:, column + segments + 1 : column + 2 * segments + 1] = outbox.accesses
            column += 2 * segments + 1
        received = torch.empty_like(self._counts_out)
        try:
            dist.all_to_all_single(received, self._counts_out, group=self._mesh.group)
        except RuntimeError as error:
            raise self._mesh.peer_error("exchanging counts", error) from error
        counts, column = received.numpy(), 0
        for group in route.groups:
            segments = group.exchange.num_segments
            split = column + segments + 1
            group.incoming = Incoming(counts[:, column:split], counts[:, split : split + segments])
            column += 2 * segments + 1

    def _exchange_slots(self, group: RouteGroup) -> None:
        outbox, incoming = group.workspace.outbox, group.incoming
        requests = group.workspace.requests
        requests.reserve(4 * incoming.num_entries)
        out = _Parts(outbox.lists.bytes, outbox.slots_offset, group.owner_bounds, 4)
        self._wait(group, self._post(group, out, _Parts(requests.buffer.bytes, 0, incoming.bounds, 4)))

    def _send_rows(self, index: int, group: RouteGroup) -> dist.Work:
        exchange, incoming, workspace = group.exchange, group.incoming, group.workspace
        merger, rank = exchange.merger, self._mesh.rank
        self._gathers[index].reply(
            exchange.arena.address, merger.merged_slots, merger.heads, merger.nexts, merger.num_merged,
            incoming.bounds[rank], incoming.bounds[rank + 1], workspace.replies.buffer.address,
        )  # fmt: skip
        out = _Parts(workspace.replies.buffer.bytes, 0, incoming.bounds, exchange.row_bytes)
        into = _Parts(workspace.received.buffer.bytes, 0, group.owner_bounds, exchange.row_bytes)
        return self._post(group, out, into)

    def push(self, routes: Sequence[Route], updates: Sequence[Update]) -> None:
        """Sends gradients to the owners, which merge them in the order of the ranks and update."""
        if not routes:
            return
        for index, (exchange, update) in enumerate(zip(self._exchanges, updates, strict=True)):
            waiting = [(route.groups[index], self._send_gradients(route.groups[index])) for route in routes]
            if len(routes) > 1 or self._merged[index] is not routes[0].groups[index]:
                self._merge(index, [route.groups[index] for route in routes])
            for group, work in waiting:
                self._wait(group, work)
            self._sources[index].apply(exchange, update)
            self._merged[index] = None

    def _send_gradients(self, group: RouteGroup) -> dist.Work:
        size, workspace = group.exchange.gradient_bytes, group.workspace
        out = _Parts(workspace.outbox.gradients.bytes, 0, group.owner_bounds, size)
        return self._post(group, out, _Parts(workspace.replies.buffer.bytes, 0, group.incoming.bounds, size))

    def _merge(self, index: int, groups: Sequence[RouteGroup]) -> None:
        """Merges the requests of all ranks for these routes; where their gradients will be is known already."""
        exchange = self._exchanges[index]
        size = exchange.gradient_bytes
        sources = Sources(exchange.num_segments)
        for group in groups:
            group.workspace.outbox.reserve_gradients(group.num_unique * size)
            group.workspace.replies.reserve(group.incoming.num_entries * max(size, exchange.row_bytes))
        for rank in range(self._mesh.world_size):
            for group in groups:
                if rank == self._mesh.rank:
                    sources.add_own(group)
                    continue
                workspace, incoming = group.workspace, group.incoming
                # Entries are counted over all ranks here, requests from each sender's own beginning.
                ahead = incoming.bounds[rank] - int(incoming.offsets[rank, 0])
                sources.add(
                    workspace.requests.buffer.address + 4 * ahead,
                    incoming.offsets[rank],
                    workspace.replies.buffer.address + size * ahead,
                    incoming.accesses[rank],
                )
        sources.merge(exchange)
        self._sources[index] = sources
        self._merged[index] = groups[0] if len(groups) == 1 else None

    def _post(self, group: RouteGroup, out: _Parts, into: _Parts) -> dist.Work:
        """One all-to-all. (On loopback a single call has half the median of a send and a receive per rank.)"""
        mesh, counters = self._mesh, group.exchange.counters
        counters.all_to_all_rounds += 1
        counters.bytes_sent += out.num_bytes(mesh.rank)
        counters.bytes_received += into.num_bytes(mesh.rank)
        (to_send, sizes_out), (to_fill, sizes_in) = out.trimmed(mesh.rank), into.trimmed(mesh.rank)
        try:
            work = dist.all_to_all_single(to_fill, to_send, sizes_in, sizes_out, group=mesh.group, async_op=True)
        except RuntimeError as error:
            raise mesh.peer_error(f"exchanging group {group.exchange.group.name}", error) from error
        assert work is not None
        return work

    def _wait(self, group: RouteGroup, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._mesh.peer_error(f"exchanging group {group.exchange.group.name}", error) from error

    def barrier(self) -> None:
        """Waits for all ranks."""
        try:
            dist.barrier(self._mesh.group)
        except RuntimeError as error:
            raise self._mesh.peer_error("waiting at a barrier", error) from error

    def close(self) -> None:
        """Nothing is held that does not go with the collection."""


class _Parts:
    """A buffer cut into one part a rank."""

    __slots__ = ("_begin", "_bounds", "_bytes", "_item")

    def __init__(self, buffer: np.ndarray, begin: int, bounds: Sequence[int], item_bytes: int) -> None:
        self._bytes, self._begin, self._bounds, self._item = buffer, begin, bounds, item_bytes

    def num_bytes(self, rank: int) -> int:
        """Bytes of the parts of the ranks other than this one."""
        return self._item * (self._bounds[-1] - self._bounds[0] - self._bounds[rank + 1] + self._bounds[rank])

    def trimmed(self, rank: int) -> tuple[Tensor, list[int]]:
        """The bytes and the size of each rank's part; this rank's own is left out where it is the first or the last.

        In the middle it stays, since an all-to-all wants one piece of memory; it is then copied within the rank, and
        nobody reads the copy.
        """
        sizes = [self._item * (end - begin) for begin, end in pairwise(self._bounds)]
        first, last = self._bounds[0], self._bounds[-1]
        if rank == 0:
            first, sizes[0] = self._bounds[1], 0
        elif rank == len(sizes) - 1:
            last, sizes[-1] = self._bounds[-2], 0
        count = self._item * (last - first)
        if count == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), sizes
        offset = self._begin + self._item * first
        return torch.frombuffer(self._bytes, dtype=torch.uint8, offset=offset, count=count), sizes
