"""What holds for every strategy."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import BASELINES, QUICK, STRATEGIES, find, search
from rowmesh.placement.strategies.auto import NOISE
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.topology import Topology
from tests.placement.strategies.problems import power_law, small

WITHIN_LIMITS = ("cyclic", "partitioned", "exact", "auto")
MODERATE = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])


def partitions_fit(case):
    """Partitions are coarse; all other strategies fit wherever anything does."""
    try:
        return bool(search("partitioned", *case))
    except ConfigurationError as error:
        return "more than the limit" not in str(error)


@MODERATE
@given(small(), st.sampled_from([name for name in STRATEGIES if name != "exact_partitions"]))
def test_plans_are_whole_within_their_limits_and_can_be_saved(case, name):
    problem = Problem(*case)
    if name == "partitioned" and not partitions_fit(case):
        return
    plan = search(name, *case)
    assert plan.strategy == name or name == "auto"
    assert Plan.from_json(plan.to_json()) == plan
    for table, shape in zip(plan.tables, problem.shapes, strict=True):
        assert table.shape == shape
        assert sum(len(part) for part in table.ranges) == shape.num_rows
    if name in WITHIN_LIMITS:
        plan.check(problem.limit_bytes)


@MODERATE
@given(small())
def test_auto_is_never_above_any_plan_that_fits_by_more_than_the_model_is_exact_to(case):
    problem = Problem(*case)
    best = problem.objective(search("auto", *case))
    for name in QUICK:
        try:
            plan = search(name, *case)
        except ConfigurationError:
            continue
        if problem.fits(plan):
            assert best <= problem.objective(plan) * (1 + NOISE) * (1 + 1e-8) + 1e-12, name


@pytest.mark.parametrize("name", QUICK)
def test_tables_that_must_send_sums_are_whole_in_every_plan(name):
    shapes = [TableShape(name, 40, 64, 64, send="sums" if name < "c" else "rows") for name in "abcd"]
    profile = Profile.from_counts({shape.name: np.arange(80, 40, -1) for shape in shapes}, shapes, num_samples=2000)
    plan = search(name, profile, Topology.uniform(2), Request(batch_size=4))
    assert [table.send for table in plan.tables] == ["sums", "sums", "rows", "rows"]
    assert sorted(table.ranges[0].rank for table in plan.tables[:2]) == [0, 1]


@pytest.mark.parametrize("deduplicated", [True, False])
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("topology", [Topology.uniform(8), Topology.grouped(2, 4, 4.21)], ids=lambda t: t.name)
def test_the_default_is_below_everything_on_power_laws(topology, mode, deduplicated):
    profile = power_law()
    request = Request(batch_size=2048, mode=mode, deduplicated=deduplicated)
    problem = Problem(profile, topology, request)
    best = problem.objective(search("cyclic", profile, topology, request))
    for name in (*BASELINES, "partitioned"):
        assert best <= problem.objective(search(name, profile, topology, request)) * (1 + 1e-9), name


@pytest.mark.parametrize("deduplicated", [True, False])
@pytest.mark.parametrize("world_size", [2, 8])
@given(
    sizes=st.lists(st.sampled_from([5, 300, 4_000, 20_000]), min_size=1, max_size=3),
    exponent=st.floats(0.8, 1.5),
    extra=st.sampled_from([0.02, 0.05, 0.2]),
    seed=st.integers(0, 9),
)
@settings(max_examples=6)
def test_the_default_is_never_above_the_papers_paths(world_size, deduplicated, sizes, exponent, extra, seed):
    """By the paper's equation (3), paths that no plan can run included."""
    profile, topology = power_law(sizes, exponent, samples=100_000, seed=seed), Topology.uniform(world_size)
    request = Request(batch_size=512, mode="infer", deduplicated=deduplicated, extra_memory=extra)
    try:
        paths = search("partitioned", profile, topology, request).notes["paths"]
    except ConfigurationError:
        return
    problem = Problem(profile, topology, request)
    plan = search("cyclic", profile, topology, request)
    moved = problem.cost(plan).lookup_bytes * topology.cost
    # Cyclic ranges leave up to a row a table and rank unused, each worth the multiplier.
    unused = plan.notes["multiplier_s_per_byte"] * problem.demand.row_bytes.max() * world_size * (len(sizes) + 1)
    assert moved.sum() <= paths["total"] * (1 + 1e-9) + unused


def test_an_infeasible_request_says_what_would_fit():
    shapes = [TableShape("user", 1000, 64, 64, 4), TableShape("item", 5000, 64, 64, 4)]
    profile = Profile.from_counts({s.name: np.zeros(s.num_rows, int) for s in shapes}, shapes, 10)
    topology, request = Topology.uniform(4), Request(batch_size=8, memory_limit_bytes=60_000)
    for name in WITHIN_LIMITS:
        with pytest.raises(ConfigurationError) as error:
            search(name, profile, topology, request)
        message = str(error.value)
        assert "needs 102,000 bytes a rank, 42,000 more than the limit of 60,000" in message
        assert "biggest table is 'item' with 85,000" in message
        assert "use 7 ranks" in message
        assert "bfloat16 (54,000 bytes a rank, fits)" in message
        assert "cut table 'item' by 2,472 of its 5,000 rows" in message
        assert "allow 102,000 bytes a rank" in message


def test_what_is_said_to_fit_does_fit():
    shapes = [TableShape("user", 1000, 64, 64, 4), TableShape("item", 5000, 64, 64, 4)]
    request = Request(batch_size=8, memory_limit_bytes=60_000)
    for changed, world_size in (
        (shapes, 7),
        ([TableShape(s.name, s.num_rows, 32, 64, 4) for s in shapes], 4),
        ([shapes[0], TableShape("item", 5000 - 2472, 64, 64, 4)], 4),
    ):
        profile = Profile.from_counts({s.name: np.zeros(s.num_rows, int) for s in changed}, changed, 10)
        search("cyclic", profile, Topology.uniform(world_size), request).check(60_000)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ConfigurationError, match="no placement strategy 'best'; there are auto, cyclic"):
        find("best")
