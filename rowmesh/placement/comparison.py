"""Comparison: the plans of all strategies side by side, which one was chosen, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from rowmesh.placement.plan import Plan
from rowmesh.placement.strategies import QUICK, search
from rowmesh.placement.strategies.auto import EQUAL, NOISE, Candidate, attempt, attempts, choose
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.strategies.sums import with_chosen_sums, without_choice
from rowmesh.placement.summary import copied_share
from rowmesh.placement.text import bytes_text, seconds_text

# No link is slower than 1 kB/s: greater costs are relative.
_LEAST_RELATIVE_COST = 1e-3


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
        least = min(other.objective for other in others)
        second = next(other for other in others if other.objective <= least * (1 + EQUAL))
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
    alike = without_choice(problem)  # the others are shown as plans of rows
    if strategy == "auto":
        found = attempts(alike)
        plan = with_chosen_sums(problem, choose(alike, found))
    else:
        plan = search(strategy, problem.profile, problem.topology, problem.request)
        found = [attempt(alike, name) for name in QUICK if name != strategy]
    same = (each for each in found if each.name == plan.strategy and each.plan and each.plan.tables == plan.tables)
    best = next((replace(each, plan=plan) for each in same), None) or Candidate.of(problem, plan)
    candidates = (best, *(other for other in found if other.name != best.name))
    comparison = Comparison(problem, strategy, candidates, plan)
    share = copied_share(plan, problem.profile)
    copies = {"copies": f"hot rows, copied to every rank, get {share:.1%} of the accesses"} if share else {}
    return replace(comparison, plan=replace(plan, notes={**plan.notes, **copies, "why": comparison.why}))


def is_relative(problem: Problem) -> bool:
    """Whether links have relative costs, so that objectives are weighted bytes and not seconds."""
    return problem.topology.cheapest_link >= _LEAST_RELATIVE_COST


def _measure(problem: Problem) -> str:
    return "on its slowest link" if problem.request.minimizes_slowest_link else "summed over links"


def _less(smaller: Candidate, greater: Candidate) -> str:
    return f"{1 - smaller.objective / greater.objective:.2%}".replace("%", " %")
