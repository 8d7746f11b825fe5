"""Searching levels: what links should cost for the objective, and how many bytes really fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rowmesh.placement.demand import Demand
from rowmesh.placement.strategies.levels import COLD, HOT, WARM, Choices, Levels, LinkCosts, RowBytes, Steps
from rowmesh.placement.strategies.problem import Problem, least_bytes

MOST_UNEQUAL = 1e2
POSITIONS = 8
BALANCED = 5e-4


@dataclass(frozen=True, eq=False)
class LevelSearch:
    """The levels of one problem under some costs of links.

    Attributes:
        problem: what is asked for.
        unpooled: demand of the problem, with tails as tables of their own.
        demand: the same, pooled where it does not fall.
        moved: what rows move, by how they travel.
        choices: what rows cost at each level.
        steps: steps up, best first.
        mixed: another search and its share, 0 … 1: each table has so many hot and copied rows as lie between those of
            both.
    """

    problem: Problem
    unpooled: Demand
    demand: Demand
    moved: RowBytes
    choices: Choices
    steps: Steps
    mixed: tuple[LevelSearch, float] | None = None

    @staticmethod
    def of(problem: Problem, *, tails: bool = True) -> LevelSearch:
        """The sum over links is least under their own costs; the slowest, where links between nodes weigh as much more
        as makes both kinds take equally long.
        """
        unpooled = _with_tails(problem) if tails else problem.demand
        demand = unpooled.falling()
        moved = RowBytes.of(demand, problem.request)
        costs = LinkCosts.of(problem.topology)

        def under(dearer: float, max_hops: int) -> LevelSearch:
            weighed = replace(costs, inter=costs.inter * dearer, leader=costs.leader * dearer)
            choices = Choices.of(demand, moved.seconds(weighed), max_hops)
            return LevelSearch(problem, unpooled, demand, moved, choices, Steps.of(choices))

        max_hops = problem.request.max_hops
        if not problem.request.minimizes_slowest_link or demand.num_nodes == 1 or demand.ranks_per_node == 1:
            return under(1.0, max_hops)
        dearer, best = _balanced(lambda factor: under(factor, 1))
        if max_hops == 2 and under(dearer, 2).slowest_link() < best.slowest_link():
            _, best = _balanced(lambda factor: under(factor, 2))
        return best

    @property
    def budget_bytes(self) -> int:
        """For copies, over all ranks."""
        return self.problem.spare_bytes * self.demand.world_size

    def take(self, budget_bytes: int) -> Levels:
        """The best levels within a budget of bytes over all ranks."""
        levels = self.steps.take(budget_bytes, len(self.demand.table))
        if self.mixed is None:
            return levels
        other, share = self.mixed[0].take(budget_bytes), self.mixed[1]
        hot, copied = (
            self._from_the_first(own + share * (others - own))
            for own, others in ((levels.hot, other.hot), (levels.copied, other.copied))
        )
        return replace(levels, hot=hot, copied=copied)

    def _from_the_first(self, rows: np.ndarray) -> np.ndarray:
        """[K]: as many rows of each table as there are in `rows`, but from its first row on."""
        demand = self.demand
        of_table = np.bincount(demand.table, rows, len(demand.shapes))
        before = demand.starts[:-1] - demand.first_row[demand.table]
        # A number that should be whole may come out a little below.
        return np.clip(np.floor(of_table[demand.table] + 1e-6).astype(np.int64) - before, 0, demand.lengths)

    def has_prefixes(self, levels: Levels) -> bool:
        """Whether the hot and the copied rows of each table are its first ones."""
        return all(np.array_equal(rows, self._from_the_first(rows)) for rows in (levels.hot, levels.copied))

    def link_seconds(self, levels: Levels) -> tuple[float, float]:
        """(within nodes, between nodes): the slowest link of either kind when owners are balanced."""
        W, G, H = self.demand.world_size, self.demand.ranks_per_node, self.demand.num_nodes
        rows = np.zeros((3, len(levels.hot)))
        rows[HOT], rows[WARM], rows[COLD] = levels.hot, levels.copied - levels.hot, self.demand.lengths - levels.copied
        run = np.arange(len(levels.hot))
        costs = LinkCosts.of(self.problem.topology)
        intra, inter, leader = (
            float((matrix[self.choices.kind, run] * rows).sum())
            for matrix in (self.moved.intra, self.moved.inter, self.moved.leader)
        )
        between = costs.inter * inter / (W * (W - G)) + costs.leader * leader / (W * (H - 1))
        return costs.intra * intra / (W * (G - 1)), between

    def slowest_link(self) -> float:
        """Seconds of the slowest link, with the whole budget."""
        return max(self.link_seconds(self.take(self.budget_bytes)))


def _with_tails(problem: Problem) -> Demand:
    """The demand with tails as tables of their own, where memory has a slot more for each."""
    demand = problem.demand.with_tails()
    has_room = least_bytes(demand.shapes, demand.world_size) <= problem.limit_bytes
    return demand if has_room else problem.demand


@dataclass(frozen=True, eq=False)
class _Tried:
    """A search, and how long links take under it: the slowest in seconds, and between nodes against within, −1 … 1."""

    factor: float
    search: LevelSearch
    slowest: float
    imbalance: float

    @staticmethod
    def of(factor: float, search: LevelSearch) -> _Tried:
        within, between = search.link_seconds(search.take(search.budget_bytes))
        total = between + within
        return _Tried(factor, search, max(within, between), (between - within) / total if total > 0 else 0.0)


def _balanced(under: Callable[[float], LevelSearch]) -> tuple[float, LevelSearch]:
    """The factor on links between nodes under which the slowest link is fastest, and the search under it.

    The dearer links between nodes are made, the less moves over them: both kinds take equally long at the root of a
    falling function of the factor. Where the function jumps over its root, since many rows change their level
    together, some of them do.
    """
    most = float(np.log(MOST_UNEQUAL))
    tried, below, above = _false_position(
        lambda exponent: _Tried.of(float(np.exp(exponent)), under(float(np.exp(exponent)))), -most, most
    )
    jumps = below.imbalance > 0 > above.imbalance and abs(tried[-1].imbalance) >= BALANCED
    if jumps and _can_mix(below.search, above.search):
        tried += _false_position(
            lambda share: _Tried.of(above.factor, replace(below.search, mixed=(above.search, share))), 0.0, 1.0
        )[0]
    best = min(tried, key=lambda each: each.slowest)
    return best.factor, best.search


def _false_position(at: Callable[[float], _Tried], low: float, high: float) -> tuple[list[_Tried], _Tried, _Tried]:
    """All that was tried on the way to where both kinds of links take equally long, and the last on either side of it.

    By the rule of false position, with the correction called Illinois.
    """
    below, above = at(low), at(high)
    tried = [below, above]
    at_low, at_high = below.imbalance, above.imbalance
    if not at_low > 0 > at_high:
        return tried, below, above
    for _ in range(POSITIONS):
        middle = (low * at_high - high * at_low) / (at_high - at_low)
        found = at(middle)
        tried.append(found)
        if abs(found.imbalance) < BALANCED:
            break
        if found.imbalance > 0:
            low, below, at_low, at_high = middle, found, found.imbalance, at_high / 2
        else:
            high, above, at_high, at_low = middle, found, found.imbalance, at_low / 2
    return tried, below, above


def _can_mix(low: LevelSearch, high: LevelSearch) -> bool:
    """Whether what is between them can be said table by table."""
    same_kinds = np.array_equal(low.choices.kind, high.choices.kind)
    return same_kinds and all(search.has_prefixes(search.take(search.budget_bytes)) for search in (low, high))
