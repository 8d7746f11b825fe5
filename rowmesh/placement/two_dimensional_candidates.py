"""Candidates: plans of some tables with M replicas and the others with one, and what a step takes under each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.grid import Grid, Together
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement.plan import Plan
from rowmesh.placement.strategies import search
from rowmesh.placement.strategies.problem import Problem, least_bytes
from rowmesh.placement.text import bytes_text
from rowmesh.placement.topology import Floats
from rowmesh.placement.two_dimensional_cost import MeanSeconds, ReplicaCost, cost_with_replicas, group_topology

MOST_MIXED = 4  # plans whose tables differ are made of so many


@dataclass(frozen=True, eq=False)
class ReplicaCandidate:
    """Some tables with M replicas, the others with one.

    Attributes:
        replicas: M.
        together: which ranks have consecutive numbers, see `Grid`.
        names: of the tables with M replicas.
        problems: what was asked for of a group of each part of the plan, by its number of replicas.
        needed_bytes: of the fullest rank, as `ReplicaCost.memory_bytes` counts them; rows and state without a plan.
        limit_bytes: that a rank may hold, None where nothing limits it.
        plan: for all ranks; None where there is none.
        cost: of a step under the plan.
        refusal: why there is no plan.
    """

    replicas: int
    together: Together
    names: tuple[str, ...]
    problems: dict[int, Problem]
    needed_bytes: int
    limit_bytes: int | None
    plan: Plan | None = None
    cost: ReplicaCost | None = None
    refusal: str = ""

    @property
    def over_bytes(self) -> int:
        """How much more than the limit the fullest rank would hold."""
        return 0 if self.limit_bytes is None else max(self.needed_bytes - self.limit_bytes, 0)

    @property
    def fits(self) -> bool:
        """Whether there is a plan that keeps the limit."""
        return self.plan is not None and not self.over_bytes

    @property
    def total_s(self) -> float:
        """Seconds of a step; infinite without a plan."""
        return float("inf") if self.cost is None else self.cost.total_s

    @property
    def complaint(self) -> str:
        """Why the plan is missing or does not fit; empty if it fits."""
        return f"{bytes_text(self.over_bytes)} over the limit" if self.over_bytes else self.refusal

    @property
    def is_mixed(self) -> bool:
        """Whether tables differ."""
        return len(self.problems) > 1


@dataclass(frozen=True, eq=False)
class CandidateSearch:
    """Makes the candidates of a problem.

    Attributes:
        problem: of all ranks.
        strategy: what places the rows within a group.
        sync: how replicas are kept together.
    """

    problem: Problem
    strategy: str
    sync: Synchronization

    @cached_property
    def limit_bytes(self) -> int | None:
        """That a rank may hold."""
        limits = (self.problem.request.memory_limit_bytes, self.problem.topology.memory_bytes)
        return min((limit for limit in limits if limit is not None), default=None)

    def candidate(self, grid: Grid, names: Sequence[str]) -> ReplicaCandidate:
        """The named tables with replicas, the others with one."""
        problems = self._problems(grid, names)
        least = sum(_least(problem) for problem in problems.values())
        found = ReplicaCandidate(grid.replicas, grid.together, tuple(names), problems, least, self.limit_bytes)
        try:
            planned = self._planned(found, grid)
        except ConfigurationError as error:
            return replace(found, refusal=str(error))
        if not self._may_wait_less(planned):
            return planned
        one_hop = {count: replace(part, request=replace(part.request, max_hops=1)) for count, part in problems.items()}
        beside = self._planned(replace(found, problems=one_hop), grid)
        return min(planned, beside, key=lambda each: (not each.fits, each.total_s))

    def _planned(self, candidate: ReplicaCandidate, grid: Grid) -> ReplicaCandidate:
        """The candidate with a plan for its problems."""
        plan = self._plan(candidate.problems, grid)
        cost = self._cost(plan)
        return replace(candidate, plan=plan, cost=cost, needed_bytes=int(cost.memory_bytes.max()))

    def _may_wait_less(self, candidate: ReplicaCandidate) -> bool:
        """Whether rows take two hops, which move less but wait for each other: strategies know bytes alone."""
        assert candidate.plan is not None
        waits = self.problem.topology.longest_latency_s > 0
        return waits and any(part.two_hop for table in candidate.plan.tables for part in table.ranges)

    def mixed(self, alike: Sequence[ReplicaCandidate]) -> list[ReplicaCandidate]:
        """The most promising of those whose tables differ, where M = 1 is one of the candidates."""
        single = next((candidate for candidate in alike if candidate.replicas == 1 and candidate.fits), None)
        if single is None:
            return []
        before = self._seconds_alone(single)
        promising = []
        for other in alike:
            if other.replicas > 1 and (other.plan is not None or other.over_bytes):
                saved = before - self._seconds_alone(other)
                gaining = self._gaining(saved, other)
                promising.append((-float(saved[gaining].sum()), other, gaining))
        promising.sort(key=lambda entry: entry[0])
        names = [shape.name for shape in self.problem.shapes]
        return [
            self.candidate(Grid(self.problem.topology.world_size, other.replicas, other.together), gained)
            for _, other, gaining in promising[:MOST_MIXED]
            if 0 < len(gained := [names[i] for i in gaining]) < len(names)
        ]

    def _plan(self, problems: Mapping[int, Problem], grid: Grid) -> Plan:
        parts = {
            count: search(self.strategy, part.profile, part.topology, part.request) for count, part in problems.items()
        }
        return _joined(self.problem, parts, grid.together)

    def _cost(self, plan: Plan) -> ReplicaCost:
        return cost_with_replicas(plan, self.problem.profile, self.problem.topology, self.problem.request, self.sync)

    def _problems(self, grid: Grid, names: Sequence[str]) -> dict[int, Problem]:
        """Problems of tables with replicas, and of the others on all ranks; both share the memory as their rows do."""
        parts = {
            count: replace(
                self.problem,
                profile=replace(self.problem.profile, tables=tuple(tables)),
                topology=group_topology(self.problem.topology, replace(grid, replicas=count)),
            )
            for count, inside in ((1, False), (grid.replicas, True))
            if (tables := [t for t in self.problem.profile.tables if (t.name in names) == inside])
        }
        if self.limit_bytes is None:
            return parts
        if len(parts) > 1:
            total = sum(_least(problem) for problem in parts.values())
            shares = {count: _least(problem) * self.limit_bytes // total for count, problem in parts.items()}
            parts = {count: _limited(problem, shares[count]) for count, problem in parts.items()}
        return {count: self._without_marks(problem, count) for count, problem in parts.items()}

    def _without_marks(self, problem: Problem, replicas: int) -> Problem:
        """The problem with memory for rows alone, such that the mark that averages take for each fits as well."""
        if replicas == 1 or self.sync.mode != "average" or not problem.request.training:
            return problem
        row_bytes = min(shape.row_bytes for shape in problem.shapes)
        limits = (problem.request.memory_limit_bytes, problem.topology.memory_bytes)
        return _limited(problem, min(limit for limit in limits if limit is not None) * row_bytes // (row_bytes + 1))

    def _gaining(self, saved: Floats, other: ReplicaCandidate) -> list[int]:
        """The tables that replicas make faster, by what they save for each byte of memory, while memory lasts."""
        T, shapes = self.problem.topology.world_size, self.problem.shapes
        extra = [least_bytes([s], T // other.replicas) - least_bytes([s], T) for s in shapes]
        room = np.inf if self.limit_bytes is None else self.limit_bytes - least_bytes(shapes, T)
        gaining = []
        for table in np.argsort(-saved / np.maximum(extra, 1), kind="stable").tolist():
            if saved[table] > 0 and extra[table] <= room:
                gaining.append(table)
                room -= extra[table]
        return sorted(gaining)

    def _seconds_alone(self, candidate: ReplicaCandidate) -> Floats:
        """[tables], what each adds to the step of the mean rank, whether or not all fit."""
        problem, plan = self.problem, candidate.plan
        grid = Grid(problem.topology.world_size, candidate.replicas, candidate.together)
        if plan is None:
            plan = self._plan({count: _limited(part, None) for count, part in candidate.problems.items()}, grid)
        seconds = MeanSeconds(problem.topology, grid, problem.request, self.sync)
        return np.array([seconds(replace(plan, tables=(table,)), problem.profile) for table in plan.tables])


def _least(problem: Problem) -> int:
    """Memory of the fullest rank of a group when every row is stored once, cyclic."""
    return least_bytes(problem.shapes, problem.topology.world_size)


def _limited(problem: Problem, limit_bytes: int | None) -> Problem:
    """The problem with less memory, wherever its limit is from, or with no limit."""
    request, topology = problem.request, problem.topology
    if request.memory_limit_bytes is not None:
        request = replace(request, memory_limit_bytes=limit_bytes)
    if topology.memory_bytes is not None:
        topology = replace(topology, memory_bytes=limit_bytes)
    return replace(problem, request=request, topology=topology)


def _joined(problem: Problem, parts: dict[int, Plan], together: Together) -> Plan:
    """Joins the plans of groups, with the tables in the problem's order."""
    tables = {table.name: replace(table, replicas=count) for count, part in parts.items() for table in part.tables}
    ordered, topology = tuple(tables[shape.name] for shape in problem.shapes), problem.topology
    strategies = dict.fromkeys(part.strategy for part in parts.values())
    notes = parts[1].notes if list(parts) == [1] else {}
    return Plan(ordered, topology.world_size, topology.ranks_per_node, " and ".join(strategies), notes, together)
