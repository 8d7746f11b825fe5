"""What others do, each by what it balances and what it forgets."""

import numpy as np
import pytest

from rowmesh.placement import TableShape
from rowmesh.placement.baselines import heuristics
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from tests.placement.strategies.problems import power_law

FLAT = Topology.uniform(4)
PROFILE = power_law((40_000, 9_000, 800, 90, 7), dims=(16, 64))
REQUEST = Request(batch_size=1024, mode="infer")
PROBLEM = Problem(PROFILE, FLAT, REQUEST)


def plan_of(strategy, request=REQUEST):
    plan = strategy(PROFILE, FLAT, request)
    plan.check()
    return plan, PROBLEM.cost(plan)


def test_memory_greedy_gives_equal_bytes_and_forgets_accesses():
    plan, cost = plan_of(heuristics.memory_greedy)
    assert np.ptp(plan.memory_bytes) <= 2 * max(shape.row_bytes for shape in PROFILE.shapes)
    assert cost.lookup_balance < 0.5


def test_access_greedy_balances_reads():
    plan, cost = plan_of(heuristics.access_greedy)
    read = cost.lookup_bytes.sum(axis=0)
    assert read.min() / read.max() > 0.998
    heads = [[part.rank for part in table.ranges if part.rule == "fixed"] for table in plan.tables]
    assert sum(map(len, heads)) > 1000


def test_access_greedy_takes_the_least_read_rank_for_each_row():
    counts = np.array([50, 30, 20, 10, 5, 5, 2, 1])
    profile = Profile.from_counts({"item": counts}, [TableShape("item", 8, 64, 64)], 1000)
    request = Request(batch_size=10, mode="infer", deduplicated=False)
    plan = heuristics.access_greedy(profile, Topology.uniform(2), request)
    # 50 | 30, 20 meet at 50; 10 | 5, 5; then 2 | 1.
    owners = [plan.tables[0].range_of(row).owner(row, 2) for row in range(8)]
    assert owners in ([0, 1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0, 0, 1], [0, 1, 1, 0, 1, 1, 1, 0])


def test_table_wise_and_row_wise():
    plan, _ = plan_of(heuristics.table_wise)
    assert [table.ranges[0].rank for table in plan.tables] == [0, 1, 2, 3, 0]
    assert all(len(table.ranges) == 1 for table in plan.tables)
    plan, _ = plan_of(heuristics.row_wise)
    assert [len(table.ranges) for table in plan.tables] == [4, 4, 4, 4, 4]
    shards = [(part.start, part.stop, part.rank) for part in plan.tables[4].ranges]
    assert shards == [(0, 2, 0), (2, 4, 1), (4, 6, 2), (6, 7, 3)]


def test_torchrec_like_copies_small_tables_and_shards_big_ones():
    plan, _ = plan_of(heuristics.torchrec_like)
    rules = [{part.rule for part in table.ranges} for table in plan.tables]
    assert rules[0] == {"fixed"}
    assert len(plan.tables[0].ranges) == 4
    assert rules[4] == {"replicated"}
    assert PROBLEM.fits(plan)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_torchrec_like_copies_only_where_that_costs_less(mode):
    request = Request(batch_size=1024, mode=mode, extra_memory=1.0)
    plan = heuristics.torchrec_like(PROFILE, FLAT, request)
    rules = {part.rule for table in plan.tables for part in table.ranges}
    assert rules == ({"fixed"} if mode == "train" else {"fixed", "replicated"})


def test_baselines_move_the_same_bytes_without_copies():
    """Over equal links, a row that has one owner costs the same wherever that is."""
    totals = [
        plan_of(getattr(heuristics, name))[1].total_bytes
        for name in ("memory_greedy", "access_greedy", "table_wise", "row_wise")
    ]
    assert totals == pytest.approx([totals[0]] * 4)
