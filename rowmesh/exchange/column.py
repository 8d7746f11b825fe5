"""Column: the ranks that hold the same shard, one of each replica, and what they tell each other of each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rowmesh.errors import PeerError
from rowmesh.exchange.counters import SyncCounters
from rowmesh.exchange.handshake import Step, check_rates, joined, parted
from rowmesh.exchange.told import Layout, Told
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel, Message
from rowmesh.ops.memory import Scratch
from rowmesh.optim.rules import Update


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


class Counted(Protocol):
    """A group of which ranks say how many rows they tell."""

    counters: SyncCounters
    counts: list[int]


class ColumnGroup:
    """One group's messages.

    Attributes:
        own: what this rank knows itself of the rows that are told.
        counts: rows that each replica tells this one.
        works: what is under way.
    """

    def __init__(self, replicated: Replicated, name: str, counters: SyncCounters) -> None:
        self.replicated, self.layout, self.counters = replicated, replicated.layout, counters
        self.doing = f"synchronizing the replicas of group {name}"
        self.own: Told
        self.counts: list[int] = []
        self.works: list[Message] = []
        self.message, self.received = Scratch(), Scratch()

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.replicated.num_bytes + self.message.num_bytes + self.received.num_bytes


class Column:
    """The ranks that hold what this one holds, in the order of their replicas.

    Args:
        mesh: them.
        second: another process group of theirs, where they are two and have one.

    Attributes:
        replica, size: of this rank, and how many there are.
        channel: to all of them.
        ways: channels by who sends, of two.
        operation: what this rank is doing: above 0 a step, below a call of `synchronize`; the same on all ranks.
        step: it, where it is one.
    """

    def __init__(self, mesh: Mesh, second: Any = None) -> None:
        self.replica, self.size = mesh.rank, mesh.world_size
        self._mesh = mesh
        self.channel = Channel.between_hosts(mesh)
        other = self.channel if second is None else Channel(mesh, second, mesh.rank, mesh.world_size)
        self.ways = (self.channel, other)
        self.operation = 0
        self.step: Step | None = None

    def count(self, groups: Sequence[Counted], own: Sequence[int]) -> None:
        """Learns how many rows each replica tells of each group; it tells all others the same.

        Raises:
            PeerError: a rank does something else, or none answers.
        """
        counts = torch.empty(self.size, 1 + len(own), dtype=torch.int64, device="cpu")
        mine = torch.tensor([joined(self.operation, self.step), *own], dtype=torch.int64, device="cpu")
        self.channel.gather(mine, counts, groups[0].counters, "synchronizing replicas")
        self._expect(groups, counts)

    def count_each(self, groups: Sequence[Counted], own: Sequence[Sequence[int]]) -> None:
        """As `count`, where this rank tells each replica another number of rows of each group.

        Raises:
            PeerError: a rank does something else, or none answers.
        """
        mine = torch.tensor(
            [[joined(self.operation, self.step), *counts] for counts in own], dtype=torch.int64, device="cpu"
        )
        counts = self.channel.exchange_equal(mine, groups[0].counters, "synchronizing replicas")
        self._expect(groups, counts)

    def _expect(self, groups: Sequence[Counted], counts: Tensor) -> None:
        told, *columns = counts.T.tolist()
        operations, digests = parted(told)
        if operations.count(self.operation) != len(operations):
            name = self._mesh.name
            calls = [f"step {number}" if number > 0 else f"synchronize {-number}" for number in operations]
            done = ", ".join(f"rank {name(replica)} is in {call}" for replica, call in enumerate(calls))
            raise PeerError(
                f"rank {name(self.replica)}: ranks are out of step: {done}; every rank must call forward, step and "
                "synchronize equally often and in the same order"
            )
        check_rates(self._mesh, digests, self.step)
        for group, column in zip(groups, columns, strict=True):
            group.counts = column

    def receive(self, group: ColumnGroup, begins: Sequence[int]) -> list[Told]:
        """What each replica told, once it is here; its part of the buffer begins at the byte that `begins` says."""
        for work in group.works:
            work.wait()
        group.works = []
        received = group.received.buffer.bytes
        return [
            group.own if replica == self.replica else group.layout.read(received[begins[replica] :], count)
            for replica, count in enumerate(group.counts)
        ]
