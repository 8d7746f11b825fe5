"""Synchronizer: keeps the replicas of tables on several groups of ranks together.

    exact     gradients are summed over groups before the update: the same model as with one group
    average   groups update for themselves; rows and moments are averaged every so many steps

Both send only rows that were touched, along columns (`rowmesh.mesh.grid`). Two replicas tell each other everything at
once. Of more, each row has a home, the replica of its slot modulo M, which adds up and tells the result: a rank then
receives (M − 1) / M · (n + U) rows, where a group touches n and all of them U, instead of (M − 1) · n. What was sent
arrives while the program goes on to the next look-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.errors import PeerError
from rowmesh.exchange.averaged import AveragedRows
from rowmesh.exchange.counters import SyncCounters
from rowmesh.exchange.messages import Channel, Parts
from rowmesh.exchange.route import GroupExchange
from rowmesh.exchange.summed import SummedGradients
from rowmesh.exchange.told import Layout, Told
from rowmesh.exchange.update import Update
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.ops.memory import Scratch

_NO_UPDATE = Update(0.0, 0.0, 0)  # averages need none


class Replicated(Protocol):
    """What one group of tables does; see `SummedGradients` and `AveragedRows`."""

    layout: Layout

    @property
    def num_bytes(self) -> int: ...
    def outgoing(self) -> Told: ...
    def forget(self) -> None: ...
    def combine(self, told: Sequence[Told], update: Update) -> None: ...
    def reduce(self, told: Sequence[Told]) -> Told: ...
    def accept(self, told: Told, update: Update) -> None: ...


class _Group:
    """One group's messages."""

    def __init__(self, replicated: Replicated, name: str, counters: SyncCounters) -> None:
        self.replicated, self.layout, self.counters = replicated, replicated.layout, counters
        self.doing = f"synchronizing the replicas of group {name}"
        self.told: list[Told] = []  # this rank's, for each replica
        self.counts: list[int] = []  # rows that each replica tells
        self.works: list[dist.Work] = []  # under way
        self.message, self.received = Scratch(), Scratch()

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.replicated.num_bytes + self.message.num_bytes + self.received.num_bytes


