"""How the ranks of a column tell each other what changed: everything at once, by way of homes, or whole tables.

Each way has the same two verbs, both collective among the column. `tell` sends, after the gradients of a step were
pushed; what it sent travels until `finish`, which waits for what the others told and updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch

from rowmesh.exchange.averaged import AveragedRows
from rowmesh.exchange.column import Column, ColumnGroup
from rowmesh.exchange.messages import Parts, post_parts
from rowmesh.exchange.told import Told
from rowmesh.optim.rules import Update


class Way(Protocol):
    """The contract; see above."""

    def tell(self) -> None: ...
    def finish(self, updates: Sequence[Update]) -> None: ...


class TellEachOther:
    """Two replicas swap what they know."""

    def __init__(self, column: Column, groups: Sequence[ColumnGroup]) -> None:
        self._column, self._groups = column, groups

    def tell(self) -> None:
        """Sends the rows that this rank's group touched to the other."""
        for group in self._groups:
            group.own = group.replicated.outgoing()
        self._column.count(self._groups, [len(group.own) for group in self._groups])
        for group in self._groups:
            self._swap(group)

    def _swap(self, group: ColumnGroup) -> None:
        """Sends rows to the one other replica, and its rows here, over different connections.

        For gloo asks for bytes over the connection that it sends over: behind bytes of its own the request would be
        late, and the two directions would take turns.
        """
        layout, mine, other = group.layout, self._column.replica, 1 - self._column.replica
        sizes = [layout.num_bytes(count) for count in group.counts]
        group.message.reserve(sizes[mine])
        group.received.reserve(sizes[other])
        layout.write(group.own, group.message.buffer.bytes)
        sent, received = group.message.buffer.bytes, group.received.buffer.bytes
        out, nothing = Parts(sent, 0, _all_of(other, sizes[mine]), 1), Parts(sent, 0, [0, 0, 0], 1)
        into = Parts(received, 0, _all_of(other, sizes[other]), 1)
        group.works = [
            post_parts(way, *((out, nothing) if sender == mine else (nothing, into)), group.counters, group.doing)
            for sender, way in enumerate(self._column.ways)
            if sizes[sender]
        ]
        group.counters.rows += len(group.own)

    def finish(self, updates: Sequence[Update]) -> None:
        """Puts together what both know."""
        for group, update in zip(self._groups, updates, strict=True):
            group.replicated.combine(self._column.receive(group, [0, 0]), update)


def _all_of(member: int, size: int) -> list[int]:
    """The bounds of two members' parts where one has everything."""
    return [0, size, size] if member == 0 else [0, 0, size]


class TellHomes:
    """Each row has a home, the replica of its slot modulo M, which hears of it, adds up, and tells all others."""

    def __init__(self, column: Column, groups: Sequence[ColumnGroup]) -> None:
        self._column, self._groups = column, groups

    def tell(self) -> None:
        """Sends each home the rows that are its."""
        M = self._column.size
        told = [group.replicated.outgoing() for group in self._groups]
        places = [each.places(M) for each in told]
        counts = [[len(places_of[home]) for places_of in places] for home in range(M)]
        self._column.count_each(self._groups, counts)
        for group, each, places_of in zip(self._groups, told, places, strict=True):
            self._scatter(group, each, places_of)

    def _scatter(self, group: ColumnGroup, told: Told, places: Sequence[np.ndarray]) -> None:
        layout, mine = group.layout, self._column.replica
        out = [0, *accumulate(layout.num_bytes(len(chosen)) for chosen in places)]
        into = self._bounds(group)
        group.message.reserve(out[-1])
        group.received.reserve(into[-1])
        for home, chosen in enumerate(places):
            if home != mine:
                layout.write(told, group.message.buffer.bytes[out[home] :], chosen)
                group.counters.rows += len(chosen)
        group.own = told.take(places[mine])
        parts = Parts(group.message.buffer.bytes, 0, out, 1), Parts(group.received.buffer.bytes, 0, into, 1)
        group.works = [post_parts(self._column.channel, *parts, group.counters, group.doing)]

    def finish(self, updates: Sequence[Update]) -> None:
        """Adds up the rows whose home is here, tells all others, and takes over what they have added up."""
        for group in self._groups:
            group.own = group.replicated.reduce(self._column.receive(group, self._bounds(group)))
        self._column.count(self._groups, [len(group.own) for group in self._groups])
        begins = [self._tell_all(group) for group in self._groups]
        for group, begin, update in zip(self._groups, begins, updates, strict=True):
            for told in self._column.receive(group, begin):
                group.replicated.accept(told, update)

    def _bounds(self, group: ColumnGroup) -> list[int]:
        """Where what each replica tells this home begins."""
        return [0, *accumulate(group.layout.num_bytes(count) for count in group.counts)]

    def _tell_all(self, group: ColumnGroup) -> list[int]:
        """Sends what this home has added up, in messages as long as the longest; returns where each will begin."""
        size = group.layout.num_bytes(max(group.counts))
        group.message.reserve(size)
        group.received.reserve(size * self._column.size)
        if size:
            group.layout.write(group.own, group.message.buffer.bytes)
            mine = group.message.buffer.tensor(torch.uint8, size)
            received = group.received.buffer.tensor(torch.uint8, self._column.size, size)
            group.works = [self._column.channel.post_gather(mine, group.counters, group.doing, received)]
        group.counters.rows += len(group.own)
        return [size * replica for replica in range(self._column.size)]


class TellTables:
    """The paper's: all rows are averaged, whether they differ or not, while all wait."""

    def __init__(self, column: Column, groups: Sequence[ColumnGroup]) -> None:
        self._column, self._groups = column, groups

    def tell(self) -> None:
        """Averages."""
        self._column.count(self._groups, [0] * len(self._groups))
        for group in self._groups:
            replicated = group.replicated
            assert isinstance(replicated, AveragedRows)
            for told in replicated.whole():
                replicated.combine(self._gather(group, told))
                group.counters.rows += len(told)

    def _gather(self, group: ColumnGroup, told: Told) -> list[Told]:
        """The same rows of all replicas."""
        blocks = [self._gather_block(group, block) for block in told.blocks]
        return [
            told if replica == self._column.replica else Told(told.slots, [block[replica] for block in blocks])
            for replica in range(self._column.size)
        ]

    def _gather_block(self, group: ColumnGroup, block: np.ndarray) -> list[np.ndarray]:
        everyone = torch.empty(self._column.size, *block.shape, dtype=torch.uint8, device="cpu")
        self._column.channel.gather(torch.from_numpy(block), everyone, group.counters, group.doing)
        return list(everyone.numpy())

    def finish(self, updates: Sequence[Update]) -> None:
        """Nothing travels."""
