"""Drift: fits are predicted and measured alike; plans for rows in any order."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.placement.drift import Fit, Planner, Traffic, has_copies, plan_unsorted, predict
from rowmesh.placement.profile import Profile
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
    plan = plan_unsorted("dealt", profile, topology, REQUEST)
    plan.check()
    best = search("dealt", in_order, topology, REQUEST)
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


def planned(*rules):
    ranges = tuple(RowRange(50 * i, 50 * (i + 1), rule) for i, rule in enumerate(rules))
    return Plan((TablePlan(shape(50 * len(rules)), ranges),), 2, 2)


def test_only_rows_on_several_ranks_have_copies():
    assert not has_copies(planned("dealt", "fixed"))
    assert not has_copies(planned("dealt", "node"))  # one node
    assert has_copies(planned("dealt", "replicated"))


@pytest.mark.parametrize("moves", [False, True])
def test_a_planner_proposes_where_that_is_cheaper(moves):
    generator = np.random.default_rng(0)
    request = Request(batch_size=8, mode="infer", extra_memory=0.25)  # 50 rows with copies
    planner = Planner(planned("replicated", "dealt", "dealt", "dealt"), "dealt", Topology.uniform(2), request)
    hot = 150 if moves else 0
    assert planner.take() is None
    for _ in range(100):
        ids = np.where(generator.random(64) < 0.7, hot + generator.integers(0, 50, 64), generator.integers(0, 200, 64))
        planner.watch({"item": np.append(ids, [-1, 200])}, 64)
        planner.watch({"item": ids[:5]}, 5)  # of another size
    planner.begin()
    assert planner.is_planning
    planner.wait()
    proposal = planner.take()
    assert proposal is not None
    assert not planner.is_planning
    assert (proposal.plan is not None) == moves
    if proposal.plan is not None:
        assert proposal.plan.table("item").range_of(170).rule == "replicated"


def test_a_plan_of_nothing_cannot_be_made():
    planner = Planner(planned("dealt"), "dealt", Topology.uniform(2), REQUEST)
    planner.begin()
    planner.wait()
    proposal = planner.take()
    assert proposal.plan is None
    assert proposal.text.startswith("no new plan can be made")
    planner.close()
