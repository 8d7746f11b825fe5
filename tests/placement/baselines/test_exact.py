"""Integer programs against trying everything."""

import itertools
import re
import sys

import numpy as np
import pytest
from hypothesis import given, settings

from rowmesh.errors import ConfigurationError
from rowmesh.placement import TableShape
from rowmesh.placement.baselines import exact, exact_partitions
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import cyclic
from rowmesh.placement.strategies.level_search import LevelSearch
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from tests.placement.strategies.problems import power_law, small

NODES = Topology.grouped(2, 2, 4.21)


@settings(max_examples=40)
@given(small(objective="total"))
def test_optimal_levels_are_between_the_bound_and_the_default(case):
    problem = Problem(*case)
    search = LevelSearch.of(problem)
    budget = search.budget_bytes
    found, fast = exact.optimal(search.choices, search.steps, budget, 30.0), search.take(budget)

    def seconds(levels):
        rows = np.stack([search.demand.lengths - levels.copied, levels.copied - levels.hot, levels.hot])
        assert np.all(rows >= 0)
        assert (np.where(rows > 0, search.choices.extra_bytes, 0) * rows).sum() <= budget * (1 + 1e-9)
        return (np.where(rows > 0, search.choices.seconds, 0.0) * rows).sum()

    assert seconds(found) <= seconds(fast) * (1 + 1e-6) + 1e-9
    assert seconds(found) >= fast.bound_seconds * (1 - 1e-6) - 1e-9
    assert exact.gap(search.choices, found) <= 1e-6


def test_optimal_levels_by_trying_all():
    counts = np.array([30, 11, 7, 4, 2, 1])
    shapes = [TableShape("a", 6, 64, 64, 4), TableShape("b", 6, 16, 16, 4)]
    profile = Profile.from_counts({"a": counts, "b": counts[::-1] * 0 + counts}, shapes, 100)
    problem = Problem(profile, NODES, Request(batch_size=8, mode="infer", memory_limit_bytes=400))
    search = LevelSearch.of(problem)
    budget = 777
    best = min(
        sum(search.choices.seconds[level, k] for k, level in enumerate(levels))
        for levels in itertools.product(range(3), repeat=12)
        if sum(search.choices.extra_bytes[level, k] for k, level in enumerate(levels)) <= budget
    )
    found = exact.optimal(search.choices, search.steps, budget, 30.0)
    level = (found.copied > 0).astype(int) + (found.hot > 0)
    assert search.choices.seconds[level, np.arange(12)].sum() == pytest.approx(best)
    assert found.bound_seconds == pytest.approx(best)


@settings(max_examples=40)
@given(small(objective="total"))
def test_without_time_levels_are_the_defaults_with_their_gap(case):
    search = LevelSearch.of(Problem(*case))
    budget = search.budget_bytes
    found = exact.optimal(search.choices, search.steps, budget, time_limit_s=0.0)
    best = exact.optimal(search.choices, search.steps, budget, time_limit_s=30.0)
    gap = exact.gap(search.choices, found)
    assert exact.seconds_of(search.choices, best) >= exact.seconds_of(search.choices, found) * (1 - gap) * (1 - 1e-9)


@pytest.mark.parametrize("topology", [Topology.uniform(4), NODES], ids=lambda topology: topology.name)
def test_the_default_is_within_a_ten_thousandth_of_optimal(topology):
    profile = power_law((30_000, 2_000, 50))
    request = Request(batch_size=1024, mode="infer")
    problem = Problem(profile, topology, request)
    best = exact.search(profile, topology, request)
    assert best.notes["gap"] <= 1e-6
    default = cyclic.search(profile, topology, request)
    one_row = default.notes["multiplier_s_per_byte"] * topology.world_size * problem.shapes[0].row_bytes
    assert problem.objective(default) <= problem.objective(best) * (1 + 1e-4) + one_row
    assert problem.objective(best) >= best.notes["bound"] * (1 - 1e-6)


def place_all(P, M):
    """Every choice of holders for every partition."""
    holders = [h for n in range(1, M + 1) for h in itertools.combinations(range(M), n)]
    return itertools.product(holders, repeat=P)


@pytest.mark.parametrize("objective", ["total", "slowest_link"])
def test_partitions_are_placed_optimally(objective):
    counts = np.array([40, 20, 12, 8, 6, 4, 3, 2, 2, 1, 1, 1])
    profile = Profile.from_counts({"item": counts}, [TableShape("item", 12, 64, 64)], 100)
    topology = Topology.uniform(2)
    request = Request(batch_size=4, mode="infer", extra_memory=0.5, objective=objective)
    plan = exact_partitions.search(profile, topology, request, threshold=0.2)
    problem = Problem(profile, topology, request)
    parts = exact_partitions.Partitions.cut(profile, problem.demand, 0.2)
    best = np.inf
    for placed in place_all(len(parts), 2):
        stored = np.zeros(2)
        links = np.zeros((2, 2))
        for k, holders in enumerate(placed):
            stored[list(holders)] += parts.stored_bytes[k]
            for i in range(2):
                if i not in holders:
                    links[i, 1 - i] += parts.read_bytes[k]
        if stored.max() <= problem.limit_bytes:
            best = min(best, links.max() if objective == "slowest_link" else links.sum())
    assert plan.notes["paths"][objective] == pytest.approx(best, rel=2e-4)
    assert plan.notes["bound"] <= best * (1 + 1e-9)
    plan.check(problem.limit_bytes)


def test_partitions_know_fetches_alone():
    with pytest.raises(ConfigurationError, match="ask for mode 'infer'"):
        exact_partitions.search(power_law((50,)), NODES, Request(batch_size=8))


def test_partitions_that_do_not_fit_are_refused():
    profile, request = power_law((101,)), Request(batch_size=8, mode="infer", extra_memory=0.0)
    with pytest.raises(ConfigurationError, match=re.escape("found no placement of")):
        exact_partitions.search(profile, Topology.uniform(2), request, 0.3)


def test_a_missing_solver_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    counts = {"a": np.arange(30, 0, -1)}
    profile = Profile.from_counts(counts, [TableShape("a", 30, 64, 64, 4)], 100)
    request = Request(batch_size=8, mode="infer", memory_limit_bytes=1 << 20)
    with pytest.raises(ConfigurationError, match=r"'exact_partitions' .* with scipy.*pip install '\.\[exact\]'"):
        exact_partitions.search(profile, Topology.uniform(2), request, 0.3)
