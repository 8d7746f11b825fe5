"""Rows in any order: strategies see them sorted by frequency, and the ranges they make are put back to the rows.

Strategies give copies to the first rows of a table. Where counts do not fall from row to row (ids that are hashes, or
came shuffled, or were numbered by several workers), the rows to copy stand all over the table. So a strategy is given
the same rows in order of their counts, and every range of its plan is cut into the rows' own places. Neighbouring rows
of one rule become one range again, and ranges of one rule join its last cycle (`RowRange.phase`). So the plan costs and
holds what a plan of sorted rows does, up to which rank holds which of the cyclic rows.

A range takes 92 bytes in the address map and a line in the plan's file, so a table has at most `most_ranges` of them.
Where a table would have more, its most read rows alone stand out, and all others count as equally often read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmesh.placement.plan import Plan, RowRange, TablePlan
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import Strategy
from rowmesh.placement.topology import Topology

FEWEST_RANGES = 2048  # that any table may have
MOST_RANGES = 8192
ROWS_PER_RANGE = 32

Ints = NDArray[np.int64]


def most_ranges(num_rows: int) -> int:
    """Ranges that a table of so many rows may be cut into: its address map takes 0.75 MB at most.

    Example:
        >>> most_ranges(1000), most_ranges(100_000), most_ranges(10**9)
        (2048, 3125, 8192)
    """
    return min(max(FEWEST_RANGES, num_rows // ROWS_PER_RANGE), MOST_RANGES)


def search_sorted(strategy: Strategy, profile: Profile, topology: Topology, request: Request) -> Plan:
    """The plan that a strategy makes for the sorted rows of a profile, for the rows as they are.

    Raises:
        ConfigurationError: the request cannot be met.
    """
    rows = Unsorted.of(profile)
    plan = rows.put_back(strategy(rows.profile, topology, request))
    wide = {table.name for table in plan.tables if len(table.ranges) > most_ranges(table.shape.num_rows)}
    if wide:
        rows = rows.coarser(wide)
        plan = rows.put_back(strategy(rows.profile, topology, request))
    return plan


@dataclass(frozen=True, eq=False)
class SortedTable:
    """A table whose rows were sorted.

    Attributes:
        table: as it is.
        order: int64 `[K]`, its runs, the most read first; those read equally often in their own order.
    """

    table: TableProfile
    order: Ints

    @staticmethod
    def of(table: TableProfile) -> SortedTable:
        """The rows of a table in order of their counts; of equal ones, in that of the batches they stood in."""
        ties = np.zeros(len(table.lengths)) if table.batches is None else -table.batches
        return SortedTable(table, np.lexsort((ties, -table.accesses)))

    @cached_property
    def profile(self) -> TableProfile:
        """The demand of the sorted rows."""
        table, order = self.table, self.order
        columns: dict[str, Any] = {name: values[order] for name, values in table.columns.items()}
        return _joined(replace(table, lengths=table.lengths[order], **columns))

    @cached_property
    def begins(self) -> Ints:
        """int64 `[K + 1]`: where each run of `order` begins among the sorted rows."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.table.lengths[self.order])])

    def coarser(self) -> SortedTable:
        """The same with fewer rows that stand out: half as many runs as ranges are allowed, the others pooled."""
        table, kept = self.table, self.order[: most_ranges(self.table.shape.num_rows) // 2]
        if len(kept) == len(self.order):
            return self
        is_pooled = np.ones(len(table.lengths), np.bool_)
        is_pooled[kept] = False
        rows = float(table.lengths[is_pooled].sum())
        columns: dict[str, Any] = {
            name: np.where(is_pooled, float(values @ (table.lengths * is_pooled)) / rows, values)
            for name, values in table.columns.items()
        }
        return SortedTable(replace(table, **columns), np.append(kept, np.flatnonzero(is_pooled)))

    def put_back(self, planned: TablePlan, world_size: int, ranks_per_node: int) -> TablePlan:
        """A plan of the sorted rows as one of the rows where they are."""
        if self.table.is_falling:
            return planned
        pieces = _Pieces.of(self, planned, world_size, ranks_per_node)
        return replace(planned, ranges=tuple(pieces.ranges(planned, world_size, ranks_per_node)))


@dataclass(frozen=True, eq=False)
class Unsorted:
    """A profile, and the same with every table sorted.

    Attributes:
        tables: each table, sorted.
        profile: what strategies see.
    """

    tables: tuple[SortedTable, ...]
    profile: Profile

    @staticmethod
    def of(profile: Profile) -> Unsorted:
        """Sorts all tables."""
        return Unsorted._of(profile, tuple(SortedTable.of(table) for table in profile.tables))

    @staticmethod
    def _of(profile: Profile, tables: tuple[SortedTable, ...]) -> Unsorted:
        return Unsorted(tables, replace(profile, tables=tuple(table.profile for table in tables)))

    def coarser(self, names: set[str]) -> Unsorted:
        """The same with fewer rows that stand out in some tables."""
        tables = tuple(table.coarser() if table.table.name in names else table for table in self.tables)
        return Unsorted._of(self.profile, tables)

    def put_back(self, plan: Plan) -> Plan:
        """A plan for the sorted rows as one for the rows where they are."""
        put_back = (
            table.put_back(planned, plan.world_size, plan.ranks_per_node)
            for table, planned in zip(self.tables, plan.tables, strict=True)
        )
        return replace(plan, tables=tuple(put_back))


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Parts of ranges in the order of the rows; one entry a piece.

    Attributes:
        start: first row.
        stop: one past the last.
        number: of the range of the plan that it is of; the first, where it is of several.
        shift: that range's at this row.
        is_whole: whether it is all of that range, which then stays as it is.
    """

    start: Ints
    stop: Ints
    number: Ints
    shift: Ints
    is_whole: NDArray[np.bool_]

    @staticmethod
    def of(table: SortedTable, planned: TablePlan, world_size: int, ranks_per_node: int) -> _Pieces:
        """All parts; those of one rule that stand next to each other are one."""
        starts = np.array([part.start for part in planned.ranges])
        bounds = np.union1d(table.begins, starts)
        run = np.searchsorted(table.begins, bounds[:-1], "right") - 1
        row = table.table.starts[table.order[run]] + bounds[:-1] - table.begins[run]
        order = np.argsort(row)
        start, place = row[order], bounds[:-1][order]
        length = np.diff(bounds)[order]
        number = np.searchsorted(starts, place, "right") - 1
        heads = np.flatnonzero(np.append(True, (np.diff(number) != 0) | (place[1:] != place[:-1] + length[:-1])))
        shifts, sizes = (np.array(each) for each in zip(*((p.shift, len(p)) for p in planned.ranges), strict=True))
        shift = (shifts[number] + place - starts[number]) % world_size
        stop = np.append(start[heads[1:]], table.table.shape.num_rows)
        start, number, shift = start[heads], number[heads], shift[heads]
        return _Pieces(start, stop, number, shift, stop - start == sizes[number])._joined(
            planned, world_size, ranks_per_node
        )

    def _joined(self, planned: TablePlan, world_size: int, ranks_per_node: int) -> _Pieces:
        keys: dict[Any, int] = {}
        kinds = np.array(
            [
                keys.setdefault((part.rule, part.rank if part.rule == "fixed" else 0, part.two_hop), len(keys))
                for part in planned.ranges
            ]
        )[self.number]
        is_alone = self.is_whole & self._is_kept(planned, world_size, ranks_per_node)
        heads = np.flatnonzero(np.append(True, (np.diff(kinds) != 0) | is_alone[1:] | is_alone[:-1]))
        stop = np.append(self.start[heads[1:]], self.stop[-1])
        return _Pieces(self.start[heads], stop, self.number[heads], self.shift[heads], is_alone[heads])

    def _is_kept(self, planned: TablePlan, world_size: int, ranks_per_node: int) -> NDArray[np.bool_]:
        """Whether each piece, if it is whole, keeps a cycle of its own, which balances loads.

        Not where that would take a slot more than the plan of sorted rows: a short last round, beside another.
        """
        broken = {planned.ranges[number].rule for number in np.unique(self.number[~self.is_whole])}
        kept = [
            part.rule != "fixed"
            and (part.rule not in broken or len(part) % part.round_size(world_size, ranks_per_node) == 0)
            for part in planned.ranges
        ]
        return np.array(kept)[self.number]

    def ranges(self, planned: TablePlan, world_size: int, ranks_per_node: int) -> Iterator[RowRange]:
        """The pieces as ranges; what is not whole goes on where the last piece of its rule ended, in the same cycle."""
        ends: dict[str, tuple[int, int]] = {}  # the phase and shift that go on with the cycle of each rule
        for start, stop, number, shift, is_whole in zip(
            *(each.tolist() for each in (self.start, self.stop, self.number, self.shift, self.is_whole)), strict=True
        ):
            part = replace(planned.ranges[number], start=start, stop=stop)
            if part.rule != "fixed":
                phase, shift = (0, shift) if is_whole else ends.get(part.rule, (0, shift))
                part = replace(part, shift=shift, phase=phase)
                if not is_whole:
                    round_ = part.round_size(world_size, ranks_per_node)
                    ends[part.rule] = (phase + len(part)) % round_, (shift + len(part)) % world_size
            yield part


def _joined(table: TableProfile) -> TableProfile:
    """Neighbouring runs with equal counts as one."""
    changes = np.any([values[1:] != values[:-1] for values in table.columns.values()], axis=0)
    first = np.flatnonzero(np.append(True, changes))
    columns: dict[str, Any] = {name: values[first] for name, values in table.columns.items()}
    return replace(table, lengths=np.add.reduceat(table.lengths, first), **columns)
