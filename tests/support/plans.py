"""Plans in which neighbouring ranges of rows follow different rules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import hypothesis.strategies as st

from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.tables import TableSpec

RULES = ("cyclic", "node", "replicated", "fixed")


def make_plan(tables, world_size, ranks_per_node, choose):
    """`choose(number of a range)` gives rule, shift, rank and hops; tables are cut into thirds."""
    planned, number = [], 0
    for spec in tables:
        cuts = sorted({0, spec.num_rows // 3, 2 * spec.num_rows // 3, spec.num_rows})
        ranges = []
        for start, stop in pairwise(cuts):
            rule, shift, rank, two_hop = choose(number)
            ranges.append(RowRange(start, stop, rule, shift % world_size, rank % world_size, two_hop))
            number += 1
        planned.append(TablePlan(TableShape.of(spec), tuple(ranges)))
    return Plan(tuple(planned), world_size, ranks_per_node)


def joined(plan, joins):
    """The plan with ranges that go on with the cycle that ended last under their rule, where `joins()` says so."""
    tables = []
    for table in plan.tables:
        ranges, unfilled = [], {}
        for part in table.ranges:
            round_ = part.round_size(plan.world_size, plan.ranks_per_node)
            if part.rule in unfilled and joins():
                phase, shift = unfilled.pop(part.rule)
                part = replace(part, phase=phase, shift=shift)
            ranges.append(part)
            if phase := (part.phase + len(part)) % round_:
                unfilled[part.rule] = phase, (part.shift + len(part)) % plan.world_size
        tables.append(replace(table, ranges=tuple(ranges)))
    return replace(plan, tables=tuple(tables))


@st.composite
def random_ranges(draw, num_rows, world_size):
    """The rows of a table, cut anywhere, under any rules."""
    cuts = sorted(draw(st.sets(st.integers(1, num_rows - 1), max_size=4))) if num_rows > 1 else []
    ranks = st.integers(0, world_size - 1)
    return tuple(
        RowRange(start, stop, draw(st.sampled_from(RULES)), draw(ranks), draw(ranks), draw(st.booleans()))
        for start, stop in pairwise([0, *cuts, num_rows])
    )


@st.composite
def random_plans(draw, tables, world_size, ranks_per_node, *, sums=False):
    """Plans whose ranges follow any rule, and of which some tables send sums where they may."""
    number = st.integers(0, 7)
    names = [spec.name for spec in tables if sums and draw(st.sampled_from([False, False, True]))]
    plan = make_plan(
        tables,
        world_size,
        ranks_per_node,
        lambda _: (draw(st.sampled_from(RULES)), draw(number), draw(number), draw(st.booleans())),
    )
    return summing(joined(plan, lambda: draw(st.booleans())), tables, names)


def with_copies(tables, world_size):
    """A plan whose ranks all have the first and the last third of every table."""
    return make_plan(
        tables, world_size, world_size, lambda number: ("cyclic" if number % 3 == 1 else "replicated", 0, 0, False)
    )


def in_groups(scenario, replicas, together="shards", mode="exact"):
    """The job with replicas of every table, or of each by name."""
    shapes = [TableShape.of(spec) for spec in scenario.tables]
    per_node = scenario.ranks_per_node or scenario.world_size
    plan = Plan.cyclic(shapes, scenario.world_size, per_node, replicas=replicas, together=together)
    return replace(scenario, plan=plan, synchronization=Synchronization(mode=mode))


@st.composite
def pairs_of_plans(draw):
    """Two plans of the same tables for the same ranks."""
    per_node, nodes = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (4, 1)]))
    tables = [TableSpec(name=name, num_rows=draw(st.integers(1, 60)), dim=4) for name in "ab"]
    return [draw(random_plans(tables, per_node * nodes, per_node)) for _ in range(2)]


def summing(plan, tables, names):
    """The plan with some tables whole at an owner each, to which bags travel: those that are pooled and dense."""
    specs, planned = {spec.name: spec for spec in tables}, []
    for number, table in enumerate(plan.tables):
        spec = specs[table.name]
        if table.name in names and spec.pooling != "none" and spec.storage == "dense":
            size = plan.grid(table.replicas).shards
            whole = RowRange(0, spec.num_rows, "fixed", rank=number % size)
            table = replace(table, ranges=(whole,), send="sums")
        planned.append(table)
    return replace(plan, tables=tuple(planned))
