"""What a step with replicas costs, against formulas and against drawn batches, counted message by message."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rowmesh.mesh.grid import Grid, valid_replicas
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, TableShape
from rowmesh.placement.cost import cost_of
from rowmesh.placement.plan import RowRange, TablePlan
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology
from rowmesh.placement.two_dimensional_cost import MeanSeconds, cost_with_replicas
from tests.placement.problems import problem

SHAPES = [TableShape("user", 60, 64, 64, 4), TableShape("item", 16, 32, 64, 8)]
NUM_SAMPLES = 1000


def small_profile():
    """Two tables that every sample reads one row of."""
    counts = {}
    for shape in SHAPES:
        weights = 1 / np.arange(1, shape.num_rows + 1)
        counts[shape.name] = np.floor(NUM_SAMPLES * weights / weights.sum())
        counts[shape.name][0] += NUM_SAMPLES - counts[shape.name].sum()
    return Profile.from_counts(counts, SHAPES, NUM_SAMPLES)


def costs(plan, sync, batch_size=6, topology=None, profile=None):
    topology = topology or Topology.uniform(plan.world_size)
    return cost_with_replicas(plan, profile or small_profile(), topology, Request(batch_size=batch_size), sync)


@pytest.mark.parametrize("together", ["shards", "replicas"])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 6, 12])
def test_replicas_take_the_paper_s_memory_more(replicas, together):
    shapes = [TableShape("a", 24, 64, 64, 4), TableShape("b", 120, 32, 32)]
    stored = sum(shape.num_rows * shape.row_bytes for shape in shapes)
    single = np.array(Plan.cyclic(shapes, 12).memory_bytes)
    memory = np.array(Plan.cyclic(shapes, 12, replicas=replicas, together=together).memory_bytes)
    assert np.array_equal(memory - single, np.full(12, stored * (replicas - 1) // 12))


def test_averages_mark_every_row_that_has_replicas():
    shapes = [TableShape("a", 24, 64, 64, 4), TableShape("b", 120, 32, 32)]
    plan = Plan.cyclic(shapes, 4, replicas={"a": 2, "b": 1})
    assert plan.mark_bytes == (12, 12, 12, 12)
    profile = Profile.from_counts({"a": np.ones(24), "b": np.ones(120)}, shapes, 100)
    averaged, exact = (costs(plan, Synchronization(mode), profile=profile) for mode in ("average", "exact"))
    assert (averaged.memory_bytes - exact.memory_bytes).tolist() == [12] * 4


@pytest.mark.parametrize("replicas", [2, 3, 4, 12])
def test_dense_averages_are_equation_1(replicas):
    T, shapes = 12, [TableShape("a", 24, 64, 64, 4)]
    profile = Profile.from_counts({"a": np.ones(24)}, shapes, 24)
    cost = costs(Plan.cyclic(shapes, T, replicas=replicas), Synchronization("average", dense=True), profile=profile)
    expected = 2 * 24 * 68 * (replicas - 1) / T
    assert cost.sync_bytes.sum(axis=0) == pytest.approx(np.full(T, expected))
    assert cost.sync_s == cost.dense_s == pytest.approx(expected)
    rarely = costs(
        Plan.cyclic(shapes, T, replicas=replicas), Synchronization("average", every=5, dense=True), profile=profile
    )
    assert rarely.sync_s == pytest.approx(expected / 5)


def draw_touched(profile, plan, grid, samples, rng):
    """Table → [M, num_rows], whether a group's ranks touch a row within so many samples a rank."""
    touched = {}
    for index, table in enumerate(plan.tables):
        chances = np.repeat(profile.access_rate(index), profile.tables[index].lengths)
        draws = rng.choice(table.shape.num_rows, (grid.replicas, samples * grid.shards), p=chances / chances.sum())
        rows = np.zeros((grid.replicas, table.shape.num_rows), bool)
        for group, ids in enumerate(draws):
            rows[group, ids] = True
        touched[table.name] = rows
    return touched


def counted_sync(plan, replicas, touched, row_bytes, directly):
    """[T, T]: every message of a synchronisation, one by one; rank i gets from rank j."""
    T, grid = plan.world_size, plan.grid(replicas)
    part, found = plan.part(replicas), np.zeros((T, T))
    for table in part.tables:
        rows = touched[table.name]
        for row in range(table.shape.num_rows):
            ranks_ = grid.replicate_groups[table.range_of(row).owner(row, part.world_size)]
            size, owner = row_bytes(table.shape), row // part.world_size % replicas
            for group, rank in enumerate(ranks_):
                for other in range(replicas):
                    if directly and other != group and rows[group, row]:
                        found[ranks_[other], rank] += size
                    if not directly and other != group and rows[group, row] and other == owner:
                        found[ranks_[other], rank] += size
                    if not directly and other != group and rows[:, row].any() and group == owner:
                        found[ranks_[other], rank] += size
    return found


