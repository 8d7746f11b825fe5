"""Drift: fits are predicted and measured alike; plans for rows in any order."""

from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.address_map import AddressMap
from rowmesh.placement.drift import Fit, Planner, Proposal, Traffic, has_copies, predict
from rowmesh.placement.profile import Profile, TableProfile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import search
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology

REQUEST = Request(batch_size=8, mode="infer", extra_memory=0.3)


def shape(num_rows, name="item"):
    return TableShape(name, num_rows, value_bytes=64, gradient_bytes=64)


def profile_of(counts):
    return Profile.from_counts({"item": counts}, [shape(len(counts))], num_samples=max(int(np.sum(counts)), 1))


@settings(max_examples=30)
@given(counts=st.lists(st.integers(0, 50), min_size=4, max_size=60), world_size=st.sampled_from([2, 4]))
def test_plans_of_unsorted_rows_cost_what_those_of_sorted_ones_do(counts, world_size):
    topology = Topology.uniform(world_size)
    profile, in_order = profile_of(counts), profile_of(sorted(counts, reverse=True))
    plan = search("cyclic", profile, topology, REQUEST)
    plan.check()
    best = search("cyclic", in_order, topology, REQUEST)
    coverage = predict(plan, Problem(profile, topology, REQUEST)).coverage
    assert coverage == pytest.approx(predict(best, Problem(in_order, topology, REQUEST)).coverage)


def test_coverage_and_balance_are_compared_with_their_predictions():
    predicted = Fit(0.6, 0.98)
    assert Fit(0.55, 0.9).shortfall(predicted, 0.9, 0.9) == ""
    text = Fit(0.3, 0.5).shortfall(predicted, 0.9, 0.8)
    assert text == (
        "coverage 30.0% fell below 90% of the planned 60.0% and balance 50.0% fell below 80% of the planned 98.0%"
    )


def test_traffic_of_no_rank_has_no_fit():
    assert Traffic.fit([Traffic(2).take(), Traffic(2).take()]) is None
    assert Traffic.fit([[10, 4, 3, 1], [10, 6, 1, 3]]) == Fit(0.5, 1.0)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_traffic_counted_on_a_device_is_that_counted_at_once(ranks_per_node):
    ranges = [RowRange(0, 20, "replicated"), RowRange(20, 40, "node"), RowRange(40, 50)]
    address_map = AddressMap(Plan((TablePlan(shape(50), tuple(ranges)),), 2, ranks_per_node), ["item"], rank=1)
    at_once, later = Traffic(2), Traffic(2)
    generator = np.random.default_rng(0)
    for _ in range(2):
        for _ in range(3):
            requests, accesses = generator.integers(0, 9, (2, 2, address_map.num_segments))
            offsets = np.concatenate([[0], requests.flatten().cumsum()])
            by_stop = np.stack([offsets[: address_map.num_segments + 1], offsets[address_map.num_segments :]])
            at_once.add(address_map, by_stop, accesses)
            later.add_on_device(address_map, torch.from_numpy(np.stack([requests, accesses]).flatten()))
        taken = [traffic.take() for traffic in (at_once, later)]
        assert taken[0] == taken[1]
        assert all(taken[0])


def planned(*rules):
    ranges = tuple(RowRange(50 * i, 50 * (i + 1), rule) for i, rule in enumerate(rules))
    return Plan((TablePlan(shape(50 * len(rules)), ranges),), 2, 2)


def test_only_rows_on_several_ranks_have_copies():
    assert not has_copies(planned("cyclic", "fixed"))
    assert not has_copies(planned("cyclic", "node"))  # one node
    assert has_copies(planned("cyclic", "replicated"))


def batches(hot, num_batches=100, seed=0):
    """Most of 64 ids a batch are of 50 hot rows out of 200."""
    generator = np.random.default_rng(seed)
    for _ in range(num_batches):
        yield np.where(generator.random(64) < 0.7, hot + generator.integers(0, 50, 64), generator.integers(0, 200, 64))


@pytest.mark.parametrize(
    ("hot", "then", "moves"), [(0, 0, False), (150, 150, True), (150, None, True), (150, 0, False), (150, 100, False)]
)
def test_a_planner_proposes_what_is_cheaper_for_what_comes_then(hot, then, moves):
    request = Request(batch_size=8, mode="infer", extra_memory=0.25)  # 50 rows with copies
    planner = Planner(planned("replicated", "cyclic", "cyclic", "cyclic"), "cyclic", Topology.uniform(2), request)
    assert planner.take() is None
    for ids in batches(hot):
        planner.watch({"item": np.append(ids, [-1, 200])}, 64)
        planner.watch({"item": ids[:5]}, 5)  # of another size
    planner.begin()
    assert planner.is_planning
    for ids in batches(then, seed=1) if then is not None else ():
        planner.watch({"item": ids}, 64)
    planner.wait()
    proposal = planner.take()
    assert proposal is not None
    assert not planner.is_planning
    assert (proposal.plan is not None) == moves
    if proposal.plan is not None:
        assert proposal.plan.table("item").range_of(170).rule == "replicated"


