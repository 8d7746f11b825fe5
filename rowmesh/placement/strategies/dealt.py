"""The default strategy: levels by one multiplier, then everything is dealt.

Hot rows on all ranks, warm ones on every node, cold ones once, as prefixes of each table
(`rowmesh.placement.strategies.levels` says which pay); requests and gradients of cold rows take two hops where enough
ranks of a node want the same rows. Homes are dealt by arithmetic and balanced (`rowmesh.placement.strategies.dealing`).

With deduplication and equal links, training gains nothing from copies: whoever reads a row must then be told of every
update, of which there are more than reads. The strategy finds that and makes none, unless `fetch_weight` says that
fetches are dearer than updates.

Source: OPER §4 poses the problem. Differs: see docs/oper.md.
"""

from __future__ import annotations

from typing import Any

from rowmesh.placement.plan import Plan, RowRange
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.dealing import Span, deal
from rowmesh.placement.strategies.level_search import LevelSearch
from rowmesh.placement.strategies.levels import Levels, LinkCosts, RowBytes
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology


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
    levels, spans = found.fitting()
    return problem.plan(deal_spans(problem, spans), "dealt", describe(problem, levels, spans))


def deal_spans(problem: Problem, spans: list[Span]) -> list[list[RowRange]]:
    """Ranges whose homes carry equal seconds."""
    moved = RowBytes.of(problem.demand, problem.request)
    return deal(spans, problem.demand, moved.seconds(LinkCosts.of(problem.topology)))


def describe(problem: Problem, levels: Levels, spans: list[Span]) -> dict[str, Any]:
    """What was chosen, for the plan's notes."""
    rules = {"replicated": 0, "node": 0, "dealt": 0}
    two_hop = 0
    for span in spans:
        part = span.range()
        rules[part.rule] += len(span)
        two_hop += len(span) * part.two_hop
    return {
        "rows": rules,
        "two_hop_rows": two_hop,
        "multiplier_s_per_byte": levels.multiplier,
        "bound": None if problem.request.minimizes_slowest_link else levels.bound_seconds,
        "limit_bytes": problem.limit_bytes,
        "objective": "slowest_link" if problem.request.minimizes_slowest_link else "total",
    }
