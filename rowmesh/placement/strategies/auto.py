"""`auto`: makes a plan with every quick strategy, and takes the best by the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rowmesh.errors import ConfigurationError
from rowmesh.placement import strategies
from rowmesh.placement.plan import Plan
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import QUICK
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

# Smaller differences come from rounding, not from the placement: balance decides.
EQUAL = 1e-9
# Smaller differences are within the error of counts and links: the default strategy, which balances, is taken.
NOISE = 0.01
DEFAULT = "cyclic"


def search(profile: Profile, topology: Topology, request: Request) -> Plan:
    """The best of all quick strategies whose plans fit; its notes name the runner-up and say what each would cost.

    Raises:
        ConfigurationError: the rows do not fit in any way.
    """
    problem = Problem(profile, topology, request)
    return choose(problem, attempts(problem))


def attempts(problem: Problem) -> dict[str, Plan | str]:
    """The plan of every quick strategy, or the reason why there is none.

    Raises:
        ConfigurationError: the rows do not fit in any way.
    """
    problem.check_feasible()
    return {name: attempt(problem, name) for name in QUICK}


def attempt(problem: Problem, name: str) -> Plan | str:
    """A strategy's plan, or why there is none."""
    try:
        return strategies.search(name, problem.profile, problem.topology, problem.request)
    except ConfigurationError as error:
        return str(error)


def choose(problem: Problem, plans: Mapping[str, Plan | str]) -> Plan:
    """The best of the plans that fit: the default's unless another is better by more than the error of the model.

    Args:
        problem: what is asked for.
        plans: as from `attempts`.
    """
    fitting, left_out = {}, {}
    for name, plan in plans.items():
        if isinstance(plan, str):
            left_out[name] = plan
        elif (over := max(plan.memory_bytes) - problem.limit_bytes) > 0:
            left_out[name] = f"{over:,} bytes more than the limit of {problem.limit_bytes:,} on a rank"
        else:
            fitting[name] = plan
    compared = {name: _numbers(problem, plan) for name, plan in fitting.items()}
    order = _ranked(compared)
    notes = {"auto": _why(problem, order, compared), "compared": compared, "left_out": left_out}
    chosen = fitting[order[0]]
    return replace(chosen, notes=dict(chosen.notes) | notes)


def _ranked(compared: dict[str, dict[str, Any]]) -> list[str]:
    """Names, the best first."""
    least = min(numbers["objective"] for numbers in compared.values())

    def rank(name: str) -> tuple[bool, bool, float, float]:
        numbers = compared[name]
        is_default = name == DEFAULT and numbers["objective"] <= least * (1 + NOISE)
        return not is_default, numbers["objective"] > least * (1 + EQUAL), numbers["slowest_link"], numbers["objective"]

    return sorted(compared, key=rank)


def _numbers(problem: Problem, plan: Plan) -> dict[str, Any]:
    cost = problem.cost(plan)
    seconds = cost.seconds(problem.topology, problem.request.fetch_weight)
    return {
        "objective": seconds.most if problem.request.minimizes_slowest_link else seconds.total,
        "total": seconds.total,
        "slowest_link": seconds.most,
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
    if second["objective"] < first["objective"] * (1 - EQUAL):
        return (
            f"{best}: {kind} {first['objective']:.6g}; {others[0]} with {second['objective']:.6g} is better, but "
            f"within the error of the model ({NOISE:.0%})"
        )
    if second["objective"] <= first["objective"] * (1 + EQUAL):
        same = f"{best}: {kind} as with {others[0]} ({first['objective']:.6g})"
        ours, theirs = first["slowest_link"], second["slowest_link"]
        return same + (f", but the slowest link takes {ours:.6g} instead of {theirs:.6g}" if ours < theirs else "")
    more = second["objective"] / first["objective"] - 1 if first["objective"] else float("inf")
    return (
        f"{best}: {kind} {first['objective']:.6g}; "
        f"{others[0]} comes next with {second['objective']:.6g} ({more:.2%} more)"
    )