def test_a_planner_knows_what_tables_send_and_which_bags_they_have():
    """32 ids a bag, of 200 rows: sums are fewer bytes. The sketch counts ids alone."""
    request = Request(batch_size=8)
    made_of = Profile((TableProfile(replace(shape(200), send="auto"), np.array([200]), np.array([16.0])),), 100)
    for known, send in ((made_of, "sums"), (None, "rows")):
        plan = planned("cyclic", "cyclic", "cyclic", "cyclic")
        planner = Planner(plan, "cyclic", Topology.uniform(2), request, made_of=known)
        for seed in range(20):
            planner.watch({"item": np.random.default_rng(seed).integers(0, 200, 8 * 32)}, 8)
        planner.begin()
        planner.wait()
        proposal = planner.take()
        assert proposal is not None
        assert (proposal.plan.table("item").send if proposal.plan else "rows") == send


def test_what_owners_sum_is_not_in_the_traffic_that_a_plan_predicts():
    shapes = [shape(50), replace(shape(50), name="user")]
    profile = Profile.from_counts({each.name: [8] * 50 for each in shapes}, shapes, num_samples=100)
    problem = Problem(profile, Topology.uniform(2), REQUEST)
    plan = Plan.cyclic(shapes, 2)
    copied = replace(plan.tables[0], ranges=(RowRange(0, 25, "replicated"), RowRange(25, 50)))
    plan = replace(plan, tables=(copied, TablePlan.of_sums(shapes[1], 0)))
    alone = replace(plan, tables=(copied,))
    assert predict(plan, problem) == predict(alone, problem.of_tables(["item"]))
    owned = replace(plan, tables=(TablePlan.of_sums(shapes[0], 0), TablePlan.of_sums(shapes[1], 0)))
    assert predict(owned, problem) == Fit(0.0, 1.0)


@pytest.fixture(scope="module")
def halves():
    """Half the accesses of a real table in order of their frequency, as prepared data are, and the other half."""
    trace = Path(__file__).parents[2] / "../shared/data/meta_traces/meta_reuse_medium_table500K.txt.gz"
    if not trace.exists():
        pytest.skip("real data are not here")
    ids = np.loadtxt(trace, dtype=np.int64)
    first, second = np.split(ids, [len(ids) // 2])
    rows = np.empty(500_000, np.int64)
    rows[np.argsort(-np.bincount(first, minlength=500_000), kind="stable")] = np.arange(500_000)
    return rows[first], rows[second]


def test_hot_rows_of_a_real_table_that_go_are_seen_and_not_chased(halves):
    """Every part of the trace has hot rows of its own: plans of one part do not serve the next, and none is better."""
    topology, request = Topology.uniform(2), Request(batch_size=1024, mode="infer", extra_memory=0.01)
    problems = [
        Problem(profile_of(np.bincount(ids, minlength=500_000)), topology, request) for ids in (halves[0], halves[1])
    ]
    plan = search("cyclic", problems[0].profile, topology, request)
    planned_fit, recent = (predict(plan, problem) for problem in problems)
    assert recent.shortfall(planned_fit, 0.9, 0.9).startswith("coverage 6.6% fell below 90% of the planned 33.9%")

    planner = Planner(plan, "cyclic", topology, request, capacity=8192)
    parts = np.array_split(halves[1][: len(halves[1]) // 2048 * 2048].reshape(-1, 2048), 2)
    for ids in parts[0]:
        planner.watch({"item": ids}, 2048)
    planner.begin()
    for ids in parts[1]:
        planner.watch({"item": ids}, 2048)
    planner.wait()
    assert planner.take() == Proposal(None, "the plan is as good as a new one for recent traffic")


def test_a_plan_of_nothing_cannot_be_made():
    planner = Planner(planned("cyclic"), "cyclic", Topology.uniform(2), REQUEST)
    planner.begin()
    planner.wait()
    proposal = planner.take()
    assert proposal.plan is None
    assert proposal.text.startswith("no new plan can be made")
    planner.close()
