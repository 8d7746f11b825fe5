"""Placements over unequal links (OPER §6.3, Fig. 8), made from what counts let expect (`rowmesh.placement.unseen`)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from benchmarks.command import Report
from benchmarks.placement_plans import BATCH_SIZE, find, judge, links, oracle, spread
from benchmarks.shapes import Shape, draw
from rowmesh.placement.cost import Cost, cost_of
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Mode, Objective, Request
from rowmesh.placement.strategies import QUICK
from rowmesh.placement.topology import Topology
from rowmesh.placement.unseen import smoothed

EXTRA_MEMORY = (0.01, 0.05, 0.20)


def topology(report: Report, name: str, shapes: Sequence[str], quick: bool) -> None:
    """Both objectives, inference and training, raw and deduplicated."""
    network = Topology.load(name)
    for shape in map(draw, shapes):
        best, planned = oracle(shape), smoothed(shape.counted)
        for request in _requests(quick):
            exchange = "deduplicated" if request.deduplicated else "raw"
            case = (
                f"{network.name} {shape.name} {request.objective} {request.mode} {exchange} {request.extra_memory:.0%}"
            )
            costs = {strategy: _line(report, network, shape, planned, strategy, request) for strategy in QUICK}
            if request.objective == "total":
                _compare_with_bound(report, case, network, shape, planned, best, request)
            least = min(cost for cost in costs.values() if cost is not None)
            if (cyclic := costs["cyclic"]) is not None:
                report.ratio(f"{case}: cyclic over the best strategy, target 1", round(cyclic / least, 4))


def _requests(quick: bool) -> list[Request]:
    """Every combination, or three that differ most."""
    kinds: list[tuple[Objective, Mode, bool]] = (
        [("total", "infer", False), ("total", "train", True), ("slowest_link", "infer", True)]
        if quick
        else list(itertools.product(get_args(Objective)[1:], get_args(Mode), (False, True)))
    )
    return [
        Request(batch_size=BATCH_SIZE, extra_memory=extra, mode=mode, deduplicated=dedup, objective=objective)
        for objective, mode, dedup in kinds
        for extra in ((0.05,) if quick else EXTRA_MEMORY)
    ]


def _exchange(request: Request) -> str:
    return "deduplicated" if request.deduplicated else "raw"


def _line(
    report: Report, network: Topology, shape: Shape, profile: Profile, strategy: str, request: Request
) -> float | None:
    found = find(strategy, profile, network, request)
    line: dict[str, Any] = {
        "topology": network.name,
        "shape": shape.name,
        "objective": request.objective,
        "mode": request.mode,
        "exchange": _exchange(request),
        "extra_memory": request.extra_memory,
        "strategy": strategy,
    }
    if found.plan is None:
        report.line(**line, unavailable=found.why_not)
        return None
    cost = judge(found.plan, shape, request)
    seconds = cost.objective(network, request)
    limit = request.limit_bytes(shape.counted.shapes, network.world_size, network.memory_bytes)
    fits = max(found.plan.memory_bytes) <= limit
    kinds = _kinds(cost, network, request)
    if strategy == "cyclic" and request.mode == "infer" and request.minimizes_slowest_link:
        planned = _kinds(cost_of(found.plan, profile, request), network, request)
        where = f"{network.name} {shape.name} slowest_link infer {_exchange(request)} {request.extra_memory:.0%}"
        for accesses, ratios in (("expected", planned), ("true", kinds)):
            report.ratio(
                f"{where}: slowest link between nodes over slowest within, by {accesses} accesses",
                ratios.get("inter_over_intra"),
            )
    report.line(
        **line, objective_us=float(f"{seconds * 1e6:.6g}"), fits=fits, **kinds, search_ms=round(found.seconds * 1e3, 2)
    )
    return seconds if fits else None


def _compare_with_bound(
    report: Report, case: str, network: Topology, shape: Shape, planned: Profile, best: Profile, request: Request
) -> None:
    """The sum over links beside the linear program's, for what was expected and for what is true."""
    found, limit = (find("cyclic", profile, network, request).plan for profile in (planned, best))
    assert found is not None
    assert limit is not None
    expected, true = (
        cost_of(found, profile, request).objective(network, request) for profile in (planned, shape.truth)
    )
    in_sample, out_of_sample = expected / found.notes["bound"], true / limit.notes["bound"]
    report.line(case=case, over_bound_in_sample=round(in_sample, 7), over_oracle_bound=round(out_of_sample, 6))
    report.ratio(f"{case}: cyclic over the bound by expected accesses, target 1.01", round(in_sample, 7))
    report.ratio(f"{case}: cyclic by true accesses over the bound of a plan that knows them", round(out_of_sample, 6))


def _kinds(cost: Cost, network: Topology, request: Request) -> dict[str, Any]:
    """Microseconds of the links within nodes and between them."""
    seconds = cost.link_seconds(network, request.fetch_weight) * 1e6
    off = ~np.eye(len(seconds), dtype=bool)
    kinds: dict[str, Any] = {"link_us": spread(links(seconds))}
    if network.num_nodes > 1 and network.ranks_per_node > 1:
        within, between = seconds[network.same_node & off], seconds[~network.same_node]
        kinds |= {"intra_us": spread(within), "inter_us": spread(between)}
        kinds["inter_over_intra"] = round(float(between.max() / within.max()), 4) if within.max() else None
    return kinds