@pytest.mark.parametrize(
    ("sync", "replicas", "together", "directly"),
    [
        (Synchronization(), 2, "shards", True),
        (Synchronization(), 4, "replicas", False),
        (Synchronization("average", every=1), 2, "replicas", True),
        (Synchronization("average", every=3), 4, "shards", False),
    ],
)
def test_synchronisation_is_that_of_drawn_batches(sync, replicas, together, directly):
    profile, T, trials = small_profile(), 8, 600
    plan = Plan.cyclic(SHAPES, T, replicas=replicas, together=together)
    rng, counted = np.random.default_rng(0), np.zeros((T, T))

    def row_bytes(shape):
        return 4 + (shape.gradient_bytes if sync.mode == "exact" else shape.row_bytes)

    for _ in range(trials):
        touched = draw_touched(profile, plan, plan.grid(replicas), 6 * sync.every, rng)
        counted += counted_sync(plan, replicas, touched, row_bytes, directly) / (trials * sync.every)
    cost = costs(plan, sync)
    assert np.array_equal(cost.sync_bytes > 0, counted > 0)
    assert cost.sync_bytes.sum() == pytest.approx(counted.sum(), rel=0.02)
    for ranks_ in plan.grid(replicas).replicate_groups:
        assert cost.sync_bytes[:, ranks_].sum() == pytest.approx(counted[:, ranks_].sum(), rel=0.03)
    if directly:  # else it depends on which rows a replicate group's ranks are owners of, which here are few
        assert cost.sync_bytes.sum(axis=0) == pytest.approx(counted.sum(axis=0), rel=0.05)
    assert cost.sync_s == pytest.approx(cost.sync_bytes.sum(axis=0).max())


def test_lookups_are_those_of_drawn_batches():
    profile, plan, rng = small_profile(), Plan.cyclic(SHAPES, 8, replicas=2), np.random.default_rng(1)
    grid, trials, counted = plan.grid(2), 300, np.zeros(8)
    for _ in range(trials):
        for rank in range(8):
            for index, table in enumerate(plan.part(2).tables):
                chances = np.repeat(profile.access_rate(index), profile.tables[index].lengths)
                for row in set(rng.choice(table.shape.num_rows, 6, p=chances / chances.sum()).tolist()):
                    owner = table.range_of(row).owner(row, grid.shards)
                    counted[grid.groups[grid.place(rank)[0]][owner]] += 1 / trials
    cost = costs(plan, Synchronization())
    assert cost.lookups == pytest.approx(counted, rel=0.05)
    assert cost.imbalance == pytest.approx(cost.lookups.max() / cost.lookups.mean())


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_exchanges_stay_within_groups_and_synchronisation_within_replicate_groups(data):
    H, G = data.draw(st.sampled_from([(1, 4), (2, 2), (2, 3), (3, 4), (4, 2)]))
    replicas = data.draw(st.sampled_from(valid_replicas(H * G)))
    together = data.draw(st.sampled_from(["shards", "replicas"]))
    sync = data.draw(
        st.sampled_from([Synchronization(), Synchronization("average"), Synchronization("average", dense=True)])
    )
    plan = Plan.cyclic(SHAPES, H * G, G, replicas=replicas, together=together)
    cost = costs(plan, sync, topology=Topology.grouped(H, G, 4.0))
    within = cost_of(plan.part(replicas), small_profile(), Request(batch_size=6))
    for group in plan.grid(replicas).groups:
        assert cost.exchange_bytes[np.ix_(group, group)] == pytest.approx(within.link_bytes)
    assert cost.exchange_bytes.sum() == pytest.approx(within.total_bytes * replicas)
    within = np.zeros_like(cost.sync_bytes, bool)
    for ranks_ in plan.grid(replicas).replicate_groups:
        within[np.ix_(ranks_, ranks_)] = True
    assert not cost.sync_bytes[~within].any()
    assert not np.diag(cost.sync_bytes).any()
    assert (cost.sync_bytes.sum() > 0) == (replicas > 1)
    assert cost.total_s == cost.exchange_s + cost.sync_s


