"""What the collective transport of a device does for one group: keys, rows and gradients as all-to-alls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rowmesh.exchange.device_messages import DeviceChannel, Message
from rowmesh.exchange.device_route import DeviceExchange, DeviceRouteGroup
from rowmesh.exchange.update import Update
from rowmesh.ops.transfer import upload
from rowmesh.tables.arena import compute_dtype

if TYPE_CHECKING:
    from rowmesh.ops.merge_update.cuda import Merged


@dataclass
class Entries:
    """What one route of this rank asks of the owners and tells them, and what owners were asked in the same round.

    Attributes:
        keys: int32 `[U]`, sorted by owner.
        sent: how many are for each rank.
        asked: how many came from each rank.
        requests: int32 `[M]`: them.
        gradients: `[U, D]`, in the order of the keys.
    """

    keys: Tensor
    sent: list[int]
    asked: list[int]
    requests: Tensor
    gradients: Tensor


class DeviceGroup:
    """One group's messages.

    Args:
        exchange: the group's.
        everyone: all ranks.
        ranks_per_node: G: gradients are summed node by node.
    """

    def __init__(self, exchange: DeviceExchange, everyone: DeviceChannel, ranks_per_node: int) -> None:
        from rowmesh.ops.gather import cuda as gather
        from rowmesh.ops.merge_update import cuda as merge_update

        self.exchange, self._everyone, self._ranks_per_node = exchange, everyone, ranks_per_node
        self._gather, self._merge = gather.gather, merge_update.merge
        self._doing = f"exchanging group {exchange.group.name}"

    def expect(self, group: DeviceRouteGroup, sent: np.ndarray, asked: np.ndarray) -> None:
        """Takes what this rank asks and is asked for, keys by rank and segment, int64 `[W, S′]` each."""
        group.sent, group.asked = sent.sum(1).tolist(), asked.sum(1).tolist()
        group.num_unique = sum(group.sent)
        self.exchange.counters.unique_ids += group.num_unique

    def post_keys(self, group: DeviceRouteGroup) -> Message:
        """Tells the owners which rows are needed."""
        keys = group.routed.keys[: group.num_unique]
        return self._everyone.post(keys, group.sent, group.asked, self.exchange.counters, self._doing)

    def post_rows(self, group: DeviceRouteGroup, keys: Message) -> Message:
        """Replies, once it is here, to what was asked."""
        group.requests = keys.wait()
        rows = self._gather(self.exchange.arena.rows, group.requests)
        return self._everyone.post(rows, group.asked, group.sent, self.exchange.counters, self._doing)

    def take_rows(self, group: DeviceRouteGroup, rows: Message) -> None:
        """Makes what came what is pooled."""
        group.source, group.slots = rows.wait(), None

    def entries(self, group: DeviceRouteGroup) -> Entries:
        """What a route pushes."""
        return Entries(
            group.routed.keys[: group.num_unique], group.sent, group.asked, group.requests, group.summed
        )  # fmt: skip

    def nothing(self) -> Entries:
        """What a rank pushes that has no route where others have one."""
        exchange, none = self.exchange, [0] * self._everyone.size
        keys = torch.empty(0, dtype=torch.int32, device=exchange.device)
        dtype = compute_dtype(exchange.group.dtype)
        gradients = torch.empty(0, exchange.group.dim, dtype=dtype, device=exchange.device)
        return Entries(keys, none, none, keys, gradients)

    def ask_again(self, entries: Entries, asked: list[int]) -> None:
        """Tells the owners which rows gradients are for; so many come from each rank."""
        keys = self._everyone.post(entries.keys, entries.sent, asked, self.exchange.counters, self._doing)
        entries.asked, entries.requests = asked, keys.wait()

    def post_gradients(self, pushed: Sequence[Entries]) -> list[Message]:
        """Sends the gradients of several routes to the owners."""
        counters = self.exchange.counters
        return [self._everyone.post(each.gradients, each.sent, each.asked, counters, self._doing) for each in pushed]

    def push(self, pushed: Sequence[Entries], gradients: Sequence[Message], update: Update) -> None:
        """Merges what was asked, and updates once the gradients are here."""
        if not pushed:
            return
        asked = [each.asked for each in pushed]
        slots = _by_rank([each.requests for each in pushed], asked)
        merged = self.merge(slots, asked)
        came = _by_rank([message.wait() for message in gradients], asked)
        self.exchange.arena.apply(merged, came, update.lr, update.scaling, update.step)

    def merge(self, slots: Tensor, asked: Sequence[Sequence[int]]) -> Merged:
        """The distinct slots among what ranks asked for, so many of each in every route."""
        most = len(asked) * self._everyone.size
        return self._merge(slots, most=most, node_ends=self._node_ends(asked))

    def _node_ends(self, asked: Sequence[Sequence[int]]) -> Tensor | None:
        """Where the entries from each node end; None where there is one node."""
        ends = list(accumulate(sum(sizes) for sizes in zip(*asked, strict=True)))
        of_nodes = ends[self._ranks_per_node - 1 :: self._ranks_per_node]
        return None if len(of_nodes) == 1 else upload(torch.tensor(of_nodes), self.exchange.device)


def compose(group: DeviceRouteGroup) -> None:
    """Has ids read the rows that were fetched, which stand in the order in which they were asked for: sorted."""
    uniques = group.routed.uniques[: group.num_unique].to(torch.int64)
    places = torch.arange(group.num_unique, dtype=torch.int32, device=uniques.device)
    group.recover = places.scatter(0, uniques, places).index_select(0, group.unique.inverse)


def _by_rank(parts: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> Tensor:
    """Entries of several routes, those from rank 0 first, of each rank route after route.

    >>> _by_rank([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], [[2, 1], [1, 1]]).tolist()
    [1, 2, 4, 3, 5]
    """
    if len(parts) == 1:
        return parts[0]
    pieces = [part.split(list(of_ranks)) for part, of_ranks in zip(parts, sizes, strict=True)]
    return torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])
