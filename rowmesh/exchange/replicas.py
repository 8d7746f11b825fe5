"""Replicas: copies of rows are kept equal by a sparse all-reduce of the gradients of touched rows.

Every rank sums its own gradients of a row first (pool's backward did) and sends them to the row's home, which merges
the touched rows of all ranks and adds in their order: a reduce-scatter of the union of touched rows, without the zeros
of rows that a rank did not touch. Here is the second half, an all-gather: the home sends the sums to the other holders,
and every holder applies the same update to the same state, so that copies stay equal to the bit.

Source: OPER §5.3 and Fig. 5 (local-aggregated sparse all-reduce).
Differs: the paper pads every rank's gradients with zeros to the union and reduces the block with a dense ring. Homes
that merge send no zeros, and add in a fixed order whatever the library does.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.route import GroupExchange
from rowmesh.exchange.update import Update
from rowmesh.exchange.workspace import held_bytes
from rowmesh.mesh.channel import Channel
from rowmesh.ops.memory import Scratch, round_up
from rowmesh.ops.merge_update import Merger, Singles, sum_kernels
from rowmesh.ops.simd import STORAGE

_SLOT_BYTES = 4


@dataclass(frozen=True)
class Sums:
    """Some rows' summed gradients, as they stand in a message: the gradients, then the rows' slots.

    Attributes:
        gradients, slots: the bytes of both.
    """

    gradients: Tensor
    slots: Tensor

    @property
    def count(self) -> int:
        """How many rows."""
        return len(self.slots) // _SLOT_BYTES


class Replicas:
    """Shares the sums of one group's copied rows among their holders.

    Args:
        exchange: the group's.
        common: counts what is not slots or gradients.
    """

    def __init__(self, exchange: GroupExchange, common: CommonCounters) -> None:
        self._exchange, self._common = exchange, common
        self._sum = sum_kernels(exchange.group.dim, STORAGE[exchange.group.dtype])
        self._singles = Singles()
        self._message, self._received = Scratch(), Scratch()
        self._doing = f"keeping the copies of group {exchange.group.name} equal"

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return held_bytes(self) + held_bytes(self._singles)

    def share(self, merger: Merger, part: tuple[int, int], channel: Channel, update: Update) -> list[Sums]:
        """Updates the merged rows of `part` here and on the other members; collective among them.

        Returns:
            What every member contributed, for `pass_on`; valid until the next call.
        """
        first, end = part
        counts = self._counts(end - first, channel)
        mine = self._room(counts, channel)
        if mine.count:
            self._sum.sum_merged(
                merger.heads, merger.nexts, merger.addresses, first, end, merger.node_ends, merger.num_nodes,
                mine.gradients.data_ptr(),
            )  # fmt: skip
            ctypes.memmove(mine.slots.data_ptr(), merger.merged_slots + _SLOT_BYTES * first, len(mine.slots))
        everyone = self._gather(counts, channel)
        for sums in everyone:
            self._apply(sums, update)
        return everyone

    def pass_on(self, received: list[Sums], channel: Channel, update: Update) -> None:
        """Tells the members of another channel what `share` brought; each passes on what the others do not know."""
        counts = self._counts(sum(sums.count for sums in received), channel)
        mine = self._room(counts, channel)
        torch.cat([sums.gradients for sums in received], out=mine.gradients)
        torch.cat([sums.slots for sums in received], out=mine.slots)
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
        """Where this rank's sums go; messages are as long as the longest, and nobody reads what is behind the sums."""
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
        return round_up((self._exchange.gradient_bytes + _SLOT_BYTES) * max(counts), 64)

    def _cut(self, message: Tensor, count: int) -> Sums:
        split = self._exchange.gradient_bytes * count
        return Sums(message[:split], message[split : split + _SLOT_BYTES * count])

    def _apply(self, sums: Sums, update: Update) -> None:
        if sums.count == 0:
            return
        slots, gradients = sums.slots.data_ptr(), sums.gradients.data_ptr()
        self._singles(slots, gradients, self._exchange.gradient_bytes, sums.count)
        self._exchange.apply(self._singles, update)
