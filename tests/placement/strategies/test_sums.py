"""Tables send sums where that makes the busiest rank less busy, and never where it costs more than rows."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, TablePlan, TableShape
from rowmesh.placement.comparison import compare
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import QUICK, search
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional import compare_replicas
from rowmesh.placement.two_dimensional_cost import cost_with_replicas
from rowmesh.tables.spec import Send
from tests.placement.problems import mlperf
from tests.placement.strategies.problems import small

MODERATE = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])


def sending(profile, send, **changes):
    """The profile with other wishes: one for all tables, or one for each."""
    wanted = [send] * len(profile.tables) if isinstance(send, str) else send
    tables = (
        replace(table, shape=replace(table.shape, send=each), **changes)
        for table, each in zip(profile.tables, wanted, strict=True)
    )
    return replace(profile, tables=tuple(tables))


def long_bags(*lengths, send: Send = "auto", num_rows=1000, num_samples=1000):
    """Tables of so many ids a bag, all rows equally often read."""
    tables = []
    for index, ids in enumerate(lengths):
        shape = TableShape(f"t{index}", num_rows, 64, 64, 4, send)
        tables.append(TableProfile(shape, np.array([num_rows]), np.array([num_samples * ids / num_rows])))
    return Profile(tuple(tables), num_samples)


def busiest(problem, plan):
    return problem.cost(plan).busy_seconds(problem.topology, problem.request.fetch_weight).max()


@MODERATE
@given(small(), st.sampled_from(["cyclic", "auto", "torchrec_like"]), st.integers(0, 3), st.integers(1, 3), st.data())
def test_no_plan_costs_more_than_the_same_without_sums(case, name, jagged, features, data):
    profile, topology, request = case
    may = [data.draw(st.sampled_from(["auto", "auto", "rows"])) for _ in profile.tables]
    with_sums = sending(profile, may, num_jagged=min(jagged, features), num_features=features)
    problem = Problem(with_sums, topology, request)
    rows = search(name, sending(with_sums, "rows"), topology, request)
    plan = search(name, with_sums, topology, request)
    assert busiest(problem, plan) <= busiest(problem, rows) * (1 + 1e-9)
    assert problem.objective(plan) <= problem.objective(rows) * (1 + 1e-9)
    assert problem.fits(plan) or not problem.fits(rows)
    assert all(table.send == "rows" or may[i] == "auto" for i, table in enumerate(plan.tables))
    if all(table.send == "rows" for table in plan.tables):
        assert plan.tables == rows.tables
    assert [table.shape.send for table in plan.tables] == may


@pytest.mark.parametrize(
    "num_ranks, most, count", [(2, 0.25, 12), (8, 0.26, 12), (16, 0.34, 12), (32, 0.55, 12), (128, 1.0, 0)]
)
def test_the_busiest_rank_of_the_industrys_task(num_ranks, most, count):
    problem = Problem(mlperf("auto"), Topology.uniform(num_ranks), Request(batch_size=512))
    rows = search("cyclic", mlperf("rows"), problem.topology, problem.request)
    plan = search("cyclic", mlperf("auto"), problem.topology, problem.request)
    assert sum(table.send == "sums" for table in plan.tables) == count
    before, after = (problem.cost(each).busiest_bytes for each in (rows, plan))
    assert after <= most * before
    if count:
        assert f"{count} of 26 tables send sums: the busiest rank has" in plan.notes["sums"]
        owners = [table.ranges[0].rank for table in plan.tables if table.send == "sums" and len(table.ranges[0]) > 1e7]
        assert len(set(owners)) == min(len(owners), num_ranks), "long tables are not beside each other"
    else:
        assert plan.notes["sums"].startswith("no table sends sums: the busiest rank has")


def test_two_hops_are_what_sums_are_compared_with():
    """Sums of these tables are 0.73 of rows in one hop, and no less than rows in two hops."""
    profile, topology = long_bags(*[2] * 8, num_rows=200), Topology.grouped(2, 4, 4.21)
    for max_hops, send in ((1, "sums"), (2, "rows")):
        plan = search("cyclic", profile, topology, Request(batch_size=64, max_hops=max_hops))
        assert {table.send for table in plan.tables} == {send}


def test_a_table_of_short_bags_and_a_heavy_owner_stay_rows():
    topology = Topology.uniform(4)
    plan = search("cyclic", long_bags(100, 1, 100, 100, 100), topology, Request(batch_size=64))
    assert [table.send for table in plan.tables] == ["sums", "rows", "sums", "sums", "sums"]
    assert sorted(table.ranges[0].rank for table in plan.tables if table.send == "sums") == [0, 1, 2, 3]
    # One owner of 64 ranks would have 63 · 64 vectors; rows are 1,000 at most, shared by all.
    plan = search("cyclic", long_bags(100), Topology.uniform(64), Request(batch_size=64))
    assert plan.tables[0].send == "rows"


def test_less_than_the_error_of_the_model_moves_no_table():
    """Sums of the second table would save half a per cent of what the first moves."""
    profile, topology, request = long_bags(100, 100), Topology.uniform(2), Request(batch_size=10)
    heavy = replace(profile.tables[0], shape=replace(profile.tables[0].shape, send="rows"))
    light = profile.tables[1]
    for width, send in ((6400 * 64, "rows"), (64, "sums")):
        shape = replace(heavy.shape, value_bytes=width, gradient_bytes=width)
        tables = replace(profile, tables=(replace(heavy, shape=shape), light))
        assert search("cyclic", tables, topology, request).tables[1].send == send


def test_where_rows_are_read_in_place_tables_send_rows():
    request = Request(batch_size=64, allows_sums=False)
    plan = search("auto", long_bags(100, 100), Topology.uniform(2), request)
    assert [table.send for table in plan.tables] == ["rows", "rows"]
    assert plan.notes["sums"].startswith("no table sends sums: ranks read each other's memory")
    forced = search("auto", long_bags(100, 100, send="sums"), Topology.uniform(2), request)
    assert [table.send for table in forced.tables] == ["sums", "sums"]
    alone = search("auto", long_bags(100), Topology.uniform(1), Request(batch_size=64))
    assert alone.tables[0].send == "rows"


@pytest.mark.parametrize(
    ("rows", "sends"),
    [(2400, ["rows", "rows"]), (2600, ["rows", "sums"]), (3100, ["sums", "sums"]), (2990, ["rows", "sums"])],
)
def test_owners_have_the_memory(rows, sends):
    """A rank has 1,500 rows of the long table and 500 of the other, or one of them whole; and room for messages."""
    profile = long_bags(100, 90)
    tall = replace(profile.tables[0].shape, num_rows=3000)
    tall = TableProfile(tall, np.array([3000]), np.array([100 * 1000 / 3000]))
    profile = replace(profile, tables=(tall, profile.tables[1]))
    limit = rows * 68
    request = Request(batch_size=1, memory_limit_bytes=limit)
    plan = search("row_wise", profile, Topology.uniform(2), request)
    assert [table.send for table in plan.tables] == sends
    assert max(plan.memory_bytes) <= limit
    messages = 2 * (400 + 4 + 8 + 64)
    exact = replace(request, memory_limit_bytes=3000 * 68 + messages)
    for limited, send in ((exact, "sums"), (replace(exact, memory_limit_bytes=3000 * 68 + messages - 1), "rows")):
        assert search("row_wise", profile, Topology.uniform(2), limited).tables[0].send == send


@pytest.mark.parametrize("name", QUICK)
def test_tables_that_must_send_sums_leave_the_memory_that_is_left_to_others(name):
    profile = long_bags(50, 50, 3, send="sums")
    profile = sending(profile, ["sums", "sums", "rows"])
    limit = 1000 * 68 + 520 * 68 + 2 * 64 * 1000
    request = Request(batch_size=64, memory_limit_bytes=limit)
    plan = search(name, profile, Topology.uniform(2), request)
    assert [table.send for table in plan.tables] == ["sums", "sums", "rows"]
    assert sorted(table.ranges[0].rank for table in plan.tables[:2]) == [0, 1]
    if name in ("cyclic", "partitioned"):
        assert max(plan.memory_bytes) <= limit


def test_what_does_not_fit_is_said():
    sums = sending(long_bags(50, 50, 3), ["sums", "sums", "rows"])
    tight = Request(batch_size=64, memory_limit_bytes=999 * 68)
    with pytest.raises(ConfigurationError, match=r"tables \['t0', 't1'\] are to send sums, .* may hold 67,932 bytes"):
        search("cyclic", sums, Topology.uniform(2), tight)
    narrow = Request(batch_size=1, memory_limit_bytes=1300 * 68)
    with pytest.raises(ConfigurationError, match=r"beside 68,000 bytes of .* sums, \['t0', 't1'\]: every"):
        search("cyclic", sums, Topology.uniform(2), narrow)


def test_without_a_limit_whole_tables_are_beside_what_copies_are_counted_in():
    problem = Problem(long_bags(100, 1), Topology.uniform(2), Request(batch_size=64))
    comparison = compare(problem, "auto")
    assert [table.send for table in comparison.plan.tables] == ["sums", "rows"]
    assert max(comparison.plan.memory_bytes) > problem.limit_bytes
    assert comparison.chosen.fits
    assert comparison.plan.tables == search("auto", problem.profile, problem.topology, problem.request).tables
    hard = replace(problem, request=replace(problem.request, memory_limit_bytes=1020 * 68))
    assert not hard.fits(comparison.plan)


def test_comparison_has_the_other_strategies_as_rows():
    problem = Problem(long_bags(100, 1), Topology.uniform(2), Request(batch_size=64))
    for asked in ("auto", "cyclic"):
        comparison = compare(problem, asked)
        sends = {each.name: each.plan and [table.send for table in each.plan.tables] for each in comparison.candidates}
        assert sends.pop(comparison.plan.strategy) == ["sums", "rows"]
        assert all(each == ["rows", "rows"] for each in sends.values())


def test_all_tables_may_have_to_send_sums():
    plan = search("auto", long_bags(3, 2, send="sums"), Topology.uniform(2), Request(batch_size=4))
    assert plan.tables == tuple(TablePlan.of_sums(table.shape, rank) for rank, table in enumerate(plan.tables))
    assert (
        search("row_wise", long_bags(3, 2, send="sums"), Topology.uniform(2), Request(batch_size=4)).strategy
        == "row_wise"
    )


def test_a_replica_group_has_owners_of_its_own():
    problem = Problem(long_bags(100, 100), Topology.uniform(4), Request(batch_size=16))
    plan = compare_replicas(problem, "cyclic", counts=[2]).plan
    plan.check()
    assert [(table.send, table.replicas) for table in plan.tables] == [("sums", 2)] * 2
    assert sorted(table.ranges[0].rank for table in plan.tables) == [0, 1]
    rows = replace(plan, tables=Plan.cyclic([table.shape for table in plan.tables], 4, replicas=2).tables)
    costs = [
        cost_with_replicas(each, problem.profile, problem.topology, problem.request, Synchronization())
        for each in (plan, rows)
    ]
    assert costs[0].exchange_bytes.sum() < 0.5 * costs[1].exchange_bytes.sum()
    assert costs[0].sync_bytes.sum() == pytest.approx(costs[1].sync_bytes.sum()), "touched rows are the same"
