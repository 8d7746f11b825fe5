"""Summed gradients: replicas stay equal because all apply the same sums, `exact` synchronization.

Every replica group sums the gradients of its own samples. The ranks of a column tell each other these sums, of the rows
that were touched, and add them in the order of the groups before they update: training equals that of one group of all
ranks, up to the order of additions.

Source: the sparse all-reduce of OPER §5.3, over the replica groups of two-dimensional sparse parallelism §3.1, which
averages weights after local updates instead (`rowmesh.exchange.averaged`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rowmesh.exchange.told import Layout, Told
from rowmesh.ops.memory import Growing, Scratch, array_at, held_bytes
from rowmesh.ops.merge_update import Merger, Singles, sum_kernels
from rowmesh.ops.simd import STORAGE
from rowmesh.optim.rules import Update

if TYPE_CHECKING:
    from rowmesh.exchange.group import GroupExchange


class SummedGradients:
    """One group's gradients, waiting for those of other replicas.

    Args:
        exchange: the group's.
    """

    def __init__(self, exchange: GroupExchange) -> None:
        self._arena, self._size = exchange.arena, exchange.gradient_bytes
        self.layout = Layout([self._size])
        self._sum = sum_kernels(exchange.group.dim, STORAGE[exchange.group.dtype])
        self._merger = Merger(1, exchange.arena.address, exchange.row_bytes)
        self._singles = Singles()
        self._slots, self._sums = Growing(), Growing()
        self._totals = Scratch()

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        kept = self._slots.num_bytes + self._sums.num_bytes
        return kept + held_bytes(self) + held_bytes(self._merger) + held_bytes(self._singles)

    def apply(
        self, merged: Any, update: Update, part: tuple[int, int] | None = None, *, num: int | None = None
    ) -> None:
        """Keeps the sums of this group's gradients of merged rows, instead of updating."""
        first, end = part or (0, merged.num_merged)
        if count := end - first:
            ctypes.memmove(self._slots.append(4 * count), merged.merged_slots + 4 * first, 4 * count)
            self._sum.sum_merged(
                merged.heads, merged.nexts, merged.addresses, first, end, merged.node_ends, merged.num_nodes,
                self._sums.append(self._size * count),
            )  # fmt: skip

    def outgoing(self) -> Told:
        """The sums of this group, which are forgotten; views that hold until more is kept."""
        count = self._slots.used // 4
        told = Told(self._slots.array(np.uint32, count), [self._sums.array(np.uint8, count, self._size)])
        self._slots.shrink(0)
        self._sums.shrink(0)
        return told

    def forget(self) -> None:
        """Nothing is kept between steps."""

    def combine(self, told: Sequence[Told], update: Update) -> None:
        """Adds what all groups told, in their order, and updates."""
        self._merge(told)
        self._apply(self._merger, update)

    def reduce(self, told: Sequence[Told]) -> Told:
        """Adds what all groups told, in their order; views that hold until the next call."""
        self._merge(told)
        merger, count = self._merger, self._merger.num_merged
        totals = self._totals.reserve(self._size * count)
        self._sum.sum_merged(
            merger.heads, merger.nexts, merger.addresses, 0, count, merger.node_ends, merger.num_nodes, totals
        )
        slots = array_at(merger.merged_slots, np.uint32, count)
        return Told(slots, [array_at(totals, np.uint8, count, self._size)])

    def accept(self, told: Told, update: Update) -> None:
        """Updates rows by what `reduce` gave, here or at another rank."""
        if len(told):
            self._singles(told.slots.ctypes.data, told.blocks[0].ctypes.data, self._size, len(told))
            self._apply(self._singles, update)

    def _merge(self, told: Sequence[Told]) -> None:
        offsets = [np.array([0, len(part)]) for part in told]
        sources = [
            (part.slots.ctypes.data, bounds.ctypes.data, part.blocks[0].ctypes.data)
            for part, bounds in zip(told, offsets, strict=True)
        ]
        self._merger(sources, self._size, sum(map(len, told)))

    def _apply(self, merged: Any, update: Update) -> None:
        self._arena.apply(merged, update.lr, update.scaling, update.step)
