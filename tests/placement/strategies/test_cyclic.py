"""The default strategy: near the bound, balanced, within a row of its memory, and no copies where none pay."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from rowmesh.placement import Plan, TableShape
from rowmesh.placement.baselines import partitioned
from rowmesh.placement.baselines.heuristics import access_greedy, memory_greedy, row_wise
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.cyclic import search
from rowmesh.placement.strategies.cyclic_ranges import MAX_HEAD_ROWS
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from tests.placement.strategies.problems import power_law, small

FLAT, NODES = Topology.uniform(8), Topology.grouped(2, 4, 4.21)
BIG = power_law(sizes=(1_000_000, 300_000, 20_000, 500, 20, 3), samples=10_000_000)


def rows_by_rule(plan):
    rows = {"replicated": 0, "node": 0, "cyclic": 0, "fixed": 0}
    for table in plan.tables:
        for part in table.ranges:
            rows[part.rule] += len(part)
    return rows


@pytest.mark.parametrize("topology", [FLAT, NODES, Topology.grouped(4, 2, 4.21)], ids=lambda t: t.name)
@pytest.mark.parametrize(
    "request_",
    [
        Request(batch_size=4096, mode="infer"),
        Request(batch_size=4096, mode="infer", deduplicated=False),
        Request(batch_size=4096, mode="infer", extra_memory=0.01),
        Request(batch_size=4096),
        Request(batch_size=4096, deduplicated=False),
        Request(batch_size=4096, fetch_weight=4.0),
        Request(batch_size=4096, max_hops=1),
    ],
    ids=str,
)
def test_big_tables_come_near_the_bound_balanced_and_within_memory(topology, request_):
    problem = Problem(BIG, topology, request_)
    plan = search(BIG, topology, request_)
    cost = problem.cost(plan)
    one_row_a_table = sum(shape.row_bytes for shape in problem.shapes)
    rounding = plan.notes["multiplier_s_per_byte"] * topology.world_size * one_row_a_table
    assert cost.objective(topology, request_) <= plan.notes["bound"] * (1 + 1e-5) + rounding
    assert cost.objective(topology, request_) >= plan.notes["bound"] * (1 - 1e-9)
    assert cost.lookup_balance >= (0.999 if request_.deduplicated else 0.998)
    assert cost.memory_balance > 0.9999
    assert sum(len(table.ranges) for table in plan.tables) < 2 * MAX_HEAD_ROWS
    if plan.notes["multiplier_s_per_byte"]:  # memory ran out before what pays
        assert problem.limit_bytes - 2 * one_row_a_table <= max(plan.memory_bytes) <= problem.limit_bytes


@pytest.mark.parametrize("deduplicated", [True, False])
def test_small_tables_lose_no_memory_to_short_rounds(deduplicated):
    """Twenty tables of a few rows: rounding each up to 8 ranks would take a fifth of what copies may have."""
    profile = power_law(sizes=(3001, 1500, 700, *range(9, 60, 3)), samples=100_000)
    request = Request(batch_size=128, mode="infer", deduplicated=deduplicated)
    problem = Problem(profile, FLAT, request)
    plan = search(profile, FLAT, request)
    plan.check(problem.limit_bytes)
    widest = max(shape.row_bytes for shape in problem.shapes)
    assert min(plan.memory_bytes) >= problem.limit_bytes - 2 * widest
    assert problem.objective(plan) <= problem.objective(partitioned.search(profile, FLAT, request))
    assert problem.cost(plan).lookup_balance >= 0.98


def taken_away(plan, **changes):
    """The plan with some attributes of all its ranges changed; what had copies is cyclic from the same owner on."""

    def changed(part):
        copied = part.rule in ("node", "replicated")
        return replace(part, **{key: value for key, value in changes.items() if key != "rule" or copied})

    tables = [replace(table, ranges=tuple(map(changed, table.ranges))) for table in plan.tables]
    return replace(plan, tables=tuple(tables))


@settings(max_examples=40)
@given(small(objective="total"))
def test_a_plan_never_costs_more_than_without_its_copies_or_its_second_hops(case):
    problem = Problem(*case)
    plan = search(*case)
    cost = problem.objective(plan) * (1 - 1e-9)
    for changes in ({"two_hop": False}, {"rule": "cyclic"}, {"rule": "cyclic", "two_hop": False}):
        assert cost <= problem.objective(taken_away(plan, **changes))


@pytest.mark.parametrize("deduplicated", [True, False])
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("topology", [NODES, Topology.grouped(4, 2, 4.21)], ids=lambda t: t.name)
def test_the_slowest_link_is_never_above_the_baselines(topology, mode, deduplicated):
    request = Request(batch_size=4096, mode=mode, deduplicated=deduplicated, objective="slowest_link")
    problem = Problem(BIG, topology, request)
    best = problem.objective(search(BIG, topology, request))
    for other in (access_greedy, row_wise, memory_greedy, partitioned.search):
        assert best <= problem.objective(other(BIG, topology, request)) * (1 + 5e-4), other


def test_no_memory_for_copies_makes_none():
    for strategy in (search, partitioned.search):
        plan = strategy(BIG, FLAT, Request(batch_size=4096, mode="infer", extra_memory=0.0))
        assert rows_by_rule(plan)["replicated"] == rows_by_rule(plan)["node"] == 0


def test_links_are_balanced():
    plan = search(BIG, FLAT, Request(batch_size=4096, mode="infer"))
    assert Problem(BIG, FLAT, Request(batch_size=4096, mode="infer")).cost(plan).link_balance() >= 0.999


def test_training_over_equal_links_makes_no_copies_of_deduplicated_rows():
    rows = rows_by_rule(search(BIG, FLAT, Request(batch_size=4096, extra_memory=1.0)))
    assert rows["replicated"] == rows["node"] == 0
    raw = rows_by_rule(search(BIG, FLAT, Request(batch_size=4096, extra_memory=1.0, deduplicated=False)))
    assert raw["replicated"] > 0


def test_training_makes_copies_where_fetches_are_dearer():
    plain, urgent = Request(batch_size=4096), Request(batch_size=4096, fetch_weight=4.0)
    problem = Problem(BIG, FLAT, plain)
    without, copied = problem.cost(search(BIG, FLAT, plain)), problem.cost(search(BIG, FLAT, urgent))
    assert copied.fetch_bytes.sum() < 0.9 * without.fetch_bytes.sum()
    assert copied.total_bytes > without.total_bytes


def test_across_nodes_training_takes_two_hops_instead_of_copies():
    request = Request(batch_size=4096)
    plan = search(BIG, NODES, request)
    assert plan.notes["two_hop_rows"] > 0
    assert rows_by_rule(plan)["node"] == 0
    one_hop = search(BIG, NODES, replace(request, max_hops=1))
    problem = Problem(BIG, NODES, request)
    assert problem.objective(plan) < 0.99 * problem.objective(one_hop)
    assert not any(part.two_hop for table in one_hop.tables for part in table.ranges)


def test_two_hop_rows_that_fill_no_round_keep_two_hops():
    topology, request = Topology.grouped(32, 8, 4.21), Request(batch_size=64, extra_memory=0.0)
    profile = power_law(sizes=(20_000, 3_000, 400, 100, 7), samples=100_000)
    problem, plan = Problem(profile, topology, request), search(profile, topology, request)
    assert problem.objective(plan) <= 1.02 * plan.notes["bound"]
    assert max(plan.memory_bytes) <= max(Plan.cyclic(profile.shapes, topology.world_size).memory_bytes)


@settings(max_examples=100)
@given(small(mode="train", extra_memory=0.0, max_hops=2, objective="total"))
def test_no_plan_is_cheaper_without_its_two_hops(case):
    problem, plan = Problem(*case), search(*case)
    tables = (replace(t, ranges=tuple(replace(part, two_hop=False) for part in t.ranges)) for t in plan.tables)
    assert problem.objective(plan) <= problem.objective(replace(plan, tables=tuple(tables))) * (1 + 1e-9)


def test_the_slowest_link_is_as_fast_as_unequal_links_allow():
    request = Request(batch_size=4096, mode="infer", objective="slowest_link")
    plan = search(BIG, NODES, request)
    cost = Problem(BIG, NODES, request).cost(plan)
    assert cost.link_balance(NODES) >= 0.99
    total = Problem(BIG, NODES, request).cost(search(BIG, NODES, replace(request, objective="total")))
    assert cost.objective(NODES, request) < total.objective(NODES, request)


@pytest.mark.parametrize("extra_memory", [0.1, 0.2, 0.3])
def test_both_kinds_of_links_take_equally_long_where_most_rows_are_alike(extra_memory):
    """Rows that were read once are one run of several 10,000 rows, which no multiplier cuts in two."""
    profile = power_law(sizes=(400_000, 100_000), exponent=0.9, samples=300_000)
    request = Request(batch_size=512, mode="infer", extra_memory=extra_memory, objective="slowest_link")
    plan = search(profile, NODES, request)
    assert Problem(profile, NODES, request).cost(plan).link_balance(NODES) >= 0.99
    assert sum(len(table.ranges) for table in plan.tables) < 2 * MAX_HEAD_ROWS


@pytest.mark.parametrize("extra_memory", [0.2, 0.3])
def test_both_kinds_of_links_take_equally_long_where_rows_of_unlike_counts_are_in_every_batch(extra_memory):
    """All rows of the head then save alike, so that a multiplier gives all of them the same level."""
    counts = np.append(1000 * np.arange(10_000, 5_000, -1), np.ones(20_000))
    profile = Profile.from_counts({"t": counts}, [TableShape("t", len(counts), 64, 64, 4)], num_samples=10_000_000)
    request = Request(batch_size=65_536, mode="infer", extra_memory=extra_memory, objective="slowest_link")
    plan = search(profile, NODES, request)
    assert Problem(profile, NODES, request).cost(plan).link_balance(NODES) >= 0.99
    assert len(plan.tables[0].ranges) < 10


def test_copies_go_where_a_byte_saves_most():
    """20 bytes moved for 16 stored against 260 for 256: narrow rows come first, and memory ends within wide ones."""
    counts = np.array([400] * 100 + [1] * 900)
    narrow, wide = TableShape("narrow", 1000, 16, 16), TableShape("wide", 1000, 256, 256)
    profile = Profile.from_counts({"narrow": counts, "wide": counts}, [narrow, wide], 50_000)
    request = Request(batch_size=64, mode="infer", extra_memory=0.3)
    plan = search(profile, FLAT, request)
    hot = {table.name: sum(len(p) for p in table.ranges if p.rule == "replicated") for table in plan.tables}
    assert hot["narrow"] == 100
    assert 0 < hot["wide"] < 100


def test_optimizer_state_of_copies_counts():
    def copies(state_bytes):
        shape = TableShape("item", 50_000, 64, 64, state_bytes)
        counts = np.sort(np.random.default_rng(0).zipf(1.5, 50_000).clip(max=10_000))[::-1]
        profile = Profile.from_counts({"item": counts}, [shape], int(counts.sum()))
        request = Request(batch_size=512, mode="infer", memory_limit_bytes=128 * 6250 + 128 * 100)
        return rows_by_rule(search(profile, FLAT, request))["replicated"]

    assert copies(64) == pytest.approx(100 * 8 / 7, abs=2)
    assert copies(0) > 10 * copies(64)


def test_rows_out_of_order_are_placed_by_prefix():
    counts = np.array([0, 90, 5, 80, 5, 5, 1, 1] + [0] * 92)
    profile = Profile.from_counts({"item": counts}, [TableShape("item", 100, 64, 64)], 200)
    plan = search(profile, Topology.uniform(2), Request(batch_size=8, mode="infer", extra_memory=0.04))
    assert [plan.tables[0].range_of(row).rule for row in range(5)] == ["replicated"] * 4 + ["cyclic"]


def with_rare_row(counts, often):
    """A table that ends with the row of all rare ids."""
    counts = np.append(np.sort(counts)[::-1], often)
    return Profile.from_counts({"item": counts}, [TableShape("item", len(counts), 64, 64, 4)], int(counts.sum()))


RARE = with_rare_row(200_000 / np.arange(1, 50_001), 150_000)


def test_a_last_row_that_is_read_much_is_copied():
    request = Request(batch_size=512, mode="infer", extra_memory=0.01)
    plan = search(RARE, FLAT, request)
    plan.check(Problem(RARE, FLAT, request).limit_bytes)
    rules = [plan.tables[0].range_of(row).rule for row in (0, 40_000, 49_999, 50_000)]
    assert rules == ["replicated", "cyclic", "cyclic", "replicated"]


def test_a_last_row_that_is_read_much_takes_two_hops():
    request = Request(batch_size=512)
    plan = search(RARE, NODES, request)
    plan.check(Problem(RARE, NODES, request).limit_bytes)
    last = plan.tables[0].ranges[-1]
    assert (len(last), last.two_hop, plan.tables[0].range_of(49_999).two_hop) == (1, True, False)


def test_a_last_row_stays_with_the_others_where_a_slot_more_does_not_fit():
    profile = with_rare_row(np.full(39, 5), 50)
    for extra_memory, rule in ((0.0, "cyclic"), (0.2, "replicated")):
        request = Request(batch_size=8, mode="infer", extra_memory=extra_memory)
        plan = search(profile, Topology.uniform(4), request)
        plan.check(Problem(profile, Topology.uniform(4), request).limit_bytes)
        assert plan.tables[0].range_of(39).rule == rule


def test_one_rank_needs_no_copies():
    plan = search(BIG, Topology.uniform(1), Request(batch_size=64, mode="infer"))
    assert [len(table.ranges) for table in plan.tables] == [1] * 6
    assert rows_by_rule(plan)["cyclic"] == sum(shape.num_rows for shape in BIG.shapes)


def test_a_device_that_is_too_small_limits_copies():
    request = Request(batch_size=4096, mode="infer", extra_memory=1.0)
    least = Problem(BIG, FLAT, request).limit_bytes // 2
    small = replace(FLAT, memory_bytes=least + 10_000)
    assert max(search(BIG, small, request).memory_bytes) <= least + 10_000
