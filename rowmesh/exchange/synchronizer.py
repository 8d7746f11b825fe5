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
from typing import Any, Protocol

from rowmesh.exchange.averaged import AveragedRows
from rowmesh.exchange.column import Column, ColumnGroup
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.summed import SummedGradients
from rowmesh.exchange.telling import TellEachOther, TellHomes, TellTables, Way
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.optim.rules import Update

_NO_UPDATE = Update(0.0, 0.0, 0)  # averages need none


class Forgets(Protocol):
    """What a group keeps of rows until it is told."""

    def forget(self) -> None: ...


class Synchronized(Protocol):
    """One group, wherever its rows are."""

    @property
    def replicated(self) -> Forgets: ...
    @property
    def num_bytes(self) -> int: ...


class Synchronizer:
    """Keeps the replicas of some groups of tables together. Collective among a column.

    Args:
        every: steps between two synchronizations.
        column: the ranks that hold what this one holds.
        groups: what is told.
        way: how.
    """

    def __init__(self, every: int, column: Column, groups: Sequence[Synchronized], way: Way) -> None:
        self._every, self._column, self._groups, self._way = every, column, groups, way
        self._updates: Sequence[Update] = ()
        self._num_calls = 0  # of `start` outside of steps
        self._is_under_way = False
        self._digest = 0  # of the steps since the last synchronization, which ranks of other groups have not seen

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(group.num_bytes for group in self._groups)

    def begin(self, updates: Sequence[Update], step: Step) -> bool:
        """After gradients were pushed within this rank's replica group; what is sent travels until `finish`.

        Returns:
            Whether a synchronization was due.
        """
        step = step.after(self._digest)
        self._digest = step.digest
        if step.number % self._every:
            return False
        self._digest = 0
        self._tell(step.number, updates, step)
        return True

    def start(self) -> None:
        """As `begin` where a synchronization is due, between two steps; for rows that are averaged."""
        self._num_calls += 1
        self._tell(-self._num_calls, [_NO_UPDATE] * len(self._groups))

    def _tell(self, operation: int, updates: Sequence[Update], step: Step | None = None) -> None:
        self._column.operation, self._column.step, self._updates = operation, step, updates
        self._way.tell()
        self._is_under_way = True

    def finish(self) -> None:
        """Waits for what other replicas told, and updates."""
        if self._is_under_way:
            self._is_under_way = False
            self._way.finish(self._updates)

    def forget(self) -> None:
        """Takes the rows of this rank as equal to those of the other replicas, whoever changed them."""
        for group in self._groups:
            group.replicated.forget()


def make_synchronizer(
    setting: Synchronization, exchanges: Sequence[GroupExchange], mesh: Mesh, second: Any = None
) -> Synchronizer:
    """Keeps replicas in the hosts' memory together. Collective among a column.

    Args:
        setting: how.
        exchanges: the groups'.
        mesh: the ranks that hold what this one holds, in the order of their replicas.
        second: another process group of theirs, where they are two and have one.
    """
    column, groups = Column(mesh, second), []
    for exchange in exchanges:
        replicated = (
            SummedGradients(exchange) if setting.mode == "exact" else AveragedRows(exchange, column.replica)
        )  # fmt: skip
        exchange.replicated = replicated
        groups.append(ColumnGroup(replicated, exchange.group.name, exchange.counters.synchronization))
    return Synchronizer(setting.every, column, groups, _way_of(setting, column.size)(column, groups))


def _way_of(setting: Synchronization, num_replicas: int) -> type[TellTables] | type[TellEachOther] | type[TellHomes]:
    if setting.dense:
        return TellTables
    return TellEachOther if num_replicas == 2 else TellHomes