def test_without_replicas_a_step_is_what_it_is_without_groups():
    asked = problem(Topology.load("2x4"))
    plan = Plan.cyclic(asked.shapes, 8, 4)
    cost = cost_with_replicas(plan, asked.profile, asked.topology, asked.request, Synchronization())
    assert cost.total_s == pytest.approx(asked.cost(plan).step_seconds(asked.topology))
    assert cost.sync_s == cost.dense_s == 0
    assert cost.lookups == pytest.approx(asked.cost(plan).lookups)


def test_tables_that_differ_add_up():
    hot = Plan.cyclic(SHAPES[:1], 8, replicas=4)
    cold = Plan.cyclic(SHAPES[1:], 8)
    both = Plan.cyclic(SHAPES, 8, replicas={"user": 4, "item": 1})
    both = Plan((hot.tables[0], cold.tables[0]), 8, both.ranks_per_node)
    parts = [costs(plan, Synchronization()) for plan in (hot, cold)]
    cost = costs(both, Synchronization())
    for name in ("memory_bytes", "lookups", "exchange_bytes", "sync_bytes"):
        assert getattr(cost, name) == pytest.approx(sum(getattr(part, name) for part in parts)), name


@pytest.mark.parametrize("mode, every, dense", [("exact", 1, False), ("average", 3, False), ("average", 1, True)])
@pytest.mark.parametrize("together", ["shards", "replicas"])
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_the_mean_rank_s_seconds_need_no_matrices(replicas, together, mode, every, dense):
    topology, request, sync = Topology.load("2x4"), Request(batch_size=6), Synchronization(mode, every, dense)
    plan = Plan.cyclic(SHAPES[:1], 8, 4, replicas=replicas, together=together)
    cost = costs(plan, sync, topology=topology)
    looked_up = cost.lookups * SHAPES[0].value_bytes @ topology.cost.diagonal()
    expected = ((cost.exchange_bytes + cost.sync_bytes) * topology.cost).sum() + looked_up
    found = MeanSeconds(topology, Grid(8, replicas, together), request, sync)(plan, small_profile())
    assert found == pytest.approx(expected / 8, rel=1e-12)


@pytest.mark.parametrize(("mode", "row_bytes"), [("exact", 4 + 64), ("average", 4 + 68)])
def test_copies_within_a_group_are_synchronised_on_every_holder(mode, row_bytes):
    ranges = (
        RowRange(0, 4, "replicated"),
        RowRange(4, 12, "node"),
        RowRange(12, 30),
        RowRange(30, 60, "fixed", rank=3),
    )
    plan = Plan((TablePlan(SHAPES[0], ranges, 2),), 8, 4, together="replicas")
    part, profile = plan.part(2), small_profile()
    assert (part.world_size, part.ranks_per_node) == (4, 2)
    touched = np.repeat(profile.presence(0, 6 * 4), profile.tables[0].lengths)
    expected = np.zeros(4)
    for row in range(60):
        for shard in part.tables[0].range_of(row).holders(row, 4, 2):
            expected[shard] += touched[row] * row_bytes
    cost = costs(plan, Synchronization(mode))
    assert cost.sync_bytes.sum(axis=0) == pytest.approx(np.repeat(expected, 2))


def test_averaging_seldom_moves_less_and_inference_nothing():
    plan = Plan.cyclic(SHAPES, 8, replicas=4)
    moved = [costs(plan, Synchronization("average", every=k)).sync_bytes.sum() for k in (1, 2, 8)]
    assert moved[0] > moved[1] > moved[2] > moved[0] / 8
    asked = Request(batch_size=6, mode="infer")
    served = cost_with_replicas(plan, small_profile(), Topology.uniform(8), asked, Synchronization())
    assert served.sync_bytes.sum() == served.sync_s == 0
    assert served.exchange_s > 0


@pytest.mark.parametrize(("H", "G", "replicas"), [(2, 4, 2), (2, 4, 4), (4, 4, 4)])
def test_what_is_next_to_each_other_stays_on_a_host(H, G, replicas):
    topology = Topology.grouped(H, G, 8.0)
    across = ~topology.same_node
    side_by_side = {
        together: costs(
            Plan.cyclic(SHAPES, H * G, G, replicas=replicas, together=together), Synchronization(), 6, topology
        )
        for together in ("shards", "replicas")
    }
    assert not side_by_side["replicas"].sync_bytes[across].any()
    assert side_by_side["shards"].sync_bytes[across].any()
    if Grid(H * G, replicas).shards <= G:
        assert not side_by_side["shards"].exchange_bytes[across].any()
