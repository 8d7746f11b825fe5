"""Replica groups: how many replicas each table gets and which ranks share a host, by what a step is predicted to take.

More replicas shorten all-to-alls, which then stay within a group, and even out look-ups; they cost memory,
S · (M − 1) / T on each of T ranks for tables of S bytes, and synchronisation. Compared are all M that are asked for,
with the shards of a replica on one host or the replicas of a shard, for all tables at once and, where that promises
most, for those tables alone that gain by it: a small hot table may be replicated where a huge cold one cannot.

Source: two-dimensional sparse parallelism §3.1, §5. Differs: M is predicted, not tuned, and may differ by table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.grid import Grid, Together, valid_replicas
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement.comparison import EQUAL, Comparison, compare, is_relative
from rowmesh.placement.plan import Plan
from rowmesh.placement.strategies import find
from rowmesh.placement.strategies.problem import Problem, least_bytes, ranks_that_fit
from rowmesh.placement.text import bytes_text, seconds_text
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional_candidates import CandidateSearch, ReplicaCandidate

TOGETHER_TEXTS = {"shards": "shards of a replica", "replicas": "replicas of a shard"}


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
    sync: Synchronization
    candidates: tuple[ReplicaCandidate, ...]
    chosen: ReplicaCandidate

    @cached_property
    def plan(self) -> Plan:
        """The chosen plan; its notes say `why`."""
        assert self.chosen.plan is not None
        return replace(self.chosen.plan, notes={**self.chosen.plan.notes, "why": self.why})

    def arranged(self, together: Together) -> ReplicaComparison:
        """The same, the fastest of one arrangement chosen where it makes a difference.

        Raises:
            ConfigurationError: none of it fits.
        """
        alike = [c for c in self.candidates if c.together == together or not self.together_text(c)]
        fitting = [candidate for candidate in alike if candidate.fits]
        if not fitting:
            raise ConfigurationError(
                f"no plan with {TOGETHER_TEXTS[together]} next to each other fits; leave it to auto"
            )
        return replace(self, chosen=min(fitting, key=lambda candidate: candidate.total_s))

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
        """A name for a candidate."""
        tables = f" for {self.tables_text(candidate)} tables" if candidate.is_mixed else ""
        together = self.together_text(candidate)
        return f"M = {candidate.replicas}{tables}" + (f", {together} next to each other" if together else "")

    def tables_text(self, candidate: ReplicaCandidate) -> str:
        """How many tables have the replicas."""
        return f"{len(candidate.names)} of {len(self.problem.shapes)}" if candidate.is_mixed else "all"

    def together_text(self, candidate: ReplicaCandidate) -> str:
        """The shards or replicas with consecutive ranks; empty where the order makes no difference."""
        differs = len(arrangements(self.problem.topology, candidate.replicas)) > 1
        return TOGETHER_TEXTS[candidate.together] if differs else ""

    @property
    def _other_arrangement(self) -> ReplicaCandidate | None:
        """The candidate with the chosen M and the other order of ranks."""
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
    problem: Problem, strategy: str = "auto", sync: Synchronization | None = None, counts: Sequence[int] | None = None
) -> ReplicaComparison:
    """Predicts a step for each number of replicas and arrangement, and takes the fastest that fits.

    Args:
        problem: of all ranks; its memory limit is the request's or the topology's, and none where neither has one.
        strategy: what places the rows within a group.
        sync: how replicas are kept together; by default exactly.
        counts: numbers of replicas to compare; by default all that divide the ranks. Tables may differ where 1 is
            among them.

    Raises:
        ConfigurationError: there is no such strategy, a number of replicas does not divide the ranks (lists those that
            do), or nothing fits (says what is missing, and how many ranks it would take).

    Example:
        >>> from rowmesh.placement import TableShape
        >>> from rowmesh.placement.profile import Profile
        >>> from rowmesh.placement.request import Request
        >>> shapes = [TableShape("hot", 1_000, 64, 64), TableShape("cold", 100_000, 64, 64)]
        >>> counts = {"hot": [100] * 1_000, "cold": [1] * 100_000}
        >>> request = Request(batch_size=2_048, memory_limit_bytes=2_000_000)
        >>> problem = Problem(Profile.from_counts(counts, shapes, 100_000), Topology.grouped(2, 2, 8.0), request)
        >>> comparison = compare_replicas(problem, sync=Synchronization("average", every=4))
        >>> [(table.name, table.replicas) for table in comparison.plan.tables]
        [('hot', 2), ('cold', 1)]
    """
    find(strategy)
    sync = sync or Synchronization()
    T = problem.topology.world_size
    wanted = sorted(set(valid_replicas(T) if counts is None else counts))
    grids = [Grid(T, count, together) for count in wanted for together in arrangements(problem.topology, count)]
    made = CandidateSearch(problem, strategy, sync)
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
    """The orders of ranks that differ in cost; replicas first, so that they are chosen where both cost the same."""
    if replicas in (1, topology.world_size) or topology.is_uniform:
        return ("shards",)
    return ("replicas", "shards")


def _nothing_fits(problem: Problem, candidates: Sequence[ReplicaCandidate]) -> str:
    """An error message for the candidate that needs least: missing bytes, and ways to fit."""
    best = min((c for c in candidates if not c.is_mixed), key=lambda candidate: candidate.needed_bytes)
    T, M, shapes, limit = problem.topology.world_size, best.replicas, problem.shapes, best.limit_bytes
    if limit is None or not best.over_bytes:
        return f"no plan for {M} replicas on {T} ranks: {best.refusal}"
    if (least := least_bytes(shapes, T // M)) <= limit:
        return (
            f"the fullest rank would hold {best.needed_bytes:,} bytes of rows and optimizer state, {best.over_bytes:,} "
            f"more than the limit of {limit:,}; another strategy needs {least:,}, as 'cyclic' does"
        )
    if M == 1:
        problem.check_feasible()
    shards = ranks_that_fit(shapes, limit)
    ways = [f"use {M * shards} ranks"] if shards is not None else []
    fewer = [count for count in valid_replicas(T) if count < M and least_bytes(shapes, T // count) <= limit]
    ways += [f"form {max(fewer)} replica group{'s'[: max(fewer) != 1]}"] if fewer else []
    return (
        f"{M} replicas on {T} ranks, each of them spread over {T // M}, need {least:,} bytes of rows and optimizer "
        f"state on the fullest rank, {least - limit:,} more than the limit of {limit:,}. One of these would make it "
        "fit: " + "; ".join([*ways, f"allow {least:,} bytes a rank"])
    )
