"""Cyclic ranges balance owners and cost no memory."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.placement import Plan, TablePlan
from rowmesh.placement.cost import ONE_HOP, REPLICATED
from rowmesh.placement.demand import Demand
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.cyclic_ranges import SHORT_CYCLE, Span, _least_overlap, cyclic_ranges, memory_bytes
from rowmesh.placement.strategies.levels import LinkCosts, RowBytes
from rowmesh.placement.topology import Topology
from tests.placement.strategies.problems import power_law


def ranges_of(sizes, world_size, kind=ONE_HOP, **options):
    profile = power_law(sizes)
    demand = Demand.of(profile, world_size, world_size, Request(batch_size=2048))
    request = Request(batch_size=2048)
    seconds = RowBytes.of(demand, request).seconds(LinkCosts.of(Topology.uniform(world_size)))
    spans = [Span(table, 0, size, kind) for table, size in enumerate(sizes)]
    ranges = cyclic_ranges(spans, demand, seconds, **options)
    plan = Plan(tuple(map(TablePlan, profile.shapes, map(tuple, ranges))), world_size, world_size)
    plan.check()
    loads = np.zeros(world_size)
    for index, table in enumerate(plan.tables):
        of_row = np.repeat(seconds[kind, demand.table == index], profile.tables[index].lengths)
        for part in table.ranges:
            for row in range(part.start, part.stop):
                loads[part.owner(row, world_size)] += of_row[row]
    return plan, loads, memory_bytes(spans, demand)


def test_a_hand_gives_each_rank_one_row_and_takes_no_memory():
    for sizes in ((10_000, 333, 7), (5,), (64,), (3, 3, 3)):
        plan, loads, expected = ranges_of(sizes, 8)
        assert max(plan.memory_bytes) <= expected
        for table in plan.tables:
            head = [part.rank for part in table.ranges if part.rule == "fixed"]
            hands = [head[first : first + 8] for first in range(0, len(head), 8)]
            assert all(len(set(hand)) == len(hand) for hand in hands)
        assert loads.max() > 0


def test_loads_are_better_balanced_than_by_shifts_alone():
    sizes = (100_000, 10_000, 10_000, 333, 50)
    _, loads, _ = ranges_of(sizes, 8)
    _, shifted, _ = ranges_of(sizes, 8, max_head_rows=0)
    assert loads.min() / loads.max() > 0.998
    assert loads.min() / loads.max() >= shifted.min() / shifted.max()


def test_owners_of_replicated_rows_are_balanced_too():
    plan, loads, _ = ranges_of((20_000, 500), 4, REPLICATED)
    assert {part.rule for table in plan.tables for part in table.ranges} == {"replicated"}
    assert loads.min() / loads.max() > 0.999


def test_what_ranks_already_do_counts():
    started = np.array([1e6, 0, 0, 0.0])
    _, loads, _ = ranges_of((5_000,), 4, started=started)
    assert loads[0] < loads[1:].min()


@settings(max_examples=60)
@given(st.integers(1, 3 * SHORT_CYCLE), st.integers(0, 10_000), st.sampled_from([1, 2, 50, None]))
def test_the_shift_of_a_cycle_is_that_of_all_shifts_tried(world_size, seed, levels):
    """Among equal ones, the first."""
    rng = np.random.default_rng(seed)
    residues, load = rng.random((2, world_size)) if levels is None else rng.integers(0, levels, (2, world_size)) * 1.0
    every = np.array([np.roll(residues, shift) @ load for shift in range(world_size)])
    assert _least_overlap(residues, load) == every.argmin()
