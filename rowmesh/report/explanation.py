"""Explain: why a table's rows, or one row, are where a plan has them, and what the alternatives would cost."""

from __future__ import annotations

from collections.abc import Iterator
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
from rowmesh.report.sums_text import sums_text

WAYS = {
    ONE_HOP: "one copy, read from its owner",
    TWO_HOP: "one copy, read through a node leader",
    NODE: "a copy on every node",
    REPLICATED: "a copy on every rank",
    REPLICATED_TWO_HOP: "a copy on every rank, updated through node leaders",
}
MAX_STRETCHES = 40
_OTHER_HOPS = {
    ONE_HOP: TWO_HOP,
    TWO_HOP: ONE_HOP,
    REPLICATED: REPLICATED_TWO_HOP,
    REPLICATED_TWO_HOP: REPLICATED,
}
_HOPS = {ONE_HOP: "one hop", TWO_HOP: "two hops", REPLICATED: "one hop", REPLICATED_TWO_HOP: "two hops"}
_ROUNDING = 1e-9  # of costs that are equal but for the order of additions


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
    """What a table sends, and its ranges: their rows, rule, owners, and share of the accesses."""
    table = comparison.plan.table(name)
    index = comparison.plan.tables.index(table)
    profile = comparison.problem.profile.tables[index]
    total = max(profile.total_accesses, 1e-300)
    lines = [f"{name}: {table.shape.num_rows:,} rows of {table.shape.row_bytes} bytes, {_slots(comparison, table)}"]
    if sums := sums_text(comparison, name):
        lines.append(f"  {sums}")
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
    case = RowWays(comparison, comparison.plan.table(name), row)
    if case.table.send == "sums":
        return [
            f"{name} row {row:,}: on rank {case.part.rank}, as the whole table, which sends sums of bags",
            f"  {sums_text(comparison, name)}",
            f"  read     {_accesses_text(case)}",
        ]
    W, G = comparison.plan.world_size, comparison.plan.ranks_per_node
    holders, owner = case.part.holders(row, W, G), case.part.owner(row, W)
    lines = [
        f"{name} row {row:,}: {LEVEL_OF[case.part.rule]}, {_rule_text(case.part.rule)}",
        f"  range    {rows_text(case.part.start, case.part.stop)}"
        + (", two hops: each other node merges its requests before it sends them" if case.part.two_hop else ""),
        f"  holders  {_ranks_text(holders)}; owner: rank {owner}, which adds up the gradients",
        f"  read     {_accesses_text(case)}",
        f"  cost of a step, summed over links, and extra memory, summed over ranks ({_threshold_text(comparison)}):",
    ]
    for way in case.ways:
        mark = "→" if way == case.way else " "
        cost = comparison.cost_text(float(case.seconds[way]))
        extra = f"+ {bytes_text(case.extra_bytes[way])}" if case.extra_bytes[way] else ""
        lines.append(f"   {mark} {WAYS[way]:<50}{cost:>12}   {extra}".rstrip())
    return [*lines, f"  why      {_Reason(case).text}"]


@dataclass(frozen=True)
class Saving:
    """What one way of a row saves over another.

    Attributes:
        amount: seconds of a step, or weighted bytes; below 0 where the way costs more.
        num_bytes: of memory that it takes for this, over all ranks.
    """

    amount: float
    num_bytes: int

    @property
    def density(self) -> float:
        """Saved for each byte of memory."""
        return self.amount / self.num_bytes


@dataclass(frozen=True, eq=False)
class RowWays:
    """A row of a plan: how it is exchanged, and what the alternatives would cost."""

    comparison: Comparison
    table: TablePlan
    row: int

    @cached_property
    def part(self) -> RowRange:
        """The range that the row is in."""
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
    def index(self) -> int:
        """The number of the table in the plan."""
        return self.comparison.plan.tables.index(self.table)

    @cached_property
    def run(self) -> int:
        """The run of the demand that the row is in."""
        demand = self.comparison.problem.demand
        return int(np.searchsorted(demand.starts, demand.first_row[self.index] + self.row, "right")) - 1

    @cached_property
    def seconds(self) -> np.ndarray:
        """[5], of a step, over all links; means over links of a kind, as plans are searched for by them."""
        problem = self.comparison.problem
        costs = LinkCosts.of(problem.topology)
        return RowBytes.of(problem.demand, problem.request).seconds(costs)[:, self.run]

    @cached_property
    def extra_bytes(self) -> dict[int, int]:
        """Memory of the copies beyond the first, over all ranks."""
        plan = self.comparison.plan
        copies = {NODE: plan.num_nodes, REPLICATED: plan.world_size, REPLICATED_TWO_HOP: plan.world_size}
        return {way: (copies.get(way, 1) - 1) * self.table.shape.row_bytes for way in WAYS}

    @property
    def cheapest_single(self) -> int:
        """The cheaper way of a row without copies."""
        return min((way for way in self.ways if not self.extra_bytes[way]), key=lambda way: self.seconds[way])

    def saving(self, way: int, over: int) -> Saving:
        """What one way saves over another."""
        return Saving(float(self.seconds[over] - self.seconds[way]), self.extra_bytes[way] - self.extra_bytes[over])

    @property
    def step_from(self) -> int:
        """The way that copies of the taken level are weighed against: a copy on every node, where that saves more for
        each byte than a copy on every rank, or else one copy.
        """
        single = self.cheapest_single
        if self.part.rule == "replicated" and NODE in self.ways:
            to_node, to_rank = self.saving(NODE, single), self.saving(self.way, NODE)
            if to_node.amount > 0 and to_node.density > to_rank.density:
                return NODE
        return single

    @property
    def other_hops(self) -> int | None:
        """The same level with other hops, where these are cheaper and allowed."""
        other = _OTHER_HOPS.get(self.way)
        return other if other in self.ways and self.saves(other, self.way) else None

    def saves(self, way: int, over: int) -> bool:
        """Whether one way is cheaper than another by more than rounding."""
        return bool(self.seconds[way] < self.seconds[over] * (1 - _ROUNDING))


