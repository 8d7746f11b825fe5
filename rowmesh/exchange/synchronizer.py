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
from typing import Any

from rowmesh.exchange.averaged import AveragedRows
from rowmesh.exchange.column import Column, ColumnGroup
from rowmesh.exchange.route import GroupExchange
from rowmesh.exchange.summed import SummedGradients
from rowmesh.exchange.telling import TellEachOther, TellHomes, TellTables, Way
from rowmesh.exchange.update import Update
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization

_NO_UPDATE = Update(0.0, 0.0, 0)  # averages need none


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
        self._every, self._column = setting.every, Column(column, second)
        self._groups: list[ColumnGroup] = []
        for exchange in exchanges:
            exchange.replicated = (
                SummedGradients(exchange) if setting.mode == "exact" else AveragedRows(exchange, self._column.replica)
            )
            name, counters = exchange.group.name, exchange.counters.synchronization
            self._groups.append(ColumnGroup(exchange.replicated, name, counters))
        self._way: Way = _way_of(setting, self._column.size)(self._column, self._groups)
        self._updates: Sequence[Update] = ()
        self._num_calls = 0  # of `start` outside of steps
        self._is_under_way = False

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(group.num_bytes for group in self._groups)

    def begin(self, updates: Sequence[Update]) -> bool:
        """After gradients were pushed within this rank's replica group; what is sent travels until `finish`.

        Returns:
            Whether a synchronization was due.
        """
        if updates[0].step % self._every:
            return False
        self._tell(updates[0].step, updates)
        return True

    def start(self) -> None:
        """As `begin` where a synchronization is due, between two steps; for rows that are averaged."""
        self._num_calls += 1
        self._tell(-self._num_calls, [_NO_UPDATE] * len(self._groups))

    def _tell(self, operation: int, updates: Sequence[Update]) -> None:
        self._column.operation, self._updates = operation, updates
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


def _way_of(setting: Synchronization, num_replicas: int) -> type[TellTables] | type[TellEachOther] | type[TellHomes]:
    if setting.dense:
        return TellTables
    return TellEachOther if num_replicas == 2 else TellHomes
