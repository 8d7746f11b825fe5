"""`auto`: makes a plan with every quick strategy, and takes the best by the cost model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from rowmesh.errors import ConfigurationError
from rowmesh.placement import strategies
from rowmesh.placement.cost import Cost
from rowmesh.placement.plan import Plan
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import QUICK
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.text import bytes_text
from rowmesh.placement.topology import Topology

# Smaller differences come from rounding, not from the placement: balance decides.
EQUAL = 1e-9
# Smaller differences are within the error of counts and links: the default strategy, which balances, is taken.
NOISE = 0.01
DEFAULT = "cyclic"


@dataclass(frozen=True, eq=False)
class Candidate:
    """The result of one strategy.

    Attributes:
        name: of the strategy.
        plan: None where it made none.
        cost: of a step under the plan.
        objective: what it is judged by.
        over_bytes: how much more than the limit the fullest rank would hold.
        refusal: why there is no plan.
    """

    name: str
    plan: Plan | None = None
    cost: Cost | None = None
    objective: float = float("inf")
    over_bytes: int = 0
    refusal: str = ""

    @staticmethod
    def of(problem: Problem, plan: Plan) -> Candidate:
        """Judges a plan."""
        cost = problem.cost(plan)
        objective = cost.objective(problem.topology, problem.request)
        return Candidate(plan.strategy, plan, cost, objective, problem.over_bytes(plan))

    @property
    def fits(self) -> bool:
        """Whether there is a plan that keeps the limit."""
        return self.plan is not None and not self.over_bytes

    @property
    def complaint(self) -> str:
        """Why the plan is missing or does not fit; empty if it fits."""
        return self.refusal or (f"{bytes_text(self.over_bytes)} over the limit" if self.over_bytes else "")


def search(profile: Profile, topology: Topology, request: Request) -> Plan:
    """The best of all quick strategies whose plans fit; its notes name the runner-up and say what each would cost.

    Raises:
        ConfigurationError: the rows do not fit in any way.
    """
    problem = Problem(profile, topology, request)
    return choose(problem, attempts(problem))


def attempts(problem: Problem) -> list[Candidate]:
    """The plan of every quick strategy, judged, or the reason why there is none.

    Raises:
        ConfigurationError: the rows do not fit in any way.
    """
    problem.check_feasible()
    return [attempt(problem, name) for name in QUICK]


def attempt(problem: Problem, name: str) -> Candidate:
    """A strategy's plan, judged, or why there is none."""
    try:
        plan = strategies.search(name, problem.profile, problem.topology, problem.request)
    except ConfigurationError as error:
        return Candidate(name, refusal=str(error))
    return Candidate.of(problem, plan)


def choose(problem: Problem, candidates: Iterable[Candidate]) -> Plan:
    """The best of the plans that fit: the default's unless another is better by more than the error of the model."""
    fitting, compared, left_out = {}, {}, {}
    for candidate in candidates:
        if candidate.over_bytes:
            over = f"{candidate.over_bytes:,} bytes more than the limit of {problem.limit_bytes:,} on a rank"
            left_out[candidate.name] = over
        elif candidate.plan is None or candidate.cost is None:
            left_out[candidate.name] = candidate.refusal
        else:
            fitting[candidate.name] = candidate.plan
            compared[candidate.name] = _numbers(problem, candidate.cost)
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


def _numbers(problem: Problem, cost: Cost) -> dict[str, Any]:
    seconds = cost.seconds(problem.topology, problem.request.fetch_weight)
    return {
        "objective": seconds.most if problem.request.minimizes_slowest_link else seconds.total,
        "total": seconds.total,
        "slowest_link": seconds.most,
        "bytes": cost.total_bytes,
        "memory_bytes": int(cost.memory_bytes.max()),
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
