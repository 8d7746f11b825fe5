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
MAX_MIXED_RUNS = 64


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
        mixed: another search and its share, 0 … 1: levels are between those of both.
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
            weighed = replace(costs, inter=costs.inter * dearer, agent=costs.agent * dearer)
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
            np.floor(own + share * (others - own)).astype(np.int64)
            for own, others in ((levels.hot, other.hot), (levels.copied, other.copied))
        )
        return replace(levels, hot=hot, copied=copied)

    def link_seconds(self, levels: Levels) -> tuple[float, float]:
        """(within nodes, between nodes): the slowest link of either kind when homes are balanced."""
        W, G, H = self.demand.world_size, self.demand.ranks_per_node, self.demand.num_nodes
        rows = np.zeros((3, len(levels.hot)))
        rows[HOT], rows[WARM], rows[COLD] = levels.hot, levels.copied - levels.hot, self.demand.lengths - levels.copied
        run = np.arange(len(levels.hot))
        costs = LinkCosts.of(self.problem.topology)
        intra, inter, agent = (
            float((matrix[self.choices.kind, run] * rows).sum())
            for matrix in (self.moved.intra, self.moved.inter, self.moved.agent)
        )
        between = costs.inter * inter / (W * (W - G)) + costs.agent * agent / (W * (H - 1))
        return costs.intra * intra / (W * (G - 1)), between

    def slowest_link(self) -> float:
        """Seconds of the slowest link, with the whole budget."""
        return max(self.link_seconds(self.take(self.budget_bytes)))


def _with_tails(problem: Problem) -> Demand:
    """The demand with tails as tables of their own, where memory has a slot more for each."""
    demand = problem.demand.with_tails()
    has_room = least_bytes(demand.shapes, demand.world_size) <= problem.limit_bytes
    return demand if has_room else problem.demand


def _balanced(under: Callable[[float], LevelSearch]) -> tuple[float, LevelSearch]:
    """The factor on links between nodes under which the slowest link is fastest, and the search under it.

    The dearer links between nodes are made, the less moves over them: both kinds take equally long at the root of a
    falling function, which is found by false position (Illinois) over the logarithm of the factor. Where the function
    jumps over its root, since many equal rows change their level together, some of them do.
    """
    tried: list[tuple[float, int, float, LevelSearch]] = []

    def imbalance(exponent: float) -> float:
        search = under(float(np.exp(exponent)))
        within, between = search.link_seconds(search.take(search.budget_bytes))
        tried.append((max(within, between), len(tried), float(np.exp(exponent)), search))
        return (between - within) / (between + within) if between + within > 0 else 0.0

    low, high = -float(np.log(MOST_UNEQUAL)), float(np.log(MOST_UNEQUAL))
    at_low, at_high = imbalance(low), imbalance(high)
    below, above = tried
    if at_low > 0 > at_high:
        for _ in range(POSITIONS):
            middle = (low * at_high - high * at_low) / (at_high - at_low)
            at_middle = imbalance(middle)
            if abs(at_middle) < BALANCED:
                break
            if at_middle > 0:
                low, at_low, at_high, below = middle, at_middle, at_high / 2, tried[-1]
            else:
                high, at_high, at_low, above = middle, at_middle, at_low / 2, tried[-1]
        else:
            if (mixed := _mix(below[-1], above[-1])) is not None:
                tried.append((mixed.slowest_link(), len(tried), above[2], mixed))
    _, _, factor, best = min(tried, key=lambda entry: entry[:2])
    return factor, best


def _mix(low: LevelSearch, high: LevelSearch) -> LevelSearch | None:
    """Levels under which both kinds of links take equally long, between two that err on different sides; none where
    these differ in so many runs that their rows would make too many ranges.
    """
    levels = [search.take(search.budget_bytes) for search in (low, high)]
    differ = np.count_nonzero((levels[0].hot != levels[1].hot) | (levels[0].copied != levels[1].copied))
    if differ > MAX_MIXED_RUNS or not np.array_equal(low.choices.kind, high.choices.kind):
        return None
    (within, between), (within_high, between_high) = (low.link_seconds(levels[0]), high.link_seconds(levels[1]))
    ahead, behind = between - within, within_high - between_high
    return replace(low, mixed=(high, ahead / (ahead + behind)))
