"""Replica groups: how many replicas each table gets and which ranks share a host, by what a step is predicted to take.

More replicas shorten all-to-alls, which then stay within a group, and even out look-ups; they cost memory,
S · (M − 1) / T on each of T ranks for tables of S bytes, and synchronisation. Compared are all M that are asked for,
with the shards of a replica on one host or the replicas of a shard, for all tables at once and, where that promises
most, for those tables alone that gain by it: a small hot table may be replicated where a huge cold one cannot.

Source: two-dimensional sparse parallelism §3.1, §5. Differs: M is predicted, not tuned, and may differ by table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.grid import Grid, Together, valid_replicas
from rowmesh.placement.comparison import EQUAL, Comparison, compare, is_relative
from rowmesh.placement.plan import Plan, TablePlan, TableShape
from rowmesh.placement.strategies import search
from rowmesh.placement.strategies.problem import Problem, least_bytes
from rowmesh.placement.text import bytes_text, seconds_text
from rowmesh.placement.topology import Floats, Topology
from rowmesh.placement.two_dimensional_cost import ReplicaCost, ReplicaSync, cost_with_replicas

MOST_MIXED = 4  # plans whose tables differ are made of so many
TOGETHER_TEXTS = {"shards": "shards of a replica", "replicas": "replicas of a shard"}


@dataclass(frozen=True, eq=False)
class ReplicaCandidate:
    """Some tables with M replicas, the others with one.

    Attributes:
        replicas: M.
        together: which ranks have consecutive numbers, see `Grid`.
        names: of the tables with M replicas.
        problems: what was asked for of a group of each part of the plan, by its number of replicas.
        needed_bytes: rows and optimizer state of the fullest rank.
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
        """Of a step; infinite without a plan."""
        return float("inf") if self.cost is None else self.cost.total_s

    @property
    def complaint(self) -> str:
        """What is wrong with it, or nothing."""
        return f"{bytes_text(self.over_bytes)} over the limit" if self.over_bytes else self.refusal

    @property
    def is_mixed(self) -> bool:
        """Whether tables differ."""
        return len(self.problems) > 1


@dataclass(frozen=True, eq=False)
class ReplicaComparison:
    """All numbers of replicas and arrangements on one problem.

    Attributes:
        problem: what was asked for, of all ranks.
        asked: the strategy that was asked for, which may be `auto`.
        sync: how replicas are kept together.
        candidates: in order of M; those whose tables differ after those of the same M whose do not.
        chosen: one of them, the fastest that fits.
    """

    problem: Problem
    asked: str
    sync: ReplicaSync
    candidates: tuple[ReplicaCandidate, ...]
    chosen: ReplicaCandidate

    @cached_property
    def plan(self) -> Plan:
        """The chosen plan; its notes say `why`."""
        assert self.chosen.plan is not None
        return replace(self.chosen.plan, notes={**self.chosen.plan.notes, "why": self.why})

    @cached_property
    def parts(self) -> dict[int, Comparison]:
        """The strategies beside each other on a group of each part of the chosen plan, by its number of replicas."""
        return {count: compare(problem, self.asked) for count, problem in self.chosen.problems.items()}

    @cached_property
    def why(self) -> str:
        """Why it was chosen, in a sentence."""
        best = self.chosen
        cost = best.cost
        assert cost is not None
        reasons = [
            f"{self.name(best)}: a step takes {self.cost_text(cost.total_s)} (all-to-all "
            f"{self.cost_text(cost.exchange_s)}, synchronisation {self.cost_text(cost.sync_s)})"
        ]
        reasons += [self._beside(other) for other in (self._other_arrangement, self._second) if other is not None]
        if best.limit_bytes is None:
            reasons.append("nothing limits a rank's memory")
        return "; ".join(reasons)

    @property
    def is_relative(self) -> bool:
        """Whether links have relative costs, so that times are weighted bytes and not seconds."""
        return is_relative(self.problem)

    def cost_text(self, seconds: float) -> str:
        """A time, with its unit."""
        return bytes_text(seconds) if self.is_relative else seconds_text(seconds)

    def name(self, candidate: ReplicaCandidate) -> str:
        """Which candidate it is."""
        tables = f" for {self.tables_text(candidate)} tables" if candidate.is_mixed else ""
        together = self.together_text(candidate)
        return f"M = {candidate.replicas}{tables}" + (f", {together} next to each other" if together else "")

    def tables_text(self, candidate: ReplicaCandidate) -> str:
        """How many tables have the replicas."""
        return f"{len(candidate.names)} of {len(self.problem.shapes)}" if candidate.is_mixed else "all"

    def together_text(self, candidate: ReplicaCandidate) -> str:
        """What has consecutive numbers, where that makes a difference."""
        differs = len(arrangements(self.problem.topology, candidate.replicas)) > 1
        return TOGETHER_TEXTS[candidate.together] if differs else ""

    @property
    def _other_arrangement(self) -> ReplicaCandidate | None:
        """The chosen M the other way round."""
        best = self.chosen
        alike = (c for c in self.candidates if (c.replicas, c.is_mixed) == (best.replicas, best.is_mixed))
        return next((c for c in alike if c.together != best.together and c.cost is not None), None)

    @property
    def _second(self) -> ReplicaCandidate | None:
        """The next best of those that fit, with M = 1 before all others."""
        others = [c for c in self.candidates if c.fits and c not in (self.chosen, self._other_arrangement)]
        return min(others, key=lambda c: (c.replicas > 1, c.total_s), default=None)

    def _beside(self, other: ReplicaCandidate) -> str:
        more = other.total_s / self.chosen.total_s - 1 if self.chosen.total_s else 0.0
        amount = "the same" if abs(more) < EQUAL else f"{abs(more):.1%} {'more' if more > 0 else 'less'}"
        fits = "" if other.fits else f", but is {other.complaint}"
        return f"{self.name(other)} takes {self.cost_text(other.total_s)}, {amount}{fits}".replace("%", " %")


