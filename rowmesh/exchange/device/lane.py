"""Lane: keys from those who ask to the homes of rows, the other way round what was asked, and gradients for it.

Rows of one kind share a lane: all that homes do with them is the same. See `rowmesh.exchange.device.group`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.exchange.device.route import DeviceExchange
from rowmesh.exchange.update import Update
from rowmesh.mesh.channel import Channel, Message
from rowmesh.ops.transfer import Late, upload
from rowmesh.tables import PinnedRows
from rowmesh.tables.dense import compute_dtype

if TYPE_CHECKING:
    from rowmesh.ops.merge_update.cuda import Merged


def _no_ids() -> NDArray[np.int64]:
    return np.empty((0, 0), np.int64)


@dataclass(frozen=True)
class Merging:
    """Requests of all ranks, merged.

    Attributes:
        merged: them.
        num: how many distinct slots there are, on its way to the host; None where the host need not know.
    """

    merged: Merged
    num: Late | None

    @property
    def count(self) -> int:
        """How many distinct slots there are; waits until that is here."""
        assert self.num is not None
        return self.num.read()[0]


@dataclass
class Requests:
    """What one route of this rank asks of the homes, and what this rank was asked in the same round.

    Attributes:
        keys: int32 `[U]`, sorted by home.
        sent: how many are for each rank.
        asked: how many came from each rank.
        slots: int32 `[M]`: them, once they came.
        ids_sent, ids_asked: int64 `[W, S]`: how many ids of each table they are for, to and from each rank; empty
            where that is not told.
        merging: them, once they were merged.
        held: keeps their rows in fast memory, where they could leave it; `slots` are cache slots then.
    """

    keys: Tensor
    sent: list[int]
    asked: list[int]
    slots: Tensor
    ids_sent: NDArray[np.int64] = field(default_factory=_no_ids)
    ids_asked: NDArray[np.int64] = field(default_factory=_no_ids)
    merging: Merging | None = None
    held: PinnedRows | None = None


class Lane:
    """The requests of one kind of one group.

    Args:
        exchange: the group's.
        everyone: all ranks.
        ranks_per_node: G: gradients are summed node by node.

    Attributes:
        replies: whether rows are sent to those who ask.
    """

    replies = True

    def __init__(self, exchange: DeviceExchange, everyone: Channel, ranks_per_node: int) -> None:
        from rowmesh.ops.merge_update import cuda

        self.exchange, self._everyone, self._ranks_per_node = exchange, everyone, ranks_per_node
        self._merge = cuda.merge
        self._doing = f"exchanging group {exchange.group.name}"

    @property
    def needs_num(self) -> bool:
        """Whether the host must know how many rows are updated."""
        return self.exchange.replicated is not None

    def nothing(self) -> Requests:
        """Of a rank that has no route where others have one."""
        none = [0] * self._everyone.size
        keys = torch.empty(0, dtype=torch.int32, device=self.exchange.device)
        no_ids = np.zeros((self._everyone.size, len(self.exchange.group.tables)), np.int64)
        return Requests(keys, none, none, keys, no_ids, no_ids)

    def no_gradients(self) -> Tensor:
        """For it."""
        group = self.exchange.group
        return torch.empty(0, group.dim, dtype=compute_dtype(group.dtype), device=self.exchange.device)

    def post_keys(self, requests: Requests) -> Message:
        """Tells the homes which rows are needed."""
        return self._everyone.post(
            requests.keys, requests.sent, requests.asked, self.exchange.counters, self._doing
        )  # fmt: skip

    def take_keys(self, requests: Requests, keys: Message) -> None:
        """Takes what ranks ask for, once it is here, and makes sure that the rows are."""
        if requests.held is not None:
            requests.held.unpin()
        requests.slots, requests.held = self.exchange.hold(keys.wait())

    def merged(self, requests: Sequence[Requests]) -> Merging:
        """What was asked for several routes, merged in the order of the ranks, route after route; once for one."""
        if len(requests) == 1 and requests[0].merging is not None:
            return requests[0].merging
        asked = [each.asked for each in requests]
        slots = by_rank([each.slots for each in requests], asked)
        ends = node_ends([sum(sizes) for sizes in zip(*asked, strict=True)], self._ranks_per_node, slots.device)
        merged = self._merge(slots, most=len(asked) * self._everyone.size, node_ends=ends)
        merging = Merging(merged, Late(merged.num) if self.needs_num else None)
        if len(requests) == 1:
            requests[0].merging = merging
        return merging

    def post_gradients(self, requests: Sequence[Requests], gradients: Sequence[Tensor]) -> list[Message]:
        """Sends the gradients of several routes to the homes."""
        counters = self.exchange.counters
        return [
            self._everyone.post(sums, each.sent, each.asked, counters, self._doing)
            for each, sums in zip(requests, gradients, strict=True)
        ]

    def push(
        self, requests: Sequence[Requests], merging: Merging, gradients: Sequence[Message], update: Update
    ) -> None:  # fmt: skip
        """Updates what was asked once the gradients are here."""
        came = by_rank([message.wait() for message in gradients], [each.asked for each in requests])
        self.apply(merging, came, update)
        self.count(requests, merging)
        self.exchange.give_up([each.held for each in requests])

    def count(self, requests: Sequence[Requests], merging: Merging) -> None:
        """Counts what ranks asked of this one and is updated now."""
        ids = np.sum([each.ids_asked.sum(0) for each in requests], axis=0)
        self.exchange.count(ids, merging.merged, [each.held for each in requests])

    def apply(self, merging: Merging, gradients: Tensor, update: Update) -> None:
        """Updates what was asked by gradients in the order of the ranks."""
        self.exchange.apply(merging.merged, gradients, update, merging.count if self.needs_num else None)


def node_ends(sizes: Sequence[int], ranks_per_node: int, device: torch.device) -> Tensor | None:
    """Where the entries from each node end, given how many come from each rank; None where there is one node."""
    ends = list(accumulate(sizes))[ranks_per_node - 1 :: ranks_per_node]
    return None if len(ends) == 1 else upload(torch.tensor(ends, device="cpu"), device)


def by_rank(parts: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Tensor:
    """Entries of several routes, those from rank 0 first, of each rank route after route.

    >>> by_rank([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], [[2, 1], [1, 1]]).tolist()
    [1, 2, 4, 3, 5]
    """
    if len(parts) == 1:
        return parts[0]
    pieces = [part.split(list(of_ranks)) for part, of_ranks in zip(parts, sizes, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])
