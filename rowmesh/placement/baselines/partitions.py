"""Partitions: neighbouring rows of a table that are placed as one, bounded in accesses and in memory.

Source: OPER §4.1, and §4.2 for where they go first. Differs: partitions are cut from runs of equal rows instead of row
by row.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rowmesh.placement.demand import Demand
from rowmesh.placement.plan import RowRange
from rowmesh.placement.profile import Profile


@dataclass(frozen=True, eq=False)
class Partitions:
    """P partitions, in order of tables and rows.

    Attributes:
        demand: of the rows.
        table: [P].
        start: [P], first row, counted in its table.
        stop: [P].
        accesses: [P], how often the rows were read in the profile.
        by_access: [P], whether accesses closed the partition rather than memory.
        read_bytes: [P], bytes that one rank reads of it in a step.
    """

    demand: Demand
    table: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    accesses: np.ndarray
    by_access: np.ndarray
    read_bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.table)

    @cached_property
    def stored_bytes(self) -> np.ndarray:
        """[P], memory of one copy."""
        return self.demand.row_bytes[self.table] * (self.stop - self.start)

    @staticmethod
    def cut(profile: Profile, demand: Demand, threshold: float) -> Partitions:
        """A partition closes when it has `threshold` of all accesses, or of all memory."""
        total = sum(table.total_accesses for table in profile.tables)
        most_accesses = max(1.0, threshold * total)
        most_bytes = threshold * sum(shape.row_bytes * shape.num_rows for shape in demand.shapes)
        cuts: list[tuple[int, int, int, float, bool]] = []
        for index, table in enumerate(profile.tables):
            most_rows = max(1, int(most_bytes / demand.shapes[index].row_bytes))
            cuts += [(index, *cut) for cut in _cut(table.starts, table.accesses, most_accesses, most_rows)]
        table, start, stop, accesses, by_access = (np.array(column) for column in zip(*cuts, strict=True))
        first = demand.first_row[table]
        read = np.concatenate([[0.0], np.cumsum(demand.rank * demand.value_bytes[demand.table] * demand.lengths)])
        read_bytes = np.interp(first + stop, demand.starts, read) - np.interp(first + start, demand.starts, read)
        return Partitions(demand, table, start, stop, accesses, by_access, read_bytes)

    def balanced(self) -> np.ndarray:
        """[P], a rank for each partition, the biggest first.

        Partitions bounded by accesses go to the rank that reads least, then the others to the rank that stores least.
        """
        W = self.demand.world_size
        owner = np.empty(len(self), np.int64)
        by_access, by_memory = np.flatnonzero(self.by_access), np.flatnonzero(~self.by_access)
        _assign(owner, by_access[np.argsort(-self.read_bytes[by_access], kind="stable")], self.read_bytes, np.zeros(W))
        stored = np.bincount(owner[by_access], self.stored_bytes[by_access], W)
        _assign(owner, by_memory[np.argsort(-self.stored_bytes[by_memory], kind="stable")], self.stored_bytes, stored)
        return owner

    def trimmed(self, owner: np.ndarray, limit_bytes: int) -> tuple[Partitions, np.ndarray] | None:
        """(partitions, owners) within a limit that some ranks exceed by little; None where the rows do not fit so.

        Cuts the least read partitions of these ranks, and moves the ends to ranks with room.
        """
        row_bytes = self.demand.row_bytes[self.table]
        room = limit_bytes - np.bincount(owner, self.stored_bytes, self.demand.world_size).astype(np.int64)
        moved: list[tuple[int, int, int]] = []
        kept = self.stop.copy()
        for part in np.argsort(self.read_bytes / (self.stop - self.start), kind="stable").tolist():
            width, giver = int(row_bytes[part]), owner[part]
            while room[giver] < 0 and kept[part] > self.start[part] + 1:
                taker = int(room.argmax())
                rows = min(
                    -(int(room[giver]) // width), int(room[taker]) // width, int(kept[part] - self.start[part]) - 1
                )
                if rows < 1:
                    return None
                moved.append((part, int(kept[part]) - rows, taker))
                room[[giver, taker]] += rows * width, -rows * width
                kept[part] -= rows
            if room.min() >= 0:
                return self._cut_again(moved, owner)
        return None

    def _cut_again(self, moved: Sequence[tuple[int, int, int]], owner: np.ndarray) -> tuple[Partitions, np.ndarray]:
        """The partitions with some cut once more: (partition, first row of the end, its rank)."""
        part, row, rank = (np.array(column, np.int64) for column in zip(*moved, strict=True))
        source = np.concatenate([np.arange(len(self)), part])
        start = np.concatenate([self.start, row])
        order = np.lexsort((start, self.table[source]))
        source, start = source[order], start[order]
        last = np.append(np.diff(source) != 0, True)
        stop = np.where(last, self.stop[source], np.append(start[1:], 0))
        share = (stop - start) / (self.stop - self.start)[source]
        cut = replace(
            self,
            table=self.table[source],
            start=start,
            stop=stop,
            accesses=self.accesses[source] * share,
            by_access=self.by_access[source],
            read_bytes=self.read_bytes[source] * share,
        )
        return cut, np.concatenate([owner, rank])[order]

    def ranges(self, owner: np.ndarray, everywhere: np.ndarray) -> list[list[RowRange]]:
        """The ranges of each table: replicated where `everywhere`, else on the owner; neighbours alike are one."""
        rank = np.where(everywhere, -1, owner)
        first = np.flatnonzero(np.concatenate([[True], (np.diff(rank) != 0) | (np.diff(self.table) != 0)]))
        last = np.append(first[1:], len(self)) - 1
        ranges: list[list[RowRange]] = [[] for _ in self.demand.shapes]
        for start, stop, table, holder in zip(
            self.start[first].tolist(),
            self.stop[last].tolist(),
            self.table[first].tolist(),
            rank[first].tolist(),
            strict=True,
        ):
            part = RowRange(start, stop, "replicated") if holder < 0 else RowRange(start, stop, "fixed", rank=holder)
            ranges[table].append(part)
        return ranges


def _cut(
    starts: np.ndarray, accesses: np.ndarray, most_accesses: float, most_rows: int
) -> Sequence[tuple[int, int, float, bool]]:
    """(start, stop, accesses, closed by accesses) of the partitions of one table."""
    first, each = starts.tolist(), accesses.tolist()
    before = [0.0, *np.cumsum(np.diff(starts) * accesses).tolist()]
    cuts, row, read, num_rows = [], 0, 0.0, first[-1]
    while row < num_rows:
        target, furthest = read + most_accesses, min(num_rows, row + most_rows)
        run = bisect_left(before, target) - 1  # the run in which the target is reached
        full = first[run] + max(0, -int(-(target - before[run]) // each[run])) if run < len(each) else num_rows + 1
        stop = min(max(full, row + 1), furthest)
        run = bisect_right(first, stop) - 1
        until = before[run] + ((stop - first[run]) * each[run] if run < len(each) else 0.0)
        share_of_accesses, share_of_rows = (until - read) / most_accesses, (stop - row) / most_rows
        cuts.append((row, stop, until - read, full <= furthest or share_of_accesses > share_of_rows))
        row, read = stop, until
    return cuts


def _assign(owner: np.ndarray, order: np.ndarray, weight: np.ndarray, load: np.ndarray) -> None:
    """Each item of `order` to the rank with the least load."""
    heap = [(float(amount), rank) for rank, amount in enumerate(load)]
    heapq.heapify(heap)
    for item in order.tolist():
        amount, rank = heap[0]
        owner[item] = rank
        heapq.heapreplace(heap, (amount + float(weight[item]), rank))
