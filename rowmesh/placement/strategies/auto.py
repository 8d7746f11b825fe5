"""`auto`: makes every plan that is quickly made, and takes the best by the model on the user's data and links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rowmesh.errors import ConfigurationError
from rowmesh.placement.plan import Plan
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

# Differences that the arithmetic makes, not the placement: then balance decides.
EQUAL = 1e-9


def search(profile: Profile, topology: Topology, request: Request) -> Plan:
    """The best of all quick strategies whose plans fit; its notes name the runner-up and say what each would cost.

    Raises:
        ConfigurationError: the rows do not fit in any way.
    """
    from rowmesh.placement.strategies import QUICK, find

    problem = Problem(profile, topology, request)
    problem.check_feasible()
    plans, left_out = {}, {}
    for name in QUICK:
        try:
            plan = find(name)(profile, topology, request)
        except ConfigurationError as error:
            left_out[name] = str(error)
            continue
        over = max(plan.memory_bytes) - problem.limit_bytes
        if over > 0:
            left_out[name] = f"{over:,} bytes more than the limit of {problem.limit_bytes:,} on a rank"
        else:
            plans[name] = plan
    return _best(problem, plans, left_out)


def _best(problem: Problem, plans: dict[str, Plan], left_out: dict[str, str]) -> Plan:
    compared = {name: _numbers(problem, plan) for name, plan in plans.items()}
    least = min(numbers["objective"] for numbers in compared.values())

    def rank(name: str) -> tuple[bool, float, float]:
        numbers = compared[name]
        return numbers["objective"] > least * (1 + EQUAL), numbers["slowest_link"], numbers["objective"]

    order = sorted(compared, key=rank)
    chosen = plans[order[0]]
    notes = dict(chosen.notes) | {"auto": _why(problem, order, compared), "compared": compared, "left_out": left_out}
    return replace(chosen, notes=notes)


def _numbers(problem: Problem, plan: Plan) -> dict[str, Any]:
    cost = problem.cost(plan)
    seconds = cost.link_seconds(problem.topology, problem.request.fetch_weight)
    return {
        "objective": cost.objective(problem.topology, problem.request),
        "total": float(seconds.sum()),
        "slowest_link": float(seconds.max()),
        "bytes": cost.total_bytes,
        "memory_bytes": int(max(plan.memory_bytes)),
        "lookup_balance": cost.lookup_balance,
    }


def _why(problem: Problem, order: list[str], compared: dict[str, dict[str, Any]]) -> str:
    kind = "slowest link" if problem.request.minimizes_slowest_link else "sum over links"
    best, others = order[0], order[1:]
    if not others:
        return f"{best}: no other plan fits"
    first, second = compared[best], compared[others[0]]
    if second["objective"] <= first["objective"] * (1 + EQUAL):
        return (
            f"{best}: {kind} as with {others[0]} ({first['objective']:.6g}), but the slowest link takes "
            f"{first['slowest_link']:.6g} instead of {second['slowest_link']:.6g}"
        )
    more = second["objective"] / first["objective"] - 1 if first["objective"] else float("inf")
    return (
        f"{best}: {kind} {first['objective']:.6g}; "
        f"{others[0]} comes next with {second['objective']:.6g} ({more:.2%} more)"
    )