@dataclass(frozen=True)
class _Reason:
    """The reason for the way of a row, in words."""

    case: RowWays

    @property
    def text(self) -> str:
        """The reason, with numbers: for the level, for the hops, and why something cheaper was not taken."""
        case = self.case
        if case.comparison.plan.world_size == 1:
            return "there is one rank"
        if case.seconds[ONE_HOP] == 0:
            return "no batch is expected to read it, so its place does not matter"
        level = self._why_copied if case.extra_bytes[case.way] else self._why_not_copied
        clauses = [*level(), *self._why_hops()]
        if _threshold(case.comparison) is None and any(case.saves(way, case.way) for way in case.ways):
            clauses.append(self._not_compared)
        return "; ".join(clauses)

    def _why_copied(self) -> Iterator[str]:
        case, threshold = self.case, _threshold(self.case.comparison)
        whole, step_from = case.saving(case.way, case.cheapest_single), case.step_from
        step = case.saving(case.way, step_from)
        if whole.amount < 0:
            more = f"a copy of this row alone costs {self._amount(whole)} more than one copy"
            yield more if threshold is None else f"{more}, but {self._together}"
            return
        text = f"copies save {self._amount(whole)}, {self._density(whole)} per byte of memory"
        if step_from == NODE and step.amount < 0:
            text += f"; a copy on every node would save {self._amount(step)} more"
            yield text if threshold is None else f"{text}, but {self._together}"
            return
        if step_from == NODE:
            text += f"; {self._amount(step)} of that over a copy on every node, {self._density(step)} per byte"
        if threshold is not None and not np.isclose(step.density, threshold, rtol=_ROUNDING, atol=0):
            text += ", more than λ" if step.density > threshold else f", less than λ, but {self._together}"
        yield text
        if case.way == NODE:
            best = min((REPLICATED, REPLICATED_TWO_HOP), key=lambda way: (way not in case.ways, case.seconds[way]))
            if (more := case.saving(best, NODE)).amount > 0:
                yield self._refused(f"{_subject(best)} would save another {self._amount(more)}", more)

    def _why_not_copied(self) -> Iterator[str]:
        """The copies that save most for each byte, beside the one copy as it is read, not as it might be."""
        case = self.case
        copies = [way for way in case.ways if case.extra_bytes[way]]
        best = max(copies, key=lambda way: case.saving(way, case.way).density)
        saving = case.saving(best, case.way)
        if saving.amount <= 0:
            least = min(copies, key=lambda way: case.seconds[way])
            more = f"{_subject(least)} would cost {self._amount(case.saving(least, case.way))} more than one copy"
            training = case.comparison.problem.request.training
            yield f"{more}: every holder of a copy needs the delta of every update" if training else more
            return
        would = f"{_subject(best)} would save {self._amount(saving)}"
        counted = case.saving(best, case.cheapest_single)
        if case.cheapest_single == case.way or _threshold(case.comparison) is None:
            yield self._refused(would, saving)
        elif counted.amount <= 0:
            yield f"{would}, but nothing over {_HOPS[case.cheapest_single]}"
        else:
            over = f"{self._amount(counted)} over {_HOPS[case.cheapest_single]}"
            yield self._refused(f"{would}, {over}", counted)

    def _refused(self, would: str, saving: Saving) -> str:
        """Why more copies are not made, which would save something."""
        threshold = _threshold(self.case.comparison)
        each = f"{would}, {self._density(saving)} per byte of memory"
        if threshold is None:
            return each
        if saving.density < threshold:
            return f"{each}, less than λ: the memory for copies goes to rows that save more per byte"
        if self._is_cut:
            return f"{each}, but the table is not sorted by frequency, and its limited ranges go to hotter rows"
        if threshold == 0:
            return f"{each}, but {self._together}"
        return f"{each}, but the memory for copies is used up: only whole ranges and rounds of rows are copied"

    def _why_hops(self) -> Iterator[str]:
        """Why a row takes one hop or two where the other is cheaper."""
        case = self.case
        if (other := case.other_hops) is not None:
            amount = self._amount(case.saving(other, case.way))
            would = f"{_HOPS[other]} instead of {_HOPS[case.way]} would save {amount}"
            if _threshold(case.comparison) is None:
                yield would
            elif case.way in (ONE_HOP, TWO_HOP) and self._shares_a_round:
                world_size = case.comparison.plan.world_size
                yield f"{would}, but one and two hops change by whole rounds of {world_size:,} rows"
            else:
                yield f"{would}, but {self._together}"

    @property
    def _shares_a_round(self) -> bool:
        """Whether rows that are near enough to stand in the same round are best as this row is."""
        case, problem = self.case, self.case.comparison.problem
        demand, other = problem.demand, _OTHER_HOPS[case.way]
        near = case.comparison.plan.world_size - 1
        first, last = max(case.row - near, 0), min(case.row + near, case.table.shape.num_rows - 1)
        rows = demand.first_row[case.index] + np.array([first, last])
        low, high = np.searchsorted(demand.starts, rows, "right") - 1
        costs = LinkCosts.of(problem.topology)
        seconds = RowBytes.of(demand, problem.request).seconds(costs)[:, low : high + 1]
        return bool((seconds[case.way] <= seconds[other]).any())

    @property
    def _together(self) -> str:
        """Why a row does not go the way that is best for it alone, in a plan by levels."""
        case = self.case
        if self._is_cut or not case.comparison.problem.profile.tables[case.index].is_falling:
            return "rows that are not in order of frequency are placed together, by their mean"
        if case.way in (REPLICATED, REPLICATED_TWO_HOP) and len(case.part) == 1:
            return "a copy on every node of a row by itself takes a slot on every rank, too"
        return "its whole range goes the same way"

    @property
    def _not_compared(self) -> str:
        """Why a cheaper way is not taken in a plan that has no λ."""
        comparison = self.case.comparison
        if _weighs_links(comparison):
            return "the plan minimizes the slowest link, not this sum"
        return f"strategy {comparison.plan.strategy!r} does not compare the two"

    @property
    def _is_cut(self) -> bool:
        table = self.case.table
        return len(table.ranges) > most_ranges(table.shape.num_rows) // 2

    def _amount(self, saving: Saving) -> str:
        return f"{self.case.comparison.cost_text(abs(saving.amount))} a step"

    def _density(self, saving: Saving) -> str:
        return _density_text(self.case.comparison, saving.density)


