"""Lanes of a device's collective transport: keys from the ranks that ask to the owners of rows, and gradients for them.

Rows of one kind share a lane: owners treat them alike. Rows that owners send go in one lane, those
with a copy on every rank (`CopiesLane`) or on every node (`NodeLane`) in others. Copies are kept equal by a sparse
all-reduce of the gradients of touched rows, as `rowmesh.exchange.copies` does it: the owner of a row merges the
gradients of all ranks and sends the sums to all, and each applies the same update to the same state, so that copies
stay equal to the bit. The owner counts its sums when it merges requests, while rows of the look-up travel; the count is
on the host long before the update needs it.

Ranks that have the same place in their nodes hold the same rows of those with one copy a node. Each adds up the
gradients of its own node and sends the sums to all others of them, which add them in the order of the nodes: the tree
of `rowmesh.exchange.copies.Relay`. Differs from there: sums do not go by way of the owner. A rank receives (H − 1) · n
of them for n rows that a node touches, instead of (H − 1) / H · (n + U) for U that all nodes touch.

Source: OPER §5.3 and Fig. 5 (local-aggregated sparse all-reduce), §4.3, last lines (a copy in the own node).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.exchange.device_group import DeviceGroupExchange
from rowmesh.exchange.route import Opened
from rowmesh.mesh.channel import Channel, Message
from rowmesh.ops.merge_update import DeviceMerged
from rowmesh.ops.transfer import Late, upload
from rowmesh.tables import PinnedRows
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.update_rules import Update


def _no_ids() -> NDArray[np.int64]:
    return np.empty((0, 0), np.int64)


@dataclass(frozen=True)
class Merging:
    """Requests of all ranks, merged.

    Attributes:
        merged: the handle.
        num: how many distinct slots there are, on its way to the host; None where the host need not know.
    """

    merged: DeviceMerged
    num: Late | None

    @property
    def count(self) -> int:
        """How many distinct slots there are; waits until that is here."""
        assert self.num is not None
        return self.num.read()[0]


@dataclass
class Requests:
    """The requests of one route to the owners, and those that this rank received in the same round.

    Attributes:
        keys: int32 `[U]`, sorted by owner.
        sent: how many are for each rank.
        asked: how many came from each rank.
        slots: int32 `[M]`: the slots that came, once they are here.
        ids_sent, ids_asked: int64 `[W, S]`: how many ids of each table they are for, to and from each rank; empty
            where these are not sent.
        merging: the merged requests, once they are merged.
        held: keeps their rows in fast memory, where they could be evicted; `slots` are cache slots then.
    """

    keys: Tensor
    sent: list[int]
    asked: list[int]
    slots: Tensor
    ids_sent: NDArray[np.int64] = field(default_factory=_no_ids)
    ids_asked: NDArray[np.int64] = field(default_factory=_no_ids)
    merging: Merging | None = None
    held: PinnedRows | None = None

    def take(self, slots: Tensor, held: PinnedRows | None) -> None:
        """Takes the slots that came, and what keeps their rows in fast memory."""
        self.slots, self.held = slots, held

    def ask_again(self, asked: list[int], ids_asked: NDArray[np.int64]) -> None:
        """Takes how many keys and ids come this time; what was merged of those before is of no use."""
        self.asked, self.ids_asked, self.merging = asked, ids_asked, None

    def merge(self, merge: Callable[[], Merging]) -> Merging:
        """Merges them, once."""
        if self.merging is None:
            self.merging = merge()
        return self.merging


class Lanes(Opened):
    """The memory of a device's transport about one group of a route: its requests, lane by lane."""

    __slots__ = ("_coming", "requests")

    def __init__(self, requests: list[Requests]) -> None:
        self.requests, self._coming = requests, list[Message]()

    def keep_coming(self, messages: list[Message]) -> None:
        """Keeps messages under way: gradients of rows with copies, which come to this rank, their owner."""
        self._coming = messages

    def came(self) -> Tensor:
        """What these of one route bring, once it is here; they are kept."""
        (message,) = self._coming
        return message.wait()

    def take_coming(self) -> list[Message]:
        """These messages, once."""
        messages, self._coming = self._coming, []
        return messages

    def unpin(self) -> None:
        """Rows that the current stream has read may leave fast memory."""
        for each in self.requests:
            if each.held is not None:
                each.held.note_use()
                each.held.unpin()

    def release(self) -> None:
        """Rows may leave fast memory."""
        for each in self.requests:
            if each.held is not None:
                each.held.unpin()


