"""Problem: the start of every strategy: the demand, the links, the memory, and whether anything fits at all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from rowmesh.errors import ConfigurationError
from rowmesh.placement.cost import Cost, cost_under
from rowmesh.placement.demand import Demand
from rowmesh.placement.plan import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology


@dataclass(frozen=True, eq=False)
class Problem:
    """A profile, a topology and a request, and what follows from them."""

    profile: Profile
    topology: Topology
    request: Request

    @property
    def shapes(self) -> tuple[TableShape, ...]:
        """The tables."""
        return self.profile.shapes

    @cached_property
    def demand(self) -> Demand:
        """The demand of a step."""
        return Demand.of(self.profile, self.topology.world_size, self.topology.ranks_per_node, self.request)

    @cached_property
    def limit_bytes(self) -> int:
        """For rows and optimizer state, of a rank."""
        return self.request.limit_bytes(self.shapes, self.topology.world_size, self.topology.memory_bytes)

    @property
    def hard_limit_bytes(self) -> int | None:
        """The memory of a rank, where that is given; else only memory for copies is limited."""
        limits = self.request.memory_limit_bytes, self.topology.memory_bytes
        return min((limit for limit in limits if limit is not None), default=None)

    def limited(self, plan: Plan) -> Plan:
        """The tables of a plan that `limit_bytes` is for: without a hard limit, not those that an owner has whole."""
        if self.hard_limit_bytes is not None or all(table.send == "rows" for table in plan.tables):
            return plan
        return replace(plan, tables=tuple(table for table in plan.tables if table.send == "rows"))

    def over_bytes(self, plan: Plan) -> int:
        """How much more than the limit the fullest rank would hold."""
        return max(max(self.limited(plan).memory_bytes) - self.limit_bytes, 0)

    def of_tables(self, names: Collection[str]) -> Problem:
        """The problem of some tables."""
        tables = tuple(table for table in self.profile.tables if table.name in names)
        return replace(self, profile=replace(self.profile, tables=tables))

    @property
    def spare_bytes(self) -> int:
        """Memory of a rank for copies: all that its share of the rows leaves.

        Raises:
            ConfigurationError: as `check_feasible`.
        """
        self.check_feasible()
        if not self.allows_copies:
            return 0
        stored = sum(shape.row_bytes * shape.num_rows for shape in self.shapes)
        return self.limit_bytes - -(-stored // self.topology.world_size)

    @property
    def allows_copies(self) -> bool:
        """Whether memory for copies was asked for: what rounding to whole rows leaves on a rank is none."""
        return self.request.extra_memory > 0 or self.request.memory_limit_bytes is not None

    def check_feasible(self) -> None:
        """Makes sure that every row can be stored once.

        Raises:
            ConfigurationError: it cannot; says what does not fit, by how much, and what would.
        """
        needed = least_bytes(self.shapes, self.topology.world_size)
        if needed > self.limit_bytes:
            raise ConfigurationError(_does_not_fit(self, needed))

    def plan(self, ranges: Sequence[Sequence[RowRange]], strategy: str, notes: dict[str, Any] | None = None) -> Plan:
        """A plan of the ranges of each table."""
        tables = tuple(TablePlan(shape, tuple(parts)) for shape, parts in zip(self.shapes, ranges, strict=True))
        return Plan(tables, self.topology.world_size, self.topology.ranks_per_node, strategy, notes or {})

    def cost(self, plan: Plan) -> Cost:
        """The cost of a step under a plan."""
        return cost_under(plan, self.demand, training=self.request.training)

    def objective(self, plan: Plan) -> float:
        """The objective of a plan."""
        return self.cost(plan).objective(self.topology, self.request)

    def fits(self, plan: Plan) -> bool:
        """Whether every rank has the memory."""
        return not self.over_bytes(plan)


def least_bytes(shapes: Sequence[TableShape], world_size: int) -> int:
    """Bytes of the fullest rank if every row is stored once, cyclic."""
    return sum(shape.row_bytes * -(-shape.num_rows // world_size) for shape in shapes)


def _does_not_fit(problem: Problem, needed: int) -> str:
    shapes, limit, W = problem.shapes, problem.limit_bytes, problem.topology.world_size
    biggest = max(shapes, key=lambda shape: shape.row_bytes * shape.num_rows)
    share = -(-biggest.num_rows // W) * biggest.row_bytes
    fewer = (needed - limit + biggest.row_bytes - 1) // biggest.row_bytes * W
    changes, step = [], problem.topology.ranks_per_node if problem.topology.num_nodes > 1 else 1
    if (ranks := ranks_that_fit(shapes, limit, step)) is not None:
        changes.append(f"use {ranks} ranks")
    if any(shape.value_bytes == shape.gradient_bytes for shape in shapes):
        halved = [replace(s, value_bytes=min(s.value_bytes, s.gradient_bytes // 2)) for s in shapes]
        half = least_bytes(halved, W)
        changes.append(f"store values in bfloat16 ({half:,} bytes a rank, {'fits' if half <= limit else 'not enough'})")
    if fewer < biggest.num_rows:
        changes.append(f"cut table {biggest.name!r} by {fewer:,} of its {biggest.num_rows:,} rows")
    changes.append(f"allow {needed:,} bytes a rank")
    return (
        f"every row stored once on {W} ranks needs {needed:,} bytes a rank, {needed - limit:,} more than the limit of "
        f"{limit:,}; the biggest table is {biggest.name!r} with {share:,} of them. One of these would make it fit: "
        + "; ".join(changes)
    )


def ranks_that_fit(shapes: Sequence[TableShape], limit: int, step: int = 1) -> int | None:
    """The least multiple of `step` ranks that hold every row once within a limit for each; None where no number does.

    Example:
        >>> shape = TableShape("item", 10, value_bytes=64, gradient_bytes=64)
        >>> ranks_that_fit([shape], 130), ranks_that_fit([shape], 63)
        (5, None)
    """
    if sum(shape.row_bytes for shape in shapes) > limit:
        return None  # a table's last round of rows may need a row on every rank
    total = sum(shape.row_bytes * shape.num_rows for shape in shapes)
    ranks = -(-total // limit)
    ranks += -ranks % step
    while least_bytes(shapes, ranks) > limit:
        ranks += step
    return int(ranks)
