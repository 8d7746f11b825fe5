"""Collective transport: requests, rows and gradients travel as all-to-alls between the ranks.

A step has one round for the counts of all groups, for each group one for the slots, one for the rows and one for the
gradients, however many tables the group has, and before the gradients one in which ranks compare what they push. What
a rank asks of itself never leaves it.

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

from rowmesh.errors import PeerError
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.route import GroupExchange, Route, RouteGroup
from rowmesh.exchange.transport import Sources, Update
from rowmesh.exchange.workspace import Outbox, private_outbox
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import Waiting, barrier
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
        self.common = CommonCounters()
        self._mesh = mesh
        self._is_done = Waiting(mesh)
        self._num_fetches = self._num_pushes = 0

    def allocate(self, num_bytes: int) -> Memory:
        """Private memory."""
        return Buffer(num_bytes)

    def make_outbox(self, num_segments: int) -> Outbox:
        """Private memory."""
        return private_outbox(self._mesh.world_size, num_segments)

    def connect(self, exchanges: Sequence[GroupExchange]) -> None:
        """Prepares the message that opens every fetch and push."""
        self._exchanges = exchanges
        self._doing = {exchange: f"exchanging group {exchange.group.name}" for exchange in exchanges}
        self._gathers = [gather.kernels(e.group.dim, STORAGE[e.group.dtype]) for e in exchanges]
        # To each rank: which fetch (above 0) or push (below 0) this is, then the counts, or what is pushed.
        width = 1 + sum(2 * exchange.num_segments + 1 for exchange in exchanges)
        self._opening = torch.zeros(self._mesh.world_size, width, dtype=torch.int64, device="cpu")
        self._opening_array = self._opening.numpy()
        self._merged: list[RouteGroup | None] = [None] * len(exchanges)  # whose requests each merger holds
        self._sources: list[Sources] = [Sources(exchange.num_segments) for exchange in exchanges]
        self.barrier()

    def fetch(self, route: Route, meanwhile: Callable[[RouteGroup], None]) -> None:
        """Tells the owners which rows are needed and receives them."""
        self._num_fetches += 1
        self._exchange_counts(route.groups)
        for index, group in enumerate(route.groups):
            self._exchange_slots(group)
            self._merge(index, [group])
            waiting = self._send_rows(index, group)
            meanwhile(group)
            self._wait(group, waiting)

    def _exchange_counts(self, groups: Sequence[RouteGroup]) -> None:
        out, column = self._opening_array, 1
        for group in groups:
            segments, outbox = group.exchange.num_segments, group.workspace.outbox
            out[:, column : column + segments + 1] = outbox.segment_offsets
            out[:, column + segments + 1 : column + 2 * segments + 1] = outbox.accesses
            column += 2 * segments + 1
        counts, column = self._open(self._num_fetches), 1
        for group in groups:
            segments = group.exchange.num_segments
            split = column + segments + 1
            group.incoming = Incoming(counts[:, column:split], counts[:, split : split + segments])
            column += 2 * segments + 1

    def _open(self, operation: int) -> np.ndarray:
        """Exchanges the opening message: one row from every rank.

        Raises:
            PeerError: a rank does something else; all ranks learn it here, so nobody is left waiting.
        """
        self._opening_array[:, 0] = operation
        received = torch.empty_like(self._opening)
        try:
            work = dist.all_to_all_single(received, self._opening, group=self._mesh.group, async_op=True)
        except RuntimeError as error:
            raise self._mesh.peer_error("exchanging counts", error) from error
        self._is_done(work, "exchanging counts")
        num_bytes = self._opening.nbytes - self._opening[0].nbytes
        self.common.all_to_all_rounds += 1
        self.common.bytes_sent += num_bytes
        self.common.bytes_received += num_bytes
        rows = received.numpy()
        operations = rows[:, 0].tolist()
        if operations.count(operation) != len(operations):
            raise PeerError(
                f"rank {self._mesh.rank}: ranks are out of step: {_describe(operations)}; every rank must call forward "
                f"and step equally often and in the same order"
            )
        return rows

    def _exchange_slots(self, group: RouteGroup) -> None:
        outbox, incoming, workspace = group.workspace.outbox, group.incoming, group.workspace
        gradient_bytes, row_bytes = group.exchange.gradient_bytes, group.exchange.row_bytes
        outbox.reserve_gradients(group.num_unique * gradient_bytes)
        workspace.replies.reserve(incoming.num_entries * max(gradient_bytes, row_bytes))
        workspace.requests.reserve(4 * incoming.num_entries)
        out = _Parts(outbox.lists.bytes, outbox.slots_offset, group.stop_bounds, 4)
        into = _Parts(workspace.requests.buffer.bytes, 0, incoming.bounds, 4)
        self._wait(group, self._post(group, out, into))

    def _send_rows(self, index: int, group: RouteGroup) -> dist.Work:
        exchange, incoming, workspace = group.exchange, group.incoming, group.workspace
        merger, rank = exchange.merger, self._mesh.rank
        self._gathers[index].reply(
            exchange.arena.address, merger.merged_slots, merger.heads, merger.nexts, merger.num_merged,
            incoming.bounds[rank], incoming.bounds[rank + 1], workspace.replies.buffer.address,
        )  # fmt: skip
        out = _Parts(workspace.replies.buffer.bytes, 0, incoming.bounds, exchange.row_bytes)
        into = _Parts(workspace.received.buffer.bytes, 0, group.reply_bounds, exchange.row_bytes)
        return self._post(group, out, into)

    def push(self, routes: Sequence[Route], updates: Sequence[Update]) -> None:
        """Sends gradients to the owners, which merge them in the order of the ranks and update."""
        most, is_equal = self._compare(routes)
        if not is_equal:
            routes = self._request_again(routes, most)
        for index, (exchange, update) in enumerate(zip(self._exchanges, updates, strict=True)):
            groups = [route.groups[index] for route in routes]
            waiting = [(group, self._send_gradients(group)) for group in groups]
            if groups and (len(groups) > 1 or self._merged[index] is not groups[0]):
                self._merge(index, groups)
            for group, work in waiting:
                self._wait(group, work)
            if groups and self._sources[index].num_entries:
                self._sources[index].apply(exchange, update)
            self._merged[index] = None

    def _compare(self, routes: Sequence[Route]) -> tuple[int, bool]:
        """The most routes that a rank pushes, and whether all ranks push the same ones."""
        self._num_pushes += 1
        mine = [len(routes), hash(tuple(route.number for route in routes))]
        self._opening_array[:, 1:3] = mine
        pushed = self._open(-self._num_pushes)[:, 1:3].tolist()
        return max(count for count, _ in pushed), pushed.count(mine) == len(pushed)

    def _request_again(self, routes: Sequence[Route], most: int) -> list[Route]:
        """Brings routes that not all ranks push in line: ranks without one ask for nothing, the others once more.

        Owners know the requests of the look-ups, but not those of the ranks that push alone: seldom, and never twice.
        """
        aligned = [*routes]
        while len(aligned) < most:
            aligned.append(Route.of_nothing(self._exchanges))
        for route in aligned:
            self._exchange_counts(route.groups)
            for group in route.groups:
                self._exchange_slots(group)
        self._merged = [None] * len(self._exchanges)
        return aligned

    def _send_gradients(self, group: RouteGroup) -> dist.Work:
        size, workspace = group.exchange.gradient_bytes, group.workspace
        out = _Parts(workspace.outbox.gradients.bytes, 0, group.stop_bounds, size)
        return self._post(group, out, _Parts(workspace.replies.buffer.bytes, 0, group.incoming.bounds, size))

    def _merge(self, index: int, groups: Sequence[RouteGroup]) -> None:
        """Merges the requests of all ranks for these routes; where their gradients will be is known already."""
        exchange = self._exchanges[index]
        size = exchange.gradient_bytes
        sources = Sources(exchange.num_segments)
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
            raise mesh.peer_error(self._doing[group.exchange], error) from error
        assert work is not None
        return work

    def _wait(self, group: RouteGroup, work: dist.Work) -> None:
        self._is_done(work, self._doing[group.exchange])

    def barrier(self) -> None:
        """Waits for all ranks."""
        barrier(self._mesh, "waiting at a barrier")

    def close(self) -> None:
        """Nothing is held that does not go with the collection."""


def _describe(operations: Sequence[int]) -> str:
    """What each rank does, as in `_open`."""
    names = [f"forward {number}" if number > 0 else f"step {-number}" for number in operations]
    return ", ".join(f"rank {rank} is in {name}" for rank, name in enumerate(names))


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
