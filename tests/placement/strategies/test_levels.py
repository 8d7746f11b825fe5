"""Levels are the optimum of the linear program, and cost what the cost model says."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from scipy.optimize import linprog

from rowmesh.placement import strategies
from rowmesh.placement.cost import ONE_HOP, SLOT_BYTES, TWO_HOP
from rowmesh.placement.request import Request
from rowmesh.placement.strategies.cyclic import fit
from rowmesh.placement.strategies.level_search import LevelSearch
from rowmesh.placement.strategies.levels import COLD, HOT, WARM, LinkCosts
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from tests.placement.strategies.problems import power_law, small


def linear_optimum(search, budget):
    """The same program, by a solver."""
    choices = search.choices
    seconds = choices.seconds.copy()
    usable = np.isfinite(seconds)
    variables = seconds.size
    rows = np.tile(np.eye(len(choices.lengths)), 3)
    result = linprog(
        np.where(usable, seconds, 0.0).ravel(),
        A_ub=choices.extra_bytes.ravel()[None],
        b_ub=[budget],
        A_eq=rows,
        b_eq=choices.lengths,
        bounds=np.stack([np.zeros(variables), np.where(usable, np.inf, 0.0).ravel()]).T,
    )
    assert result.success
    return result.fun


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(small(objective="total"))
def test_levels_are_the_linear_programs_optimum(case):
    problem = Problem(*case)
    search = LevelSearch.of(problem)
    levels = search.take(search.budget_bytes)
    assert levels.bound_seconds == pytest.approx(linear_optimum(search, search.budget_bytes), rel=1e-6, abs=1e-9)
    assert np.all(levels.hot <= levels.copied)
    assert np.all(levels.copied <= search.demand.lengths)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(small(objective="total"))
def test_a_plan_costs_what_its_levels_cost(case):
    """Cyclic owners load all links equally, as the rows' seconds suppose; uneven remainders differ by a little."""
    topology, problem = case[1], Problem(*case)
    search = LevelSearch.of(problem)
    levels, _, _ = fit(problem, search, search.take)
    rows = np.stack([search.demand.lengths - levels.copied, levels.copied - levels.hot, levels.hot])
    seconds = np.where(rows > 0, search.choices.seconds, 0.0)
    plan = strategies.search("cyclic", *case)
    border = topology.world_size * len(problem.shapes) * np.abs(np.nan_to_num(search.choices.seconds[COLD])).max()
    if problem.demand is search.demand:  # pooled demand is a mean
        assert problem.objective(plan) == pytest.approx((seconds * rows).sum(), rel=1e-6, abs=1.01 * border)


def test_fetches_follow_one_multiplier():
    """hot iff x > λ, warm iff λ / κ < x ≤ λ, with κ = G · c − G + 1."""
    topology = Topology.grouped(2, 4, 4.21)
    request = Request(batch_size=512, mode="infer", deduplicated=False, max_hops=1, extra_memory=0.05)
    search = LevelSearch.of(Problem(power_law(sizes=(50_000, 2_000)), topology, request))
    levels = search.take(search.budget_bytes)
    x = search.demand.rank
    kappa = 4 * 4.21 - 4 + 1
    # λ in reads a step: 6 of 8 ranks read a warm row from a mate, and a hot row has 6 copies more than a warm one.
    threshold = levels.multiplier * search.demand.row_bytes[0] / (search.demand.value_bytes[0] + SLOT_BYTES)
    hot, copied = levels.hot == search.demand.lengths, levels.copied == search.demand.lengths
    partial = (levels.hot > 0) & ~hot | (levels.copied > 0) & ~copied
    assert partial.sum() <= 1
    assert np.array_equal(hot[~partial], (x > threshold)[~partial])
    assert np.array_equal(copied[~partial], (x > threshold / kappa)[~partial])
    assert 0 < hot.sum() < copied.sum() < len(x)


def test_two_hops_pay_where_ranks_of_a_node_want_the_same_rows():
    topology = Topology.grouped(2, 4, 4.21)
    request = Request(batch_size=512)
    search = LevelSearch.of(Problem(power_law(), topology, request))
    overlap = search.demand.node / np.maximum(search.demand.rank, 1e-300)
    two = search.choices.kind[COLD] == TWO_HOP
    # The same requests, merged: c · G · u against (G − 1) · u + c · n for each other node.
    assert np.array_equal(two, (search.demand.rank > 0) & (3 + 4.21 * overlap < 4.21 * 4))
    assert 0 < two.sum() < len(two)
    one_hop = LevelSearch.of(Problem(power_law(), topology, Request(batch_size=512, max_hops=1)))
    assert np.all(one_hop.choices.kind[COLD] == ONE_HOP)


def test_warm_is_no_level_within_one_node_or_among_nodes_of_one_rank():
    for topology in (Topology.uniform(4), Topology.grouped(4, 1, 2.0)):
        search = LevelSearch.of(Problem(power_law(), topology, Request(batch_size=512, mode="infer")))
        assert np.all(np.isinf(search.choices.seconds[WARM]))
        assert np.array_equal(*(getattr(search.take(search.budget_bytes), name) for name in ("hot", "copied")))
        assert np.all(search.choices.seconds[HOT] == 0)


def test_link_costs_are_means():
    costs = LinkCosts.of(Topology.grouped(2, 2, 3.0))
    assert (costs.intra, costs.inter, costs.leader) == (1.0, 3.0, 3.0)
    assert LinkCosts.of(Topology.uniform(1)) == LinkCosts(0.0, 0.0, 0.0)
