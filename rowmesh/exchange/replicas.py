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
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.messages import Channel
from rowmesh.exchange.route import GroupExchange
from rowmesh.ops.memory import Scratch
from rowmesh.ops.merge_update import Merger, Singles, sum_kernels
from rowmesh.ops.simd import STORAGE

if TYPE_CHECKING:
    from rowmesh.exchange.transport import Update


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
        self._message = Scratch()
        self._doing = f"keeping the copies of group {exchange.group.name} equal"

    def share(
        self, merger: Merger, part: tuple[int, int], channel: Channel, update: Update
    ) -> list[tuple[int, Tensor]]:
        """Updates the merged rows of `part` here and on the other members; collective among them.

        Returns:
            What every member contributed, for `pass_on`.
        """
        message = self._pack(merger, part)
        everyone = self._gather(part[1] - part[0], message, channel)
        for count, theirs in everyone:
            self._apply(count, theirs, update)
        return everyone

    def pass_on(self, received: list[tuple[int, Tensor]], channel: Channel, update: Update) -> None:
        """Tells the members of another channel what `share` brought; each passes on what the others do not know."""
        size = self._exchange.gradient_bytes
        slots = [message[: 4 * count] for count, message in received]
        sums = [message[_room(count) :][: size * count] for count, message in received]
        count = sum(n for n, _ in received)
        padding = torch.zeros(_room(count) - 4 * count, dtype=torch.uint8, device="cpu")
        message = torch.cat([*slots, padding, *sums])
        for member, (number, theirs) in enumerate(self._gather(count, message, channel)):
            if member != channel.member:
                self._apply(number, theirs, update)

    def _pack(self, merger: Merger, part: tuple[int, int]) -> Tensor:
        """Slots (uint32), from the next multiple of 64 bytes the sums."""
        first, end = part
        count, size = end - first, self._exchange.gradient_bytes
        address = self._message.reserve(_room(count) + size * count)
        array = self._message.buffer.bytes
        if count:
            ctypes.memmove(address, merger.merged_slots + 4 * first, 4 * count)
            self._sum.sum_merged(
                merger.heads, merger.nexts, merger.addresses, first, end, merger.node_ends, merger.num_nodes,
                address + _room(count),
            )  # fmt: skip
        return torch.from_numpy(array[: _room(count) + size * count])

    def _gather(self, count: int, message: Tensor, channel: Channel) -> list[tuple[int, Tensor]]:
        """Every member's number of rows and message."""
        own = torch.tensor([count], dtype=torch.int64, device="cpu")
        counts = [int(each) for each in channel.gather(own, self._common, self._doing)]
        most = max(counts)
        if most == 0:
            return [(0, message[:0])] * len(counts)
        padded = torch.zeros(_room(most) + self._exchange.gradient_bytes * most, dtype=torch.uint8, device="cpu")
        padded[: len(message)] = message
        return list(zip(counts, channel.gather(padded, self._exchange.counters, self._doing), strict=True))

    def _apply(self, count: int, message: Tensor, update: Update) -> None:
        if count == 0:
            return
        size, address = self._exchange.gradient_bytes, message.data_ptr()
        self._singles(address, address + _room(count), size, count)
        self._exchange.arena.apply(self._singles, update.lr, update.scaling, update.step)


def _room(count: int) -> int:
    """Where the sums begin behind so many slots."""
    return -(-4 * count // 64) * 64