def _subject(way: int) -> str:
    return f"{WAYS[way]}," if "," in WAYS[way] else WAYS[way]


def _accesses_text(case: RowWays) -> str:
    problem = case.comparison.problem
    profile, demand = problem.profile, problem.demand
    table = profile.tables[case.index]
    run = int(np.searchsorted(table.starts, case.row, "right")) - 1
    batch = problem.request.batch_size
    often = (
        f"a rank's batch of {batch:,} samples reads it with probability {demand.rank[case.run]:.3g}"
        if problem.request.deduplicated
        else f"a rank's batch of {batch:,} samples reads it {demand.rank[case.run]:.3g} times"
    )
    return (
        f"{table.accesses[run]:,.6g} times in {profile.num_samples:,} samples; {often}, "
        f"the batches of all ranks with probability {demand.world[case.run]:.3g}"
    )


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
    """λ, or None where rows are not chosen by what they save summed over links."""
    return None if _weighs_links(comparison) else comparison.plan.notes.get("multiplier_s_per_byte")


def _weighs_links(comparison: Comparison) -> bool:
    """Whether λ is of links that weigh more or less than they cost, so that the slowest is fast."""
    plan = comparison.plan
    return comparison.problem.request.minimizes_slowest_link and 1 < plan.num_nodes < plan.world_size


def _threshold_text(comparison: Comparison) -> str:
    if _weighs_links(comparison):
        return "no λ: the slowest link is minimized, not this sum"
    threshold = _threshold(comparison)
    if threshold is None:
        return f"strategy {comparison.plan.strategy!r} has no threshold λ"
    if threshold == 0:
        return "λ = 0: all copies that save anything fit in memory"
    return f"λ = {_density_text(comparison, threshold)} saved per step and byte of memory"


def _density_text(comparison: Comparison, density: float) -> str:
    """Savings of a step per byte of memory: weighted bytes, or seconds."""
    return f"{density:.3g} bytes" if comparison.is_relative else seconds_text(density)
