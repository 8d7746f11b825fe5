"""Whole tables on devices: all rows and moments are averaged over replicas, touched or not, `dense` synchronization.

What `rowmesh.exchange.telling.TellTables` is on a CPU, over tensors on a device: nobody keeps account of what is
touched, the ranks of a column gather some rows of all of them at a time, and each averages them in the order of the
groups, so that all come to the same bits.

Source: two-dimensional sparse parallelism, Algorithm 1, lines 5-10.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rowmesh.exchange.averaged import CHUNK_BYTES
from rowmesh.exchange.column import Column
from rowmesh.mesh.channel import Channel
from rowmesh.optim.rules import Update

if TYPE_CHECKING:
    from rowmesh.exchange.group import GroupExchange
    from rowmesh.ops.merge_update.cuda import Merged


class WholeTables:
    """One group's rows and optimizer state; updates of a replica group are its own, as if there were no others.

    Args:
        exchange: the group's.
        replica: the number of this rank's group.

    Attributes:
        counts: rows that each replica tells of its own accord: none.
    """

    num_bytes = 0

    def __init__(self, exchange: GroupExchange, replica: int) -> None:
        from rowmesh.ops.average.cuda import average

        self._average, self._replica = average, replica
        self.counters, self.counts = exchange.counters.synchronization, list[int]()
        self.doing = f"synchronizing the replicas of group {exchange.group.name}"
        tensors = [exchange.arena.rows, *exchange.arena.state.values()]
        self._tables = [tensor if tensor.dim() == 2 else tensor.unsqueeze(1) for tensor in tensors]

    @property
    def replicated(self) -> WholeTables:
        """The group is itself what is kept of it: nothing."""
        return self

    def forget(self) -> None:
        """Nothing is kept between steps."""

    def parts(self) -> Iterator[slice]:
        """All rows, some at a time."""
        step = max(CHUNK_BYTES // sum(table.shape[1] * table.itemsize for table in self._tables), 1)
        num_rows = len(self._tables[0])
        return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))

    def read(self, part: slice) -> list[Tensor]:
        """Some rows and their states, as views."""
        return [table[part] for table in self._tables]

    def combine(self, part: slice, told: Sequence[Tensor]) -> None:
        """Puts the means of some rows and states into place; of each `told` has those of all groups, in their order."""
        count = part.stop - part.start
        num_groups = len(told[0]) // count
        merged = _of_all(part, num_groups, told[0].device)
        ends = count * torch.arange(num_groups + 1, device=told[0].device)
        for table, rows in zip(self._tables, told, strict=True):
            self._average(table, merged, rows, ends, self._replica, rows[:count])  # all told all: no row is as before


def _of_all(part: slice, num_groups: int, device: torch.device) -> Merged:
    """Neighbouring slots, of which each group has an entry; what `merge` would find by sorting them."""
    from rowmesh.ops.merge_update.cuda import Merged

    count = part.stop - part.start
    entries = torch.arange(num_groups * count, device=device)
    starts = torch.arange(0, num_groups * count + 1, num_groups, dtype=torch.int32, device=device)
    ranks = (entries // num_groups + 1).to(torch.int32)
    num = torch.full((1,), count, dtype=torch.int32, device=device)
    slots = torch.arange(part.start, part.stop, device=device)
    return Merged(entries.view(num_groups, count).T.flatten(), slots, starts, ranks, num, num_groups)


class AverageTables:
    """The verbs of `rowmesh.exchange.telling`; both are collective among the column.

    Args:
        column: its hosts.
        channel: between its devices.
        groups: what is averaged.
    """

    def __init__(self, column: Column, channel: Channel, groups: Sequence[WholeTables]) -> None:
        self._column, self._channel, self._groups = column, channel, groups

    def tell(self) -> None:
        """Averages; the host waits for nothing but that the others do the same."""
        self._column.count(self._groups, [0] * len(self._groups))
        for group in self._groups:
            for part in group.parts():
                read = group.read(part)
                messages = [self._channel.post_gather(each, group.counters, group.doing) for each in read]
                group.combine(part, [message.wait() for message in messages])
                group.counters.rows += part.stop - part.start

    def finish(self, updates: Sequence[Update]) -> None:
        """Nothing travels."""
