"""Summary: what the ranges of a table come to, for people: levels, their share of accesses, and stretches of ranges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rowmesh.placement.plan import Plan, RowRange, TablePlan
from rowmesh.placement.profile import Profile, TableProfile

LEVELS = {"hot": ("replicated",), "warm": ("node",), "cold": ("cyclic", "fixed")}
LEVEL_OF = {rule: level for level, rules in LEVELS.items() for rule in rules}


def plan_levels(plan: Plan) -> dict[str, int]:
    """Rows of each level over all tables.

    Example:
        >>> from rowmesh.placement import TableShape
        >>> shape = TableShape("item", 4, value_bytes=64, gradient_bytes=64)
        >>> plan_levels(Plan((TablePlan(shape, (RowRange(0, 1, "replicated"), RowRange(1, 4))),), 2, 2))
        {'hot': 1, 'warm': 0, 'cold': 3}
    """
    rows = dict.fromkeys(LEVELS, 0)
    for table in plan.tables:
        for part in table.ranges:
            rows[LEVEL_OF[part.rule]] += len(part)
    return rows


def copied_share(plan: Plan, profile: Profile) -> float:
    """The share of all accesses that go to hot rows, which every rank has.

    Example:
        >>> from rowmesh.placement import TableShape
        >>> shape = TableShape("item", 4, value_bytes=64, gradient_bytes=64)
        >>> plan = Plan((TablePlan(shape, (RowRange(0, 1, "replicated"), RowRange(1, 4))),), 2, 2)
        >>> copied_share(plan, Profile.from_counts({"item": [6, 2, 1, 1]}, [shape], num_samples=10))
        0.6
    """
    total = sum(table.total_accesses for table in profile.tables)
    pairs = zip(plan.tables, profile.tables, strict=True)
    hot = sum(levels_of(table, counts)["hot"].share * counts.total_accesses for table, counts in pairs)
    return hot / total if total else 0.0


@dataclass(frozen=True)
class Level:
    """The rows of one level of a table.

    Attributes:
        rows: how many.
        share: of the table's accesses.
    """

    rows: int
    share: float


def levels_of(table: TablePlan, profile: TableProfile) -> dict[str, Level]:
    """Hot (a copy on every rank), warm (one a node) and cold (one copy): rows, and the share of accesses they get.

    Example:
        >>> from rowmesh.placement import TableShape
        >>> shape = TableShape("item", 4, value_bytes=64, gradient_bytes=64)
        >>> table = TablePlan(shape, (RowRange(0, 1, "replicated"), RowRange(1, 4)))
        >>> levels_of(table, TableProfile.of_counts(shape, [6, 2, 1, 1]))["hot"]
        Level(rows=1, share=0.6)
    """
    bounds = np.array([part.start for part in table.ranges] + [table.shape.num_rows])
    accesses = np.diff(accesses_before(profile, bounds))
    total = max(profile.total_accesses, 1e-300)
    found = {}
    for level, rules in LEVELS.items():
        inside = [index for index, part in enumerate(table.ranges) if part.rule in rules]
        found[level] = Level(sum(len(table.ranges[i]) for i in inside), float(accesses[inside].sum() / total))
    return found


def accesses_before(profile: TableProfile, rows: np.ndarray) -> np.ndarray:
    """How often the rows before each of `rows` were read."""
    before = np.concatenate([[0.0], np.cumsum(profile.accesses * profile.lengths)])
    return np.interp(rows, profile.starts, before)


@dataclass(frozen=True)
class Stretch:
    """Neighbouring ranges of one rule, for reading.

    Attributes:
        parts: the ranges, in order.
    """

    parts: tuple[RowRange, ...]

    @property
    def start(self) -> int:
        """The first row."""
        return self.parts[0].start

    @property
    def stop(self) -> int:
        """The number after the last row."""
        return self.parts[-1].stop

    @property
    def rule(self) -> str:
        """The rule of all parts."""
        return self.parts[0].rule

    @property
    def two_hop(self) -> bool:
        """Whether the requests of all parts take two hops."""
        return self.parts[0].two_hop

    def owners_text(self, most: int = 8) -> str:
        """The ranks that own the rows."""
        named = [part.rank if part.rule == "fixed" else part.shift for part in self.parts]
        if len(named) == 1:
            return f"rank {named[0]}" if self.rule == "fixed" else f"cyclic from rank {named[0]}"
        ranks = ", ".join(map(str, named[:most])) + (", …" if len(named) > most else "")
        one_by_one = all(len(part) == 1 for part in self.parts)
        return f"row by row: ranks {ranks}" if one_by_one else f"{len(named):,} pieces, cyclic from ranks {ranks}"


def stretches(table: TablePlan) -> list[Stretch]:
    """The ranges of a table, with neighbours of the same rule and hops taken together."""
    found: list[list[RowRange]] = []
    for part in table.ranges:
        alike = found and (found[-1][-1].rule, found[-1][-1].two_hop) == (part.rule, part.two_hop)
        joins = alike and (part.rule == "fixed" or len(part) == len(found[-1][-1]) == 1)
        if joins:
            found[-1].append(part)
        else:
            found.append([part])
    return [Stretch(tuple(parts)) for parts in found]