class Lane:
    """The requests of one kind of one group.

    Args:
        exchange: the group's.
        everyone: all ranks.
        ranks_per_node: G: gradients are summed node by node.

    Attributes:
        replies: whether rows are sent to the ranks that request them.
    """

    replies = True

    def __init__(self, exchange: DeviceGroupExchange, everyone: Channel, ranks_per_node: int) -> None:
        from rowmesh.ops.merge.cuda import merge

        self.exchange, self._everyone, self._ranks_per_node = exchange, everyone, ranks_per_node
        self._merge = merge
        self._doing = f"exchanging group {exchange.group.name}"

    @property
    def needs_num(self) -> bool:
        """Whether the host must know how many rows are updated."""
        return self.exchange.replicated is not None

    def nothing(self) -> Requests:
        """Empty requests: for a rank that has no route where others have one."""
        none = [0] * self._everyone.size
        keys = torch.empty(0, dtype=torch.int32, device=self.exchange.device)
        no_ids = np.zeros((self._everyone.size, len(self.exchange.group.tables)), np.int64)
        return Requests(keys, none, none, keys, no_ids, no_ids)

    def no_gradients(self) -> Tensor:
        """The gradients for `nothing`."""
        group = self.exchange.group
        return torch.empty(0, group.dim, dtype=compute_dtype(group.dtype), device=self.exchange.device)

    def post_keys(self, requests: Requests) -> Message:
        """Sends requests to the owners."""
        return self._everyone.post(requests.keys, requests.sent, requests.asked, self.exchange.counters, self._doing)

    def take_keys(self, requests: Requests, keys: Message) -> None:
        """Takes the requests of all ranks, once they are here, and pins their rows."""
        if requests.held is not None:  # before others are pinned, which may need the room
            requests.held.unpin()
        requests.take(*self.exchange.pin_requested(keys.wait()))

    def merged(self, requests: Sequence[Requests]) -> Merging:
        """Merges the requests of routes, in the order of the ranks, route after route; of one route only once."""
        if len(requests) == 1:
            return requests[0].merge(partial(self._merged, requests))
        return self._merged(requests)

    def _merged(self, requests: Sequence[Requests]) -> Merging:
        asked = [each.asked for each in requests]
        slots = by_rank([each.slots for each in requests], asked)
        ends = node_ends([sum(sizes) for sizes in zip(*asked, strict=True)], self._ranks_per_node, slots.device)
        merged = self._merge(slots, most=len(asked) * self._everyone.size, node_ends=ends)
        return Merging(merged, Late(merged.num) if self.needs_num else None)

    def post_gradients(self, requests: Sequence[Requests], gradients: Sequence[Tensor]) -> list[Message]:
        """Sends the gradients of several routes to the owners."""
        counters, wire = self.exchange.counters, self.exchange.gradient_wire
        return [
            self._everyone.post(sums, each.sent, each.asked, counters, self._doing, wire=wire)
            for each, sums in zip(requests, gradients, strict=True)
        ]

    def push(
        self, requests: Sequence[Requests], merging: Merging, gradients: Sequence[Message], update: Update
    ) -> None:
        """Updates the requested rows, once the gradients are here."""
        came = by_rank([message.wait() for message in gradients], [each.asked for each in requests])
        self.apply(merging, came, update)
        self.count(requests, merging)
        self.exchange.unpin_updated([each.held for each in requests])

    def count(self, requests: Sequence[Requests], merging: Merging) -> None:
        """Counts the requests of all ranks whose rows are updated now."""
        ids = np.sum([each.ids_asked.sum(0) for each in requests], axis=0)
        self.exchange.count(ids, merging.merged, [each.held for each in requests])

    def apply(self, merging: Merging, gradients: Tensor, update: Update) -> None:
        """Updates the requested rows by gradients in the order of the ranks."""
        num = merging.count if self.needs_num else None
        self.exchange.apply(merging.merged.with_gradients(gradients), update, num=num)


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