def compare_replicas(
    problem: Problem, strategy: str = "auto", sync: ReplicaSync | None = None, counts: Sequence[int] | None = None
) -> ReplicaComparison:
    """Predicts a step for each number of replicas and arrangement, and takes the fastest that fits.

    Args:
        problem: of all ranks; its memory limit is the request's or the topology's, and none where neither has one.
        strategy: what places the rows within a group.
        sync: how replicas are kept together; by default exactly.
        counts: numbers of replicas to compare; by default all that divide the ranks. Tables may differ where 1 is
            among them.

    Raises:
        ConfigurationError: a number of replicas does not divide the ranks (lists those that do), or nothing fits (says
            what is missing, and how many ranks it would take).

    Example:
        >>> from rowmesh.placement.profile import Profile
        >>> from rowmesh.placement.request import Request
        >>> shapes = [TableShape("hot", 1_000, 64, 64), TableShape("cold", 100_000, 64, 64)]
        >>> counts = {"hot": [100] * 1_000, "cold": [1] * 100_000}
        >>> request = Request(batch_size=2_048, memory_limit_bytes=2_000_000)
        >>> problem = Problem(Profile.from_counts(counts, shapes, 100_000), Topology.grouped(2, 2, 8.0), request)
        >>> comparison = compare_replicas(problem, sync=ReplicaSync("average", every=4))
        >>> [(table.name, table.replicas) for table in comparison.plan.tables]
        [('hot', 2), ('cold', 1)]
    """
    sync = sync or ReplicaSync()
    T = problem.topology.world_size
    wanted = sorted(set(valid_replicas(T) if counts is None else counts))
    grids = [Grid(T, count, together) for count in wanted for together in arrangements(problem.topology, count)]
    made = _Search(problem, strategy, sync)
    candidates = [made.candidate(grid, [shape.name for shape in problem.shapes]) for grid in grids]
    candidates += made.mixed(candidates)
    candidates.sort(key=lambda candidate: candidate.replicas)
    fitting = [candidate for candidate in candidates if candidate.fits]
    if not fitting:
        raise ConfigurationError(_nothing_fits(problem, candidates))
    least = min(candidate.total_s for candidate in fitting)
    chosen = next(candidate for candidate in fitting if candidate.total_s <= least * (1 + EQUAL))
    return ReplicaComparison(problem, strategy, sync, tuple(candidates), chosen)


def arrangements(topology: Topology, replicas: int) -> tuple[Together, ...]:
    """What can be next to each other with a difference; replicas first, which are wherever both cost the same."""
    if replicas in (1, topology.world_size) or topology.is_uniform:
        return ("shards",)
    return ("replicas", "shards")


def group_topology(topology: Topology, grid: Grid) -> Topology:
    """The links within a replica group, as the mean over groups.

    Example:
        >>> topology = Topology.grouped(num_nodes=2, ranks_per_node=2, inter_over_intra=4.0)
        >>> [group_topology(topology, Grid(4, 2, together)).cost[0, 1].item() for together in ("shards", "replicas")]
        [1.0, 4.0]
    """
    if grid.replicas == 1:
        return topology
    per_node = grid.ranks_per_node(topology.ranks_per_node)
    cost, latency = (
        np.mean([values[np.ix_(group, group)] for group in grid.groups], axis=0)
        for values in (topology.cost, topology.latency_s)
    )
    name = f"{topology.name}, a group of {grid.shards}"
    return replace(
        topology, name=name, num_nodes=grid.shards // per_node, ranks_per_node=per_node, cost=cost, latency_s=latency
    )


