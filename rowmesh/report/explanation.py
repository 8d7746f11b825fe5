"""Explain: why a table's rows, or one row, are where a plan has them, and what the alternatives would cost."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rowmesh.placement.comparison import Comparison
from rowmesh.placement.cost import NODE, ONE_HOP, REPLICATED, REPLICATED_TWO_HOP, TWO_HOP
from rowmesh.placement.plan import RowRange, TablePlan
from rowmesh.placement.strategies.levels import LinkCosts, RowBytes
from rowmesh.placement.strategies.unsorted import most_ranges
from rowmesh.placement.summary import LEVEL_OF, accesses_before, levels_of, stretches
from rowmesh.placement.text import bytes_text, rows_text, seconds_text, share_text

WAYS = {
    ONE_HOP: "one copy, read from its owner",
    TWO_HOP: "one copy, read through a node leader",
    NODE: "a copy on every node",
    REPLICATED: "a copy on every rank",
    REPLICATED_TWO_HOP: "a copy on every rank, updated through node leaders",
}
MAX_STRETCHES = 40


def explain(comparison: Comparison, what: str) -> list[str]:
    """Lines on `TABLE` or `TABLE:ROW`.

    Raises:
        ConfigurationError: the plan has no such table or row.
    """
    name, colon, row = what.rpartition(":")
    if not colon or not row.isdecimal():
        return explain_table(comparison, what)
    return explain_row(comparison, name, int(row))


def explain_table(comparison: Comparison, name: str) -> list[str]:
    """The ranges of a table: their rows, rule, owners, and share of the accesses."""
    table = comparison.plan.table(name)
    index = comparison.plan.tables.index(table)
    profile = comparison.problem.profile.tables[index]
    total = max(profile.total_accesses, 1e-300)
    lines = [f"{name}: {table.shape.num_rows:,} rows of {table.shape.row_bytes} bytes, {_slots(comparison, table)}"]
    found = stretches(table)
    for stretch in found[:MAX_STRETCHES]:
        first, last = accesses_before(profile, np.array([stretch.start, stretch.stop]))
        hops = ", two hops" if stretch.two_hop else ""
        lines.append(
            f"  {rows_text(stretch.start, stretch.stop):<32}{LEVEL_OF[stretch.rule]:<6}"
            f"{_rule_text(stretch.rule)}{hops}; owner {stretch.owners_text()}; "
            f"{share_text((last - first) / total)} of accesses"
        )
    if len(found) > MAX_STRETCHES:
        lines.append(f"  and {len(found) - MAX_STRETCHES:,} more ranges; --out writes all of them")
    levels = levels_of(table, profile)
    shares = ", ".join(f"{name} {level.rows:,} ({share_text(level.share)})" for name, level in levels.items())
    return [*lines, f"  levels, in rows (share of accesses): {shares}", f"  {_threshold_text(comparison)}"]


def explain_row(comparison: Comparison, name: str, row: int) -> list[str]:
    """The holders of a row, how often it is read, what each alternative would cost, and the reason for the choice."""
    case = _Row(comparison, comparison.plan.table(name), row)
    W, G = comparison.plan.world_size, comparison.plan.ranks_per_node
    holders, owner = case.part.holders(row, W, G), case.part.owner(row, W)
    lines = [
        f"{name} row {row:,}: {LEVEL_OF[case.part.rule]}, {_rule_text(case.part.rule)}",
        f"  range    {rows_text(case.part.start, case.part.stop)}"
        + (", two hops: each other node merges its requests before it sends them" if case.part.two_hop else ""),
        f"  holders  {_ranks_text(holders)}; owner: rank {owner}, which adds up the gradients",
        f"  read     {case.accesses_text}",
        f"  cost of a step, summed over links, and extra memory, summed over ranks ({case.threshold_text}):",
    ]
    for way in case.ways:
        mark = "→" if way == case.way else " "
        cost = comparison.cost_text(float(case.seconds[way]))
        extra = f"+ {bytes_text(case.extra_bytes[way])}" if case.extra_bytes[way] else ""
        lines.append(f"   {mark} {WAYS[way]:<50}{cost:>12}   {extra}".rstrip())
    return [*lines, f"  why      {case.why}"]


@dataclass(frozen=True, eq=False)
class _Row:
    """A row of a plan, and the alternatives to its exchange."""

    comparison: Comparison
    table: TablePlan
    row: int

    @cached_property
    def part(self) -> RowRange:
        return self.table.range_of(self.row)

    @cached_property
    def way(self) -> int:
        """How the row is exchanged."""
        if self.part.rule == "node":
            return NODE
        if self.part.rule == "replicated":
            return REPLICATED_TWO_HOP if self.part.two_hop else REPLICATED
        return TWO_HOP if self.part.two_hop else ONE_HOP

    @cached_property
    def ways(self) -> list[int]:
        """The ways that this topology and request allow, and the chosen one in any case."""
        plan, request = self.comparison.plan, self.comparison.problem.request
        if plan.world_size == 1:
            return [self.way]
        has_nodes = plan.num_nodes > 1 and plan.ranks_per_node > 1
        hops = has_nodes and request.max_hops == 2
        allowed = {ONE_HOP: True, TWO_HOP: hops, NODE: has_nodes, REPLICATED: True, REPLICATED_TWO_HOP: hops}
        return [way for way in WAYS if allowed[way] or way == self.way]

    @cached_property
    def _index(self) -> int:
        return self.comparison.plan.tables.index(self.table)

    @cached_property
    def _run(self) -> int:
        demand = self.comparison.problem.demand
        return int(np.searchsorted(demand.starts, demand.first_row[self._index] + self.row, "right")) - 1

    @cached_property
    def seconds(self) -> np.ndarray:
        """[5], of a step, over all links."""
        problem = self.comparison.problem
        costs = LinkCosts.of(problem.topology)
        return RowBytes.of(problem.demand, problem.request).seconds(costs)[:, self._run]

    @property
    def extra_bytes(self) -> dict[int, int]:
        """Memory of the copies beyond the first, over all ranks."""
        plan = self.comparison.plan
        copies = {NODE: plan.num_nodes, REPLICATED: plan.world_size, REPLICATED_TWO_HOP: plan.world_size}
        return {way: (copies.get(way, 1) - 1) * self.table.shape.row_bytes for way in WAYS}

    @property
    def accesses_text(self) -> str:
        problem = self.comparison.problem
        profile, demand = problem.profile, problem.demand
        table = profile.tables[self._index]
        run = int(np.searchsorted(table.starts, self.row, "right")) - 1
        batch = problem.request.batch_size
        often = (
            f"a rank's batch of {batch:,} samples reads it with probability {demand.rank[self._run]:.3g}"
            if problem.request.deduplicated
            else f"a rank's batch of {batch:,} samples reads it {demand.rank[self._run]:.3g} times"
        )
        return (
            f"{table.accesses[run]:,.6g} times in {profile.num_samples:,} samples; {often}, "
            f"the batches of all ranks with probability {demand.world[self._run]:.3g}"
        )

    @property
    def threshold_text(self) -> str:
        return _threshold_text(self.comparison)

    @property
    def saving(self) -> tuple[float, float, int]:
        """(saved a step, saved for each byte of memory, way) of the copies that save most a byte."""
        single = min(self.seconds[way] for way in self.ways if not self.extra_bytes[way])
        copies = [way for way in self.ways if self.extra_bytes[way]]
        best = max(copies, key=lambda way: (single - self.seconds[way]) / self.extra_bytes[way])
        saved = float(single - self.seconds[best])
        return saved, saved / self.extra_bytes[best], best

    @property
    def why(self) -> str:
        """The reason, with numbers."""
        if self.comparison.plan.world_size == 1:
            return "there is one rank"
        if self.seconds[ONE_HOP] == 0:
            return "no batch is expected to read it, so its place does not matter"
        saved, density, best = self.saving
        amount = f"{self.comparison.cost_text(abs(saved))} a step"
        if LEVEL_OF[self.part.rule] != "cold":
            return self._why_copied(saved, density, amount)
        if saved <= 0:
            return self._why_copies_do_not_pay(best, amount)
        return self._why_not_copied(density, f"{WAYS[best]} would save {amount}")

    def _why_copied(self, saved: float, density: float, amount: str) -> str:
        if saved <= 0:
            return "a copy of this row alone would not pay, but its whole range is copied"
        return f"copies save {amount}, {_density_text(self.comparison, density)} per byte of memory" + (
            ", more than λ" if density > (_threshold(self.comparison) or np.inf) else ""
        )

    def _why_copies_do_not_pay(self, best: int, amount: str) -> str:
        training = self.comparison.problem.request.training
        reason = "every holder of a copy needs the delta of every update"
        return f"{WAYS[best]} would cost {amount} more than one copy" + (f": {reason}" if training else "")

    def _why_not_copied(self, density: float, would: str) -> str:
        threshold = _threshold(self.comparison)
        each = f"{would}, {_density_text(self.comparison, density)} per byte of memory"
        if threshold is None:
            return f"{each}; strategy {self.comparison.plan.strategy!r} does not compare the two"
        if threshold and density < threshold:
            return f"{each}, less than λ: the memory for copies goes to rows that save more per byte"
        if len(self.table.ranges) > most_ranges(self.table.shape.num_rows) // 2:
            return f"{each}, but the table is not sorted by frequency, and its limited ranges go to hotter rows"
        return f"{each}, but the memory for copies is used up: only whole ranges and rounds of rows are copied"


def _slots(comparison: Comparison, table: TablePlan) -> str:
    plan = comparison.plan
    slots = [
        sum(part.num_slots(rank, plan.world_size, plan.ranks_per_node) for part in table.ranges)
        for rank in range(plan.world_size)
    ]
    low, high = min(slots), max(slots)
    return f"{high:,} slots on every rank" if low == high else f"{low:,} to {high:,} slots a rank"


def _rule_text(rule: str) -> str:
    texts = {
        "replicated": "a copy on every rank",
        "node": "a copy on every node",
        "cyclic": "one copy, cyclic over the ranks",
        "fixed": "one copy on a given rank",
    }
    return texts[rule]


def _ranks_text(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _threshold(comparison: Comparison) -> float | None:
    """λ, or None for a strategy without one."""
    return comparison.plan.notes.get("multiplier_s_per_byte")


def _threshold_text(comparison: Comparison) -> str:
    threshold = _threshold(comparison)
    if threshold is None:
        return f"strategy {comparison.plan.strategy!r} has no threshold λ"
    if threshold == 0:
        return "λ = 0: all copies that save anything fit in memory"
    return f"λ = {_density_text(comparison, threshold)} saved per step and byte of memory"


def _density_text(comparison: Comparison, density: float) -> str:
    """Savings of a step per byte of memory: weighted bytes, or seconds."""
    return f"{density:.3g} bytes" if comparison.is_relative else seconds_text(density)