class Synchronizer:
    """Keeps the replicas of some groups of tables together. Collective among a column.

    Args:
        setting: how.
        exchanges: the groups'.
        column: the ranks that hold what this one holds, in the order of their replicas.
        second: another process group of theirs, where they are two and have one.
    """

    def __init__(
        self, setting: Synchronization, exchanges: Sequence[GroupExchange], column: Mesh, second: Any = None
    ) -> None:
        self.setting, self._column = setting, column
        self._replica, self._size = column.rank, column.world_size
        self._channel = Channel(column, column.group, column.rank, column.world_size)
        self._ways = [self._channel, self._channel]  # by who sends, of two
        if second is not None:
            self._ways[1] = Channel(column, second, column.rank, column.world_size)
        self._groups: list[_Group] = []
        for exchange in exchanges:
            exchange.replicated = (
                SummedGradients(exchange) if setting.mode == "exact" else AveragedRows(exchange, self._replica)
            )
            self._groups.append(_Group(exchange.replicated, exchange.group.name, exchange.counters.synchronization))
        self._updates: Sequence[Update] = ()
        self._num_calls = 0  # of `start` outside of steps
        self._operation = 0  # above 0 a step, below a call of `start`: the same on all ranks
        self.is_under_way = False

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(group.num_bytes for group in self._groups)

    def begin(self, updates: Sequence[Update]) -> bool:
        """After gradients were pushed within this rank's replica group; what is sent travels until `finish`.

        Returns:
            Whether a synchronization was due.
        """
        self._updates, self._operation = updates, updates[0].step
        if self._operation % self.setting.every:
            return False
        self._tell()
        return True

    def start(self) -> None:
        """As `begin` where a synchronization is due, between two steps; for rows that are averaged."""
        self._num_calls += 1
        self._updates, self._operation = [_NO_UPDATE] * len(self._groups), -self._num_calls
        self._tell()

    def forget(self) -> None:
        """Takes the rows of this rank as equal to those of the other replicas, whoever changed them."""
        for group in self._groups:
            group.replicated.forget()

    def _tell(self) -> None:
        if self.setting.dense:
            self._count([0] * len(self._groups))
            self._average_tables()
        elif self._size == 2:
            self._tell_each_other()
        else:
            self._tell_homes()

    def finish(self) -> None:
        """Waits for what other replicas told, and updates."""
        if not self.is_under_way:
            return
        self.is_under_way = False
        if self._size == 2:
            for group, update in zip(self._groups, self._updates, strict=True):
                group.replicated.combine(self._swapped(group), update)
        else:
            self._add_up_and_tell()

    def _tell_each_other(self) -> None:
        for group in self._groups:
            group.told = [group.replicated.outgoing()] * self._size
        self._count([len(group.told[0]) for group in self._groups])
        for group in self._groups:
            self._swap(group)
        self.is_under_way = True

    def _swap(self, group: _Group) -> None:
        """Sends rows to the one other replica, and its rows here, over different connections.

        For gloo asks for bytes over the connection that it sends over: behind bytes of its own the request would be
        late, and the two directions would take turns.
        """
        layout, mine, other = group.layout, self._replica, 1 - self._replica
        sizes = [layout.num_bytes(count) for count in group.counts]
        group.message.reserve(sizes[mine])
        group.received.reserve(sizes[other])
        layout.write(group.told[mine], group.message.buffer.bytes)
        sent, received = group.message.buffer.bytes, group.received.buffer.bytes
        out, nothing = Parts(sent, 0, _all_of(other, sizes[mine]), 1), Parts(sent, 0, [0, 0, 0], 1)
        into = Parts(received, 0, _all_of(other, sizes[other]), 1)
        group.works = [
            way.post(*((out, nothing) if sender == mine else (nothing, into)), group.counters, group.doing)
            for sender, way in enumerate(self._ways)
            if sizes[sender]
        ]
        group.counters.rows += len(group.told[mine])

    def _swapped(self, group: _Group) -> list[Told]:
        """What both replicas told."""
        self._wait(group)
        told = group.layout.read(group.received.buffer.bytes, group.counts[1 - self._replica])
        return [group.told[0], told] if self._replica == 0 else [told, group.told[1]]

    def _wait(self, group: _Group) -> None:
        for work in group.works:
            self._channel.wait(work, group.doing)
        group.works = []

    def _count(self, own: Sequence[int]) -> None:
        """Learns how many rows each replica tells of each group."""
        counts = torch.empty(self._size, 1 + len(own), dtype=torch.int64, device="cpu")
        mine = torch.tensor([self._operation, *own], dtype=torch.int64, device="cpu")
        self._channel.gather(mine, list(counts), self._groups[0].counters, "synchronizing replicas")
        self._expect(counts)

    def _expect(self, counts: Tensor) -> None:
        """Takes what replicas say that they do and will tell.

        Raises:
            PeerError: a rank does something else.
        """
        operations, *columns = counts.T.tolist()
        if operations.count(self._operation) != len(operations):
            name = self._column.name
            calls = [f"step {number}" if number > 0 else f"synchronize {-number}" for number in operations]
            done = ", ".join(f"rank {name(replica)} is in {call}" for replica, call in enumerate(calls))
            raise PeerError(
                f"rank {name(self._replica)}: ranks are out of step: {done}; every rank must call forward, step and "
                "synchronize equally often and in the same order"
            )
        for group, column in zip(self._groups, columns, strict=True):
            group.counts = column

    def _post(self, group: _Group, told: Told) -> None:
        """Sends rows to all of the column; messages are as long as the longest."""
        size = group.layout.num_bytes(max(group.counts))
        group.message.reserve(size)
        group.layout.write(told, group.message.buffer.bytes)
        group.received.reserve(size * self._size)
        if max(group.counts):
            mine = group.message.buffer.tensor(torch.uint8, size)
            received = group.received.buffer.tensor(torch.uint8, self._size, size)
            group.works = [self._channel.post_gather(mine, list(received), group.counters, group.doing)]
        group.counters.rows += len(told)

    def _receive(self, group: _Group) -> list[Told]:
        """What each replica told; this rank's own as it was."""
        self._wait(group)
        size = group.layout.num_bytes(max(group.counts))
        received = group.received.buffer.bytes
        return [
            group.told[replica] if replica == self._replica else group.layout.read(received[size * replica :], count)
            for replica, count in enumerate(group.counts)
        ]

    def _tell_homes(self) -> None:
        for group in self._groups:
            group.told = group.replicated.outgoing().split(self._size)
        own = [[self._operation, *(len(group.told[home]) for group in self._groups)] for home in range(self._size)]
        counts = self._channel.exchange_equal(
            torch.tensor(own, dtype=torch.int64, device="cpu"), self._groups[0].counters, "synchronizing replicas"
        )
        self._expect(counts)
        for group in self._groups:
            self._scatter(group)
        self.is_under_way = True

    def _scatter(self, group: _Group) -> None:
        """Sends each home the rows that are its."""
        layout = group.layout
        out = [0, *accumulate(layout.num_bytes(len(told)) for told in group.told)]
        into = [0, *accumulate(layout.num_bytes(count) for count in group.counts)]
        group.message.reserve(out[-1])
        group.received.reserve(into[-1])
        for told, begin in zip(group.told, out[:-1], strict=True):
            layout.write(told, group.message.buffer.bytes[begin:])
        sent, received = group.message.buffer.bytes, group.received.buffer.bytes
        parts = Parts(sent, 0, out, 1), Parts(received, 0, into, 1)
        group.works = [self._channel.post(*parts, group.counters, group.doing)]
        group.counters.rows += sum(map(len, group.told)) - len(group.told[self._replica])

    def _gathered(self, group: _Group) -> list[Told]:
        """What all replicas told this home."""
        self._wait(group)
        begins = [0, *accumulate(group.layout.num_bytes(count) for count in group.counts)]
        received = group.received.buffer.bytes
        return [
            group.told[replica] if replica == self._replica else group.layout.read(received[begins[replica] :], count)
            for replica, count in enumerate(group.counts)
        ]

    def _add_up_and_tell(self) -> None:
        for group in self._groups:
            group.told = [group.replicated.reduce(self._gathered(group))] * self._size
        self._count([len(group.told[0]) for group in self._groups])
        for group in self._groups:
            self._post(group, group.told[self._replica])
        for group, update in zip(self._groups, self._updates, strict=True):
            for told in self._receive(group):
                group.replicated.accept(told, update)

    def _average_tables(self) -> None:
        """The paper's: all rows, whether they differ or not."""
        for group, update in zip(self._groups, self._updates, strict=True):
            replicated = group.replicated
            assert isinstance(replicated, AveragedRows)
            for told in replicated.whole():
                blocks = [self._gather_block(group, block) for block in told.blocks]
                replicated.combine(
                    [
                        told if replica == self._replica else Told(told.slots, [block[replica] for block in blocks])
                        for replica in range(self._size)
                    ],
                    update,
                )
                group.counters.rows += len(told)

    def _gather_block(self, group: _Group, block: np.ndarray) -> list[np.ndarray]:
        everyone = torch.empty(self._size, *block.shape, dtype=torch.uint8, device="cpu")
        self._channel.gather(torch.from_numpy(block), list(everyone), group.counters, group.doing)
        return list(everyone.numpy())


def _all_of(member: int, size: int) -> list[int]:
    """The bounds of two members' parts where one has everything."""
    return [0, size, size] if member == 0 else [0, 0, size]