@dataclass(frozen=True, eq=False)
class _Search:
    """Makes the candidates of a problem."""

    problem: Problem
    strategy: str
    sync: ReplicaSync

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
            plan = self._plan(problems, grid)
        except ConfigurationError as error:
            return replace(found, refusal=str(error))
        return replace(found, plan=plan, cost=self._cost(plan), needed_bytes=max(plan.memory_bytes))

    def mixed(self, alike: Sequence[ReplicaCandidate]) -> list[ReplicaCandidate]:
        """The most promising of those whose tables differ, where M = 1 is one of the candidates."""
        single = next((candidate for candidate in alike if candidate.replicas == 1 and candidate.fits), None)
        if single is None:
            return []
        before = self._seconds_alone(single)
        promising = []
        for other in alike:
            if other.replicas > 1:
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
        """Of the tables with replicas, and of the others on all ranks; both share the memory as their rows do."""
        parts = {
            count: replace(
                self.problem,
                profile=replace(self.problem.profile, tables=tuple(tables)),
                topology=group_topology(self.problem.topology, replace(grid, replicas=count)),
            )
            for count, inside in ((1, False), (grid.replicas, True))
            if (tables := [t for t in self.problem.profile.tables if (t.name in names) == inside])
        }
        if len(parts) == 1 or self.limit_bytes is None:
            return parts
        total = sum(_least(problem) for problem in parts.values())
        return {
            count: _limited(problem, _least(problem) * self.limit_bytes // total) for count, problem in parts.items()
        }

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
        plan = candidate.plan
        if plan is None:
            problems = {count: _limited(part, None) for count, part in candidate.problems.items()}
            plan = self._plan(problems, Grid(self.problem.topology.world_size, candidate.replicas, candidate.together))
        return np.array([self._cost(replace(plan, tables=(table,))).mean_s for table in plan.tables])


def _least(problem: Problem) -> int:
    """Memory of the fullest rank of a group when every row is dealt once."""
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
    """One plan of the plans of groups, with the tables in the problem's order."""
    tables = {table.name: replace(table, replicas=count) for count, part in parts.items() for table in part.tables}
    ordered: list[TablePlan] = [tables[shape.name] for shape in problem.shapes]
    topology = problem.topology
    strategies = dict.fromkeys(part.strategy for part in parts.values())
    notes = parts[1].notes if list(parts) == [1] else {}
    return Plan(tuple(ordered), topology.world_size, topology.ranks_per_node, " and ".join(strategies), notes, together)


def _nothing_fits(problem: Problem, candidates: Sequence[ReplicaCandidate]) -> str:
    """What is missing for the candidate that needs least, and how many ranks it would take."""
    best = min((c for c in candidates if not c.is_mixed), key=lambda candidate: candidate.needed_bytes)
    T, limit = problem.topology.world_size, best.limit_bytes
    if best.replicas == 1:
        problem.check_feasible()
    if limit is None or not best.over_bytes:
        return f"no plan with {best.replicas} replicas on {T} ranks: {best.refusal}"
    shards = _shards_that_fit(problem.shapes, limit)
    ways = [f"use {best.replicas * shards} ranks"] if shards is not None else []
    fewer = [m for m in valid_replicas(T) if m < best.replicas and least_bytes(problem.shapes, T // m) <= limit]
    ways += [f"form {max(fewer)} replica group{'s'[: max(fewer) != 1]}"] if fewer else []
    return (
        f"{best.replicas} replicas on {T} ranks, each of them spread over {T // best.replicas}, need "
        f"{best.needed_bytes:,} bytes of rows and optimizer state on the fullest rank, {best.over_bytes:,} more than "
        f"the limit of {limit:,}. One of these would make it fit: "
        + "; ".join([*ways, f"allow {best.needed_bytes:,} bytes a rank"])
    )


def _shards_that_fit(shapes: Sequence[TableShape], limit: int) -> int | None:
    """The least number of ranks of a group that holds every row once; None where no number does."""
    if sum(shape.row_bytes for shape in shapes) > limit:
        return None  # a table's last round of rows may need a row on every rank
    shards = -(-sum(shape.row_bytes * shape.num_rows for shape in shapes) // limit)
    while least_bytes(shapes, shards) > limit:
        shards += 1
    return shards
