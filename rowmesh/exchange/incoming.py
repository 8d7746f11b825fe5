"""Incoming: the requests of other ranks to this one, and how they are merged in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rowmesh.exchange.host_group import HostGroupExchange, HostRouteGroup
from rowmesh.exchange.route import Opened
from rowmesh.ops.merge_update import Merger
from rowmesh.ops.merge_update.sources import Sources

KEY_BYTES = 4


def bounds_of(sizes: np.ndarray) -> np.ndarray:
    """Where each piece begins, int64, and where the last one ends.

    >>> bounds_of(np.array([3, 0, 4])).tolist()
    [0, 3, 3, 7]
    """
    return np.concatenate([[0], np.cumsum(sizes)])


def sizes_of(bounds: Sequence[int]) -> list[int]:
    """The size of each piece.

    >>> sizes_of([0, 3, 3, 7])
    [3, 0, 4]
    """
    return [bounds[k + 1] - bounds[k] for k in range(len(bounds) - 1)]


class Incoming(Opened):
    """The requests of other ranks to this one, for one group of one route.

    Attributes:
        offsets: int64 `[W, S′ + 1]`, of every rank's requests, in that rank's numbering.
        accesses: int64 `[W, S′]`.
        bounds: int64 `[W + 1]`: where each rank's entries begin, over the requests of all ranks in order.
        reply_bounds: int64 `[W + 1]`: where the replies to each rank begin.
        sizes: how many entries each rank has.
    """

    __slots__ = ("accesses", "bounds", "offsets", "reply_bounds", "sizes")

    def __init__(self, offsets: np.ndarray, accesses: np.ndarray, num_replying: int) -> None:
        self.offsets = np.ascontiguousarray(offsets)
        self.accesses = accesses
        sizes = offsets[:, -1] - offsets[:, 0]
        self.bounds, self.sizes = bounds_of(sizes), sizes.tolist()
        self.reply_bounds = bounds_of(offsets[:, num_replying] - offsets[:, 0])

    @property
    def num_entries(self) -> int:
        """Requests of all ranks."""
        return int(self.bounds[-1])

    def add_to(self, sources: Sources, rank: int) -> None:
        """Adds what a rank asks for beside its requests."""


def merged_requests(
    exchange: HostGroupExchange, groups: Sequence[HostRouteGroup], ranks_per_node: int, merger: Merger | None = None
) -> Sources:
    """Merges the requests of all ranks for some routes, in the order of the ranks; gradients may come later.

    Args:
        exchange: the group's.
        groups: of the routes, with the requests of other ranks.
        ranks_per_node: G: gradients are summed node by node.
        merger: holds what is merged; default: the group's own.
    """
    size, sources = exchange.gradient_bytes, exchange.sources(merger)
    for rank in range(exchange.world_size):
        for group in groups:
            look_up, incoming = group.look_up, group.opened_as(Incoming)
            if rank == exchange.rank:
                exchange.add_own(sources, group)
            else:
                # Entries are counted over all ranks here, requests from each sender's own beginning.
                ahead = int(incoming.bounds[rank]) - int(incoming.offsets[rank, 0])
                slots = look_up.requests.buffer.address + KEY_BYTES * ahead
                gradients = look_up.replies.buffer.address + size * ahead
                sources.add(slots, incoming.offsets[rank], gradients, incoming.accesses[rank])
            incoming.add_to(sources, rank)
        if (rank + 1) % ranks_per_node == 0 and ranks_per_node < exchange.world_size:
            sources.end_node()
    sources.merge()
    return sources
