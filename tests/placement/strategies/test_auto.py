"""`auto` takes the best and says why."""

import numpy as np
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
    assert plan.strategy == "cyclic"
    assert notes["auto"].startswith("cyclic: sum over links ")
    assert "partitioned comes next with" in notes["auto"]
    assert set(notes["compared"]) | set(notes["left_out"]) == set(QUICK)
    problem = Problem(PROFILE, Topology.uniform(8), request)
    assert notes["compared"]["cyclic"]["objective"] == pytest.approx(problem.objective(plan))
    assert "bytes more than the limit" in notes["left_out"]["table_wise"]


def test_the_default_wins_between_equal_sums():
    """Over equal links, training moves as much wherever rows are; balance differs."""
    plan = auto.search(PROFILE, Topology.uniform(8), Request(batch_size=2048))
    numbers = plan.notes["compared"]
    assert plan.strategy == "cyclic"
    assert numbers["row_wise"]["objective"] == pytest.approx(numbers["cyclic"]["objective"])
    assert numbers["row_wise"]["slowest_link"] > numbers["cyclic"]["slowest_link"]
    assert plan.notes["auto"].startswith("cyclic: sum over links as with ")


def chosen(objectives, slowest=None):
    """The order of strategies with these objectives."""
    slowest = slowest or objectives
    return auto._ranked({n: {"objective": objectives[n], "slowest_link": slowest[n]} for n in objectives})


def test_another_strategy_must_be_better_than_the_default_by_more_than_the_model_is_exact_to():
    assert chosen({"row_wise": 1.0, "cyclic": 1.009})[0] == "cyclic"
    assert chosen({"row_wise": 1.0, "cyclic": 1.011})[0] == "row_wise"
    assert chosen({"row_wise": 1.0, "cyclic": 1.1, "table_wise": 1.001}) == ["row_wise", "table_wise", "cyclic"]


def test_the_slowest_link_decides_between_other_equal_sums():
    assert chosen({"row_wise": 1.0, "table_wise": 1.0}, {"row_wise": 3.0, "table_wise": 2.0})[0] == "table_wise"


def test_links_that_measure_a_little_apart_do_not_cost_the_default_its_place():
    topology = Topology("measured", 1, 2, np.array([[0.0, 1.0], [1.02, 0.0]]), np.zeros((2, 2)))
    plan = auto.search(PROFILE, topology, Request(batch_size=2048))
    assert plan.strategy == "cyclic"
    assert "is better, but within the error of the model (1%)" in plan.notes["auto"]


def test_one_rank_has_nothing_to_compare():
    assert auto.search(PROFILE, Topology.uniform(1), Request(batch_size=64)).strategy in QUICK
