"""Copies on devices: rows that every rank has, kept equal by a sparse all-reduce of the gradients of touched rows.

As `rowmesh.exchange.replicas` does it: the home of a row merges the gradients of all ranks and sends the sums to all,
and everybody applies the same update to the same state, so that copies stay equal to the bit. How many rows a home has
sums of is merged while rows of the look-up travel, and was copied to the host long before the update needs it.

Source: OPER §5.3 and Fig. 5 (local-aggregated sparse all-reduce).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rowmesh.exchange.device.lane import Lane, Merging
from rowmesh.exchange.device.route import DeviceExchange
from rowmesh.exchange.update import Update
from rowmesh.mesh.channel import Channel
from rowmesh.ops.transfer import upload

if TYPE_CHECKING:
    from rowmesh.ops.merge_update.cuda import Merged


class CopiesLane(Lane):
    """The requests for rows that everybody has: they get no answer, and tell the home for what gradients will be.

    Attributes:
        counts: rows of which each rank will send sums at this push.
    """

    replies = False

    def __init__(self, exchange: DeviceExchange, everyone: Channel, ranks_per_node: int) -> None:
        from rowmesh.ops.merge_update import cuda

        super().__init__(exchange, everyone, ranks_per_node)
        self._sum, self._singles = cuda.sum_merged, cuda.singles
        self._doing = f"keeping the copies of group {exchange.group.name} equal"
        self.counts: Sequence[int] = ()

    @property
    def needs_num(self) -> bool:
        """Messages are as long as the rows are many."""
        return True

    def apply(self, merging: Merging, gradients: Tensor, update: Update) -> None:
        """Sends sums to all ranks, and updates the rows that anybody has sums of."""
        if max(self.counts):
            slots, sums, entries = self._share(merging, gradients, self._everyone, self.counts)
            self.exchange.apply(self._listed(slots, entries), sums, update, entries.numel())

    def _share(
        self, merging: Merging, gradients: Tensor, channel: Channel, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What all members of a channel have sums of, in messages as long as the longest.

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

    def _listed(self, slots: Tensor, entries: Tensor) -> Merged:
        """One gradient each for the slots of some entries."""
        count = torch.full((1,), entries.numel(), dtype=torch.int32, device=slots.device)
        return replace(self._singles(slots[entries].to(torch.int64), count), order=entries)


def spread(begins: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Int64: the numbers from each beginning on, so many of each.

    >>> spread([5, 0], [2, 3], torch.device("cpu")).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = list(accumulate(sizes))
    shifts = [begin - end + size for begin, end, size in zip(begins, ends, sizes, strict=True)]
    shift, count = upload(torch.tensor([shifts, list(sizes)], device="cpu"), device)
    total = ends[-1]  # known here, or the host would wait for it
    return torch.arange(total, device=device) + torch.repeat_interleave(shift, count, output_size=total)
