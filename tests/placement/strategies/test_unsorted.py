"""Plans of counts in any order: they cost what those of the same counts in order do, and fit as those do."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import AddressMap, Plan, TableShape
from rowmesh.placement.comparison import compare
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.strategies import STRATEGIES, search
from rowmesh.placement.strategies.problem import Problem
from rowmesh.placement.strategies.unsorted import FEWEST_RANGES, most_ranges
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional import compare_replicas

TOPOLOGIES = [Topology.uniform(2), Topology.uniform(4), Topology.grouped(2, 2, 4.21), Topology.grouped(2, 4, 4.21)]
NUM_SAMPLES = 20_000


def power_law(sizes, exponent, seed=None):
    """The profile of tables read by a power law: in order, or shuffled by a seed."""
    shapes = [TableShape(f"t{index}", size, 64, 64, 4) for index, size in enumerate(sizes)]
    generator = np.random.default_rng(seed)
    counts = {}
    for shape in shapes:
        of_rows = (NUM_SAMPLES / 4 / np.arange(1, shape.num_rows + 1) ** exponent).astype(np.int64)
        counts[shape.name] = of_rows if seed is None else generator.permutation(of_rows)
    return Profile.from_counts(counts, shapes, NUM_SAMPLES)


def cost(strategy, profile, topology, request):
    """A plan and what a step costs under it."""
    plan = search(strategy, profile, topology, request)
    return plan, Problem(profile, topology, request).objective(plan)


@pytest.mark.parametrize("deduplicated", [True, False], ids=["deduplicated", "raw"])
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "exact_partitions"])  # for inference alone
@settings(max_examples=8)
@given(
    topology=st.sampled_from(TOPOLOGIES),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=3),
    exponent=st.floats(0.7, 1.6),
    extra=st.sampled_from([0.02, 0.05, 0.3]),
    seed=st.integers(0, 99),
)
def test_shuffled_counts_cost_what_sorted_ones_do(strategy, mode, deduplicated, topology, sizes, exponent, extra, seed):
    request = Request(batch_size=64, mode=mode, deduplicated=deduplicated, extra_memory=extra)
    try:
        best, expected = cost(strategy, power_law(sizes, exponent), topology, request)
    except ConfigurationError:  # partitions may be too coarse to fit, in any order
        return
    plan, found = cost(strategy, power_law(sizes, exponent, seed), topology, request)
    assert found <= 1.01 * expected
    assert max(plan.memory_bytes) <= max(best.memory_bytes)
    assert Plan.from_json(plan.to_json()) == plan


def check_training(sizes, exponent, topology, seed):
    request = Request(batch_size=64)
    _, expected = cost("cyclic", power_law(sizes, exponent), topology, request)
    _, found = cost("cyclic", power_law(sizes, exponent, seed), topology, request)
    assert found <= 1.02 * expected


TRAINED = {
    "exponent": st.floats(0.7, 1.6),
    "topology": st.sampled_from([*TOPOLOGIES, Topology.grouped(8, 4, 4.21)]),
    "seed": st.integers(0, 99),
}


@settings(max_examples=6)
@given(sizes=st.lists(st.integers(1, 30_000), min_size=1, max_size=3), **TRAINED)
def test_shuffled_tables_of_more_rows_than_ranges_cost_as_much_in_training(sizes, **case):
    check_training(sizes, **case)


@pytest.mark.slow
@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 2_000_000), min_size=1, max_size=3), **TRAINED)
def test_shuffled_tables_of_any_size_cost_as_much_in_training(sizes, **case):
    check_training(sizes, **case)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: topology.name)
def test_large_tables_keep_small_maps(topology):
    """A table that would take too many ranges copies its most read rows alone: its map is no array of all rows."""
    sizes, request = [120_000, 40], Request(batch_size=64, mode="infer", extra_memory=0.5)
    profile = power_law(sizes, 0.8, seed=1)
    plan = search("cyclic", profile, topology, request)
    assert all(len(table.ranges) <= most_ranges(rows) + 1 for table, rows in zip(plan.tables, sizes, strict=True))
    assert AddressMap(plan, ["t0", "t1"], 0).num_bytes < 4 * sum(sizes)
    assert Problem(profile, topology, request).fits(plan)
    read = np.repeat(profile.tables[0].accesses, profile.tables[0].lengths)
    copied = [row for part in plan.tables[0].ranges if part.rule != "cyclic" for row in range(part.start, part.stop)]
    assert np.sort(read[copied])[-500:].tolist() == np.sort(read)[-500:].tolist()


def test_a_row_of_rare_ids_at_the_end_changes_no_other_range():
    """As prepared data have it: the last row is among the most read."""
    shape, counts = TableShape("item", 5000, 64, 64, 4), np.sort(np.random.default_rng(0).zipf(1.3, 5000))[::-1].copy()
    request, topology = Request(batch_size=64, mode="infer"), Topology.grouped(2, 2, 4.21)
    in_order = Profile.from_counts({"item": counts}, [shape], int(counts.sum()))
    rare = Profile.from_counts({"item": np.append(counts[1:], counts[0])}, [shape], int(counts.sum()))
    plan, moved = (search("cyclic", profile, topology, request) for profile in (in_order, rare))
    assert len(moved.tables[0].ranges) <= len(plan.tables[0].ranges) + 3
    assert cost("cyclic", rare, topology, request)[1] == pytest.approx(cost("cyclic", in_order, topology, request)[1])


def test_counted_batches_go_with_their_rows():
    shape, generator = TableShape("item", 300, 64, 64, 4), np.random.default_rng(3)
    counts = np.sort(generator.integers(0, 100, 300))[::-1]
    batches, order = np.minimum(counts, generator.integers(1, 40, 300)), generator.permutation(300)
    topology, request = Topology.uniform(4), Request(batch_size=32, mode="infer", extra_memory=0.2)
    costs = []
    for rows in (np.arange(300), order):
        profile = Profile.from_counts(
            {"item": counts[rows]}, [shape], 1000, batches={"item": batches[rows]}, batch_size=10
        )
        (table,) = profile.tables
        profile = replace(profile, tables=(replace(table, drawn=table.accesses / 200),))
        costs.append(cost("cyclic", profile, topology, request)[1])
    assert costs[1] <= 1.01 * costs[0]


def test_small_tables_may_have_a_range_a_row():
    assert most_ranges(1) == most_ranges(FEWEST_RANGES) == FEWEST_RANGES


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_comparisons_and_replicas_are_made_of_such_plans(mode):
    request, topology = Request(batch_size=64, mode=mode), Topology.load("2x4")
    in_order, shuffled = (Problem(power_law([400, 90], 1.1, seed), topology, request) for seed in (None, 1))
    best, found = (compare(problem) for problem in (in_order, shuffled))
    assert found.plan.strategy == best.plan.strategy
    assert found.chosen.objective <= 1.01 * best.chosen.objective
    best, found = (compare_replicas(problem, "cyclic", Synchronization()) for problem in (in_order, shuffled))
    assert found.chosen.replicas == best.chosen.replicas
    for one, other in zip(found.candidates, best.candidates, strict=True):
        assert one.cost is not None
        assert other.cost is not None
        assert one.cost.total_s <= 1.05 * other.cost.total_s  # of the busiest rank, which depends on the placement