class CopiesLane(Lane):
    """The requests for rows that every rank has: they get no reply; the owner needs them to merge gradients.

    Attributes:
        counts: rows of which each rank will send sums at this push.
    """

    replies = False

    def __init__(self, exchange: DeviceGroupExchange, everyone: Channel, ranks_per_node: int) -> None:
        from rowmesh.ops.merge.cuda import singles
        from rowmesh.ops.merge_update.cuda import sum_merged

        super().__init__(exchange, everyone, ranks_per_node)
        self._sum, self._singles = sum_merged, singles
        self._doing = f"keeping the copies of group {exchange.group.name} equal"
        self.counts: Sequence[int] = ()

    @property
    def needs_num(self) -> bool:
        """True: the length of a message is the number of rows."""
        return True

    def expect(self, counts: Sequence[int]) -> None:
        """Takes the number of rows of which each rank will send sums at this push."""
        self.counts = counts

    def apply(self, merging: Merging, gradients: Tensor, update: Update) -> None:
        """Sends sums to all ranks, and updates the rows that any rank has sums of."""
        if max(self.counts):
            slots, sums, entries = self._share(merging, gradients, self._everyone, self.counts)
            merged = self._listed(slots, entries).with_gradients(sums)
            self.exchange.apply(merged, update, num=entries.numel())

    def _share(
        self, merging: Merging, gradients: Tensor, channel: Channel, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gathers the sums of all members of a channel, in messages as long as the longest.

        Returns:
            Slots and sums of all members, one after the other, and which of them are valid.
        """
        mine, most, size, counters = counts[channel.member], max(counts), channel.size, self.exchange.counters
        sums = gradients.new_empty(most, gradients.shape[1])
        slots = torch.empty(most, dtype=torch.int32, device=sums.device)
        self._sum(merging.merged, gradients, sums)
        slots[:mine] = merging.merged.slots[:mine]
        messages = [channel.post_gather(part, counters, self._doing) for part in (slots, sums)]
        entries = spread(range(0, size * most, most), counts, sums.device)
        all_slots, all_sums = (message.wait() for message in messages)
        return all_slots, all_sums, entries

    def _listed(self, slots: Tensor, entries: Tensor) -> DeviceMerged:
        """Merged requests with one gradient for the slot of each entry."""
        count = torch.full((1,), entries.numel(), dtype=torch.int32, device=slots.device)
        return replace(self._singles(slots[entries].to(torch.int64), count), order=entries)


def spread(begins: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Consecutive numbers from each beginning on, as many as its size; int64.

    >>> spread([5, 0], [2, 3], torch.device("cpu")).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = list(accumulate(sizes))
    shifts = [begin - end + size for begin, end, size in zip(begins, ends, sizes, strict=True)]
    shift, count = upload(torch.tensor([shifts, list(sizes)], device="cpu"), device)
    total = ends[-1]  # known here, or the host would wait for it
    return torch.arange(total, device=device) + torch.repeat_interleave(shift, count, output_size=total)


class NodeLane(CopiesLane):
    """The requests for rows with one copy a node.

    Args:
        exchange: the group's.
        everyone: all ranks.
        ranks_per_node: G.
        between: the ranks with this one's place in their nodes, in the order of the nodes.
    """

    replies = True

    def __init__(self, exchange: DeviceGroupExchange, everyone: Channel, ranks_per_node: int, between: Channel) -> None:
        super().__init__(exchange, everyone, ranks_per_node)
        self._between = between

    def take_keys(self, requests: Requests, keys: Message) -> None:
        """Takes the requests of the ranks of this node, once they are here."""
        requests.take(_slots_of(keys.wait(), self.exchange.address_map.key_stride), None)

    def apply(self, merging: Merging, gradients: Tensor, update: Update) -> None:
        """Sends the other nodes this node's sums, adds those of all nodes in their order, and updates."""
        place = self._everyone.member % self._ranks_per_node
        counts = self.counts[place :: self._ranks_per_node]
        if max(counts):
            slots, sums, entries = self._share(merging, gradients, self._between, counts)
            merged = self._merge(slots[entries], most=len(counts))
            assert merged.order is not None
            self.exchange.apply(replace(merged, order=entries[merged.order], gradients=sums), update)


def _slots_of(keys: Tensor, stride: int) -> Tensor:
    """Slots of keys; a key also names the owner's node, which relaying leaders need on CPUs.

    >>> _slots_of(torch.tensor([7, 107, -1], dtype=torch.int32), 100).tolist()  # the last one is 2³² − 1
    [7, 7, 95]
    """
    return ((keys.to(torch.int64) & 0xFFFFFFFF) % stride).to(torch.int32)
