"""Comparison: the plans of all strategies side by side, which one was chosen, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rowmesh.placement.cost import Cost
from rowmesh.placement.plan import Plan
from rowmesh.placement.strategies import QUICK, search
from rowmesh.placement.strategies.auto import EQUAL, NOISE, attempt, attempts, choose
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.summary import copied_share
from rowmesh.placement.text import bytes_text, seconds_text

# No link is slower than 1 kB/s: greater costs are relative.
_LEAST_RELATIVE_COST = 1e-3


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

    @property
    def fits(self) -> bool:
        """Whether there is a plan that keeps the limit."""
        return self.plan is not None and not self.over_bytes

    @property
    def complaint(self) -> str:
        """Why the plan is missing or does not fit; empty if it fits."""
        return self.refusal or (f"{bytes_text(self.over_bytes)} over the limit" if self.over_bytes else "")


@dataclass(frozen=True, eq=False)
class Comparison:
    """All strategies on one problem.

    Attributes:
        problem: what was asked for.
        asked: the strategy that was asked for, which may be `auto`.
        candidates: one a strategy.
        plan: the chosen plan; its notes say `why`.
    """

    problem: Problem
    asked: str
    candidates: tuple[Candidate, ...]
    plan: Plan

    @cached_property
    def chosen(self) -> Candidate:
        """The candidate whose plan it is."""
        return next(candidate for candidate in self.candidates if candidate.name == self.plan.strategy)

    @property
    def is_relative(self) -> bool:
        """Whether links have relative costs, so that objectives are weighted bytes and not seconds."""
        return is_relative(self.problem)

    @cached_property
    def why(self) -> str:
        """Why the plan was chosen, in a sentence."""
        best = self.chosen
        if self.plan.world_size == 1:
            return f"{best.name}: there is one rank, so nothing is sent"
        others = [other for other in self.candidates if other.fits and other is not best]
        judged = f"a step costs {self.cost_text(best.objective)} {_measure(self.problem)}"
        if not others:
            return f"{best.name}: {judged}; no other plan fits"
        second = min(others, key=lambda other: other.objective)
        than = f"{second.name} ({self.cost_text(second.objective)})"
        if self.asked != "auto" and second.objective < best.objective * (1 - EQUAL):
            return f"{best.name}, as asked for: {judged}; {than} would cost {_less(second, best)} less"
        if second.objective < best.objective * (1 - EQUAL):
            less = f"{than} would cost {_less(second, best)} less"
            return f"{best.name}: {judged}; {less}, which is within the error of the model ({NOISE:.0%})"
        if second.objective > best.objective * (1 + EQUAL):
            return f"{best.name}: {judged}, {_less(best, second)} less than {than}, the next best that fits"
        return f"{best.name}: {judged}, the same as {than}{self._slowest(best, second)}"

    def cost_text(self, objective: float) -> str:
        """An objective with its unit."""
        return bytes_text(objective) if self.is_relative else seconds_text(objective)

    def more_text(self, candidate: Candidate) -> str:
        """How much more a candidate costs than the chosen one; empty for the chosen one."""
        best = self.chosen.objective
        if candidate is self.chosen or not best:
            return ""
        more = candidate.objective / best - 1
        return "the same" if abs(more) < EQUAL else f"{more:+.1%}"

    def _slowest(self, best: Candidate, second: Candidate) -> str:
        """The difference between two plans whose objectives are equal: their slowest links."""
        ours, theirs = (self.slowest_link(candidate) for candidate in (best, second))
        if ours >= theirs * (1 - EQUAL):
            return ""
        return f", but its slowest link takes {self.cost_text(ours)} instead of {self.cost_text(theirs)}"

    def slowest_link(self, candidate: Candidate) -> float:
        """Seconds (or weighted bytes) of a candidate's slowest link in a step."""
        assert candidate.cost is not None
        return candidate.cost.seconds(self.problem.topology, self.problem.request.fetch_weight).most


def compare(problem: Problem, strategy: str = "auto") -> Comparison:
    """The plan of a strategy, beside the plans of all quick strategies.

    Raises:
        ConfigurationError: there is no such strategy, or the request cannot be met.

    Example:
        >>> from rowmesh.placement import TableShape
        >>> from rowmesh.placement.profile import Profile
        >>> from rowmesh.placement.request import Request
        >>> from rowmesh.placement.topology import Topology
        >>> shape = TableShape("item", 8, value_bytes=64, gradient_bytes=64)
        >>> profile = Profile.from_counts({"item": [9, 5, 3, 2, 1, 1, 1, 1]}, [shape], num_samples=30)
        >>> problem = Problem(profile, Topology.uniform(4), Request(batch_size=4, mode="infer", extra_memory=1.0))
        >>> compare(problem, "cyclic").why.split(":")[0]
        'cyclic'
    """
    if strategy == "auto":
        plans = attempts(problem)
        plan = choose(problem, plans)
    else:
        plan = search(strategy, problem.profile, problem.topology, problem.request)
        plans = {name: attempt(problem, name) for name in QUICK if name != strategy}
    plans = {plan.strategy: plan} | {name: other for name, other in plans.items() if name != plan.strategy}
    candidates = tuple(_judged(problem, name, other) for name, other in plans.items())
    comparison = Comparison(problem, strategy, candidates, plan)
    share = copied_share(plan, problem.profile)
    copies = {"copies": f"hot rows, copied to every rank, get {share:.1%} of the accesses"} if share else {}
    return replace(comparison, plan=replace(plan, notes={**plan.notes, **copies, "why": comparison.why}))


def is_relative(problem: Problem) -> bool:
    """Whether links have relative costs, so that objectives are weighted bytes and not seconds."""
    cost = problem.topology.cost
    links = cost[~np.eye(len(cost), dtype=bool)]
    return not len(links) or float(links.min()) >= _LEAST_RELATIVE_COST


def _judged(problem: Problem, name: str, plan: Plan | str) -> Candidate:
    if isinstance(plan, str):
        return Candidate(name, refusal=plan)
    cost = problem.cost(plan)
    over = max(max(plan.memory_bytes) - problem.limit_bytes, 0)
    return Candidate(name, plan, cost, cost.objective(problem.topology, problem.request), over)


def _measure(problem: Problem) -> str:
    return "on its slowest link" if problem.request.minimizes_slowest_link else "summed over links"


def _less(smaller: Candidate, greater: Candidate) -> str:
    return f"{1 - smaller.objective / greater.objective:.2%}".replace("%", " %")
