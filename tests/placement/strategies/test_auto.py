"""`auto` takes the best and says why."""

import pytest

from rowmesh.placement.request import Request
from rowmesh.placement.strategies import QUICK, auto
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from tests.placement.strategies.problems import power_law

PROFILE = power_law()


def test_it_says_what_the_runner_up_would_cost():
    request = Request(batch_size=2048, mode="infer")
    plan = auto.search(PROFILE, Topology.uniform(8), request)
    notes = plan.notes
    assert plan.strategy == "dealt"
    assert notes["auto"].startswith("dealt: sum over links ")
    assert "partitioned comes next with" in notes["auto"]
    assert set(notes["compared"]) | set(notes["left_out"]) == set(QUICK)
    problem = Problem(PROFILE, Topology.uniform(8), request)
    assert notes["compared"]["dealt"]["objective"] == pytest.approx(problem.objective(plan))
    assert "bytes more than the limit" in notes["left_out"]["table_wise"]


def test_the_slowest_link_decides_between_equal_sums():
    """Over equal links, training moves as much wherever rows are; balance differs."""
    plan = auto.search(PROFILE, Topology.uniform(8), Request(batch_size=2048))
    numbers = plan.notes["compared"]
    assert plan.strategy in ("dealt", "access_greedy")
    assert numbers["row_wise"]["objective"] == pytest.approx(numbers[plan.strategy]["objective"])
    assert numbers["row_wise"]["slowest_link"] > numbers[plan.strategy]["slowest_link"]
    assert "the slowest link takes" in plan.notes["auto"]


def test_one_rank_has_nothing_to_compare():
    assert auto.search(PROFILE, Topology.uniform(1), Request(batch_size=64)).strategy in QUICK
