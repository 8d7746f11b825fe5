"""One copy a node, on devices: rows that one rank of every node has and the ranks of its node ask it for.

Ranks that have the same place in their nodes hold the same of these rows; they are a *column*. Each adds up the
gradients of its own node, and all of a column tell each other these sums, which everybody adds in the order of the
nodes and applies to the same state: copies stay equal to the bit, and sums have the tree of `rowmesh.exchange.relay`.

Differs from there: sums go to all of the column, not by way of the home. A rank receives (H − 1) · n of them for n rows
that a node touches, instead of (H − 1) / H · (n + U) for U that all nodes touch.

Source: OPER §4.3, last lines (a copy in the own node).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rowmesh.exchange.device.copies import CopiesLane
from rowmesh.exchange.device.lane import Merging, Requests
from rowmesh.exchange.device.route import DeviceExchange
from rowmesh.exchange.update import Update
from rowmesh.mesh.channel import Channel, Message


class NodeLane(CopiesLane):
    """The requests for rows with one copy a node.

    Args:
        exchange: the group's.
        everyone: all ranks.
        ranks_per_node: G.
        column: the ranks with this one's place in their nodes, in the order of the nodes.
    """

    replies = True

    def __init__(
        self, exchange: DeviceExchange, everyone: Channel, ranks_per_node: int, column: Channel
    ) -> None:  # fmt: skip
        super().__init__(exchange, everyone, ranks_per_node)
        self._column = column

    def take_keys(self, requests: Requests, keys: Message) -> None:
        """Takes what ranks of this node ask for, once it is here."""
        requests.slots = _slots_of(keys.wait(), self.exchange.address_map.key_stride)

    def apply(self, merging: Merging, gradients: Tensor, update: Update) -> None:
        """Tells the column this node's sums, adds those of all nodes in their order, and updates."""
        place = self._everyone.member % self._ranks_per_node
        counts = self.counts[place :: self._ranks_per_node]
        if max(counts):
            slots, sums, entries = self._share(merging, gradients, self._column, counts)
            merged = self._merge(slots[entries], most=len(counts))
            self.exchange.apply(replace(merged, order=entries[merged.order]), sums, update)


def _slots_of(keys: Tensor, stride: int) -> Tensor:
    """Slots of keys, which also say on which node the home is, for agents that ask it.

    >>> _slots_of(torch.tensor([7, 107, -1], dtype=torch.int32), 100).tolist()  # the last one is 2³² − 1
    [7, 7, 95]
    """
    return ((keys.to(torch.int64) & 0xFFFFFFFF) % stride).to(torch.int32)
