"""The default strategy: levels by one multiplier, then all owners cyclic.

Hot rows have a copy on every rank, warm rows one on every node, cold rows one in all. Levels are prefixes of each table
and of its tail, whose rows are read more often again; `rowmesh.placement.strategies.levels` finds how long they are.
Requests and gradients of cold rows take two hops where enough ranks of a node read the same rows. Owners are cyclic,
and balanced by `rowmesh.placement.strategies.cyclic_ranges`.

With deduplication and equal links, training gains nothing from copies: every holder needs the delta of every update,
and there are more updates than reads. The strategy then makes no copies, unless `fetch_weight` says that fetches are
dearer than updates.

Source: OPER §4 poses the problem. Differs: see docs/oper.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rowmesh.placement.plan import Plan, RowRange
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.cyclic_ranges import Span, cyclic_ranges, joined, memory_bytes, spans_of
from rowmesh.placement.strategies.level_search import LevelSearch
from rowmesh.placement.strategies.levels import Levels, LinkCosts, RowBytes
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

NEGLIGIBLE = 1e-5


def search(profile: Profile, topology: Topology, request: Request) -> Plan:
    """The plan that moves least within the memory.

    Raises:
        ConfigurationError: the rows do not fit.

    Example:
        >>> from rowmesh.placement import TableShape
        >>> shape = TableShape("item", 12, value_bytes=64, gradient_bytes=64)
        >>> profile = Profile.from_counts({"item": [40, 20, 10, 5] + [1] * 8}, [shape], num_samples=100)
        >>> plan = search(profile, Topology.uniform(4), Request(batch_size=8, mode="infer", extra_memory=0.4))
        >>> [(part.rule, part.start, part.stop) for part in plan.tables[0].ranges[:2]], plan.memory_bytes
        ([('replicated', 0, 1), ('fixed', 1, 2)], (256, 256, 256, 256))
    """
    problem = Problem(profile, topology, request)
    found = LevelSearch.of(problem)
    plan = _plan(problem, found)
    if found.unpooled is problem.demand:
        return plan
    # A tail's own ranges take slots, which in tables of a few rows may save more elsewhere.
    return min(plan, _plan(problem, LevelSearch.of(problem, tails=False)), key=problem.objective)


def _plan(problem: Problem, found: LevelSearch) -> Plan:
    levels, spans, ranges = fit(problem, found, found.take)
    return problem.plan(ranges, "cyclic", describe(found, levels, spans))


def fit(
    problem: Problem, found: LevelSearch, take: Callable[[int], Levels]
) -> tuple[Levels, list[Span], list[list[RowRange]]]:
    """The best levels that fit on every rank, their spans, and ranges whose owners carry equal seconds.

    A cycle takes whole rounds of slots. Where that is a negligible part of the budget, the budget is cut by it;
    otherwise the ends of tables are packed.

    Args:
        problem: what is asked for.
        found: the search.
        take: finds levels within a budget of bytes over all ranks.
    """
    W, limit, budget = problem.topology.world_size, problem.limit_bytes, found.budget_bytes
    demand = found.unpooled
    seconds = RowBytes.of(demand, problem.request).seconds(LinkCosts.of(problem.topology))
    while True:
        levels = take(budget)
        spans = spans_of(levels, found.choices, found.demand)
        over = memory_bytes(spans, demand) - limit
        packed = over * W > NEGLIGIBLE * budget
        if over <= 0 or packed:
            ranges = joined(cyclic_ranges(spans, demand, seconds, packed=packed), demand.shapes)
            over = max(problem.plan(ranges, "").memory_bytes) - limit
        else:
            ranges = []
        if over <= 0:
            return levels, spans, ranges
        assert budget > 0, "rows without copies fit, as spare_bytes found"
        budget = max(budget - over * (W - 1), 0)


def describe(found: LevelSearch, levels: Levels, spans: list[Span]) -> dict[str, Any]:
    """The levels and their bound, for the notes of the plan."""
    problem, bound = found.problem, found.take(found.budget_bytes).bound_seconds
    rules = {"replicated": 0, "node": 0, "cyclic": 0}
    two_hop = 0
    for span in spans:
        part = span.range()
        rules[part.rule] += len(span)
        two_hop += len(span) * part.two_hop
    return {
        "rows": rules,
        "two_hop_rows": two_hop,
        "multiplier_s_per_byte": levels.multiplier,
        "bound": None if problem.request.minimizes_slowest_link else bound,
        "limit_bytes": problem.limit_bytes,
        "objective": "slowest_link" if problem.request.minimizes_slowest_link else "total",
    }
