"""Sums: which tables have an owner that pools their bags, in a plan whose other tables send rows.

A table that sends sums is whole on one rank. Where bags are long its bytes are fewer, but they do not spread: with more
ranks an owner sends more. So a strategy first places all tables as rows, and tables leave its plan for an owner as long
as that makes the busiest rank less busy (`Cost.busy_seconds`): those first that save most over all links. The longest
message goes first to the rank that owns least. The plan of rows is among those that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from rowmesh.errors import ConfigurationError
from rowmesh.placement.cost import Cost, sums_between
from rowmesh.placement.pairs import Links, Spread
from rowmesh.placement.plan import Plan, TablePlan
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.text import bytes_text

LEAST_GAIN = 0.01  # of the busiest rank: less is within the error of the model
MOST_CHOICES = 64
_ROUNDING = 1e-9


def without_choice(problem: Problem) -> Problem:
    """The problem in which tables that may send sums send rows."""
    tables = tuple(
        replace(table, shape=replace(table.shape, send="rows")) if table.shape.send == "auto" else table
        for table in problem.profile.tables
    )
    return replace(problem, profile=replace(problem.profile, tables=tables))


def with_forced_sums(problem: Problem, strategy: str, rows: Callable[[Problem], Plan]) -> Plan:
    """The plan in which tables that must send sums have an owner each, and the others send rows.

    Args:
        problem: of all tables.
        strategy: the name of what places tables that send rows.
        rows: places them.

    Raises:
        ConfigurationError: they do not fit.
    """
    topology, forced = problem.topology, [shape.name for shape in problem.shapes if shape.send == "sums"]
    if not forced:
        return rows(problem)
    nothing = Plan((), topology.world_size, topology.ranks_per_node, strategy)
    owned = _owned(problem, forced, nothing)
    if left := [name for name in forced if name not in owned]:
        raise ConfigurationError(
            f"tables {left} are to send sums, and so to be whole on one rank each, and no rank has the memory: a rank "
            f"may hold {problem.hard_limit_bytes:,} bytes; allow more, use more ranks, or have them send rows"
        )
    used = max(replace(nothing, tables=tuple(owned.values())).memory_bytes)
    plan, others = nothing, [shape.name for shape in problem.shapes if shape.name not in owned]
    if others:
        try:
            plan = rows(_with_less_memory(problem.of_tables(others), used))
        except ConfigurationError as error:
            raise ConfigurationError(f"beside {used:,} bytes of tables that send sums, {forced}: {error}") from error
    return _joined(problem, plan, owned)


def with_chosen_sums(problem: Problem, rows: Plan) -> Plan:
    """The plan in which tables that may send sums do where that makes the busiest rank less busy.

    Args:
        problem: of all tables.
        rows: a plan in which these tables send rows.
    """
    names = [shape.name for shape in problem.shapes if shape.send == "auto"]
    rows = _joined(problem, rows, {})
    if not names or problem.topology.world_size == 1:
        return rows
    if not problem.request.allows_sums:
        why = "ranks read each other's memory, or rows are on a device or in a pipeline"
        return replace(rows, notes={**rows.notes, "sums": f"no table sends sums: {why}"})
    return _Choice(problem, rows, names).best


def _joined(problem: Problem, plan: Plan, owned: dict[str, TablePlan]) -> Plan:
    """A plan with owned tables in their places, and the shapes of the problem."""
    tables = {table.name: table for table in plan.tables} | owned
    return replace(plan, tables=tuple(replace(tables[shape.name], shape=shape) for shape in problem.shapes))


def _with_less_memory(problem: Problem, used: int) -> Problem:
    """The problem in what is left of a limit."""
    request, topology = problem.request, problem.topology
    limits = request.memory_limit_bytes, topology.memory_bytes
    of_request, of_rank = (None if limit is None else max(limit - used, 1) for limit in limits)
    return replace(
        problem,
        request=replace(request, memory_limit_bytes=of_request),
        topology=replace(topology, memory_bytes=of_rank),
    )


def _owned(problem: Problem, names: Iterable[str], beside: Plan) -> dict[str, TablePlan]:
    """Tables with an owner each, as far as ranks have the memory, beside a plan of others.

    The longest message goes first to the rank that owns least. Then once more, to the rank that has least memory in use
    among those that own no more than the most of before.
    """
    demand = problem.demand
    number = {shape.name: index for index, shape in enumerate(problem.shapes)}
    messages = demand.bags_bytes + demand.bags * demand.gradient_bytes  # of one rank
    order = sorted(names, key=lambda name: -messages[number[name]])
    before = np.zeros(beside.world_size)
    for table in beside.tables:
        if table.send == "sums":
            before[table.ranges[0].rank] += messages[number[table.name]]

    def share_out(most: float) -> tuple[dict[str, TablePlan], np.ndarray]:
        busy, held, owned = before.copy(), np.array(beside.memory_bytes, np.float64), {}
        for name in order:
            shape, message = problem.shapes[number[name]], messages[number[name]]
            needed = shape.row_bytes * shape.num_rows + beside.world_size * message
            room = held + needed <= (problem.hard_limit_bytes or np.inf)
            over = np.maximum(busy + message - most, 0.0)
            keys = (held, over) if most else (held, busy)
            owner = int(np.lexsort((*keys, ~room))[0])
            if room[owner]:
                busy[owner] += message
                held[owner] += needed
                owned[name] = TablePlan.of_sums(shape, owner)
        return owned, busy

    owned, busy = share_out(0.0)
    even, at_most = share_out(float(busy.max()) * (1 + _ROUNDING))
    is_better = len(even) >= len(owned) and at_most.max() <= busy.max() * (1 + 2 * _ROUNDING)
    return even if is_better else owned


@dataclass(frozen=True, eq=False)
class _Choice:
    """The tables that send sums in place of rows.

    Attributes:
        problem: of all tables.
        rows: a plan in which these tables send rows.
        names: tables that may send sums.
    """

    problem: Problem
    rows: Plan
    names: Collection[str]

    @cached_property
    def cost_of_rows(self) -> Cost:
        """The cost of a step without these sums."""
        return self.problem.cost(self.rows)

    @cached_property
    def number(self) -> dict[str, int]:
        """The number of each table."""
        return {table.name: index for index, table in enumerate(self.rows.tables)}

    @cached_property
    def loads(self) -> dict[str, np.ndarray]:
        """[3, W] of each table that may send sums, as rows: see `_load`."""
        found = {}
        for name in self.names:
            if self.is_light(name):
                part = self.problem.of_tables([name])
                found[name] = self._load(part.cost(replace(self.rows, tables=(self.rows.table(name),))))
        return found

    def is_light(self, name: str) -> bool:
        """Whether an owner of this table alone may be less busy than the busiest rank under rows."""
        request, demand, number = self.problem.request, self.problem.demand, self.number[name]
        vectors, bags = demand.bags[number] * demand.gradient_bytes[number], demand.bags_bytes[number]
        sent, received = request.fetch_weight * vectors, request.fetch_weight * bags + request.training * vectors
        topology = self.problem.topology
        least = float(max(sent, received)) * topology.cheapest_link * (topology.world_size - 1)
        return least < self.busiest(self.load_of_rows)

    @cached_property
    def load_of_rows(self) -> np.ndarray:
        """[3, W] of all tables."""
        return self._load(self.cost_of_rows)

    def _load(self, cost: Cost) -> np.ndarray:
        """[3, W], seconds that each rank sends, receives and looks up."""
        topology = self.problem.topology
        links = cost.seconds(topology, self.problem.request.fetch_weight)
        return np.stack([links.sent, links.received, Links.of(cost.looked_up_bytes).sent * topology.own_cost])

    def load_of_sums(self, names: Sequence[str], owners: Sequence[int]) -> np.ndarray:
        """The same of tables that have an owner."""
        topology, request, demand = self.problem.topology, self.problem.request, self.problem.demand
        tables, W = np.array([self.number[name] for name in names], np.int64), topology.world_size
        ranks = np.array(owners, np.int64)
        vectors = demand.bags * demand.gradient_bytes

        def by_owner(of_table: np.ndarray) -> np.ndarray:
            return np.bincount(ranks, of_table[tables], W)

        spread = Spread(W, topology.ranks_per_node)
        fetched, pushed = sums_between(
            spread, by_owner(demand.bags_bytes), by_owner(vectors), training=request.training
        )
        moved = fetched.times(request.fetch_weight) + pushed
        links = Links.of(moved.without_own(), topology.costs)
        looked_up = W * by_owner(demand.ids * demand.value_bytes) * topology.own_cost
        return np.stack([links.sent, links.received, looked_up])

    @staticmethod
    def busiest(load: np.ndarray) -> float:
        """Seconds of the busiest rank."""
        return float((np.maximum(load[0], load[1]) + load[2]).max())

    @cached_property
    def candidates(self) -> list[str]:
        """Tables whose sums take less than their rows over all links; those first that save most."""
        saved = {name: self.loads[name][0].sum() - self.load_of_sums([name], [0])[0].sum() for name in self.loads}
        return sorted((name for name in saved if saved[name] > 0), key=lambda name: -saved[name])

    @property
    def best(self) -> Plan:
        """The plan under which the busiest rank is least busy, and which costs no more than rows by the objective."""
        topology, request, rows = self.problem.topology, self.problem.request, self.cost_of_rows
        most = rows.objective(topology, request) * (1 + _ROUNDING)
        least = self.busiest(self.load_of_rows) * (1 - LEAST_GAIN)
        for _, owned in sorted(self._tried(least), key=lambda each: each[0]):
            plan = _joined(self.problem, self.rows, owned)
            cost = self.problem.cost(plan)
            if cost.objective(topology, request) <= most and self.busiest(self._load(cost)) < least:
                return self._noted(plan, cost)
        return self._noted(self.rows, rows)

    def _tried(self, least: float) -> Iterable[tuple[float, dict[str, TablePlan]]]:
        """Owners of the first candidates under which the busiest rank has less to do than `least`; how much."""
        last = len(self.candidates)
        for count in np.unique(np.linspace(1, last, min(last, MOST_CHOICES)).astype(int)).tolist():
            owned = self._owned_of(self.candidates[:count])
            load = self.load_of_rows - np.sum([self.loads[name] for name in owned], axis=0)
            load += self.load_of_sums([*owned], [table.ranges[0].rank for table in owned.values()])
            if (busiest := self.busiest(load)) < least:
                yield busiest, owned

    def _owned_of(self, names: Sequence[str]) -> dict[str, TablePlan]:
        """Tables with an owner each, without those for which no rank has the memory."""
        while True:
            others = replace(self.rows, tables=tuple(table for table in self.rows.tables if table.name not in names))
            owned = _owned(self.problem, names, others)
            if len(owned) == len(names):
                return owned
            names = [*owned]

    def _noted(self, plan: Plan, cost: Cost) -> Plan:
        """The plan with a note of what it sends."""
        count = sum(table.send == "sums" for table in plan.tables)
        before, after = (bytes_text(each.busiest_bytes) for each in (self.cost_of_rows, cost))
        if cost is self.cost_of_rows:
            others = f" beside the {count} that must" if count else ""
            text = f"no table sends sums{others}: the busiest rank has {before} a step, and owners make it no less"
        else:
            which = f"{count} of {len(plan.tables)} tables send sums"
            text = f"{which}: the busiest rank has {after} a step, as rows {before}"
        return replace(plan, notes={**plan.notes, "sums": text})
