"""Replica groups: exact synchronization trains the model of one group, averaging that of Algorithm 1."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, SparseBatch
from rowmesh.checkpoint import load, save
from rowmesh.collection.state_form import in_form
from rowmesh.errors import ConfigurationError, PeerError
from rowmesh.mesh.grid import Grid, valid_replicas
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, TableShape
from rowmesh.tables import Constant, TableSpec
from rowmesh.tables.update_rules import RowWiseAdaGrad
from tests.collection.test_equivalence import assert_close
from tests.support.algorithm_1 import train_algorithm_1
from tests.support.jobs import random_jobs
from tests.support.plans import RULES, make_plan
from tests.support.scenario import Scenario
from tests.support.tables import several, table
from tests.support.training import merged, train
from tests.test_plans import assert_equal

TRANSPORTS = ["one_sided", "collective"]


def in_groups(scenario, replicas, together="shards"):
    """The same job with replicas of every table, or of each by name."""
    shapes = [TableShape.of(spec) for spec in scenario.tables]
    per_node = scenario.ranks_per_node or scenario.world_size
    plan = Plan.cyclic(shapes, scenario.world_size, per_node, replicas=replicas, together=together)
    return replace(scenario, plan=plan)


def on_ranks(ranks, scenario, transport="collective"):
    """What each rank left, and the whole; all replicas are equal to the bit."""
    parts = ranks.run(train, scenario, transport, world_size=scenario.world_size)
    whole = merged(scenario, parts)
    assert_equal(scenario, parts, whole)
    return parts, whole


@st.composite
def jobs(draw):
    world_size = draw(st.sampled_from([2, 3, 4, 4, 4]))
    scenario = draw(random_jobs(world_size))
    replicas = {spec.name: draw(st.sampled_from(valid_replicas(world_size))) for spec in scenario.tables}
    return in_groups(scenario, replicas, draw(st.sampled_from(["shards", "replicas"])))


@settings(max_examples=6)
@given(scenario=jobs(), transport=st.sampled_from(TRANSPORTS))
def test_exact_equals_one_group(ranks, scenario, transport):
    check_exact(ranks, scenario, transport)


@pytest.mark.slow
@settings(max_examples=100)
@given(scenario=jobs(), transport=st.sampled_from(TRANSPORTS))
def test_many_exact_jobs_equal_one_group(ranks, scenario, transport):
    check_exact(ranks, scenario, transport)


def check_exact(ranks, scenario, transport):
    _, whole = on_ranks(ranks, scenario, transport)
    plain = replace(scenario, plan=None)
    assert_close(scenario, whole, merged(plain, ranks.run(train, plain, "collective", world_size=scenario.world_size)))


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "row_wise_adagrad", "adam"])
def test_transports_of_groups_are_equal_to_the_bit(ranks, replicas, rule):
    scenario = in_groups(Scenario(tables=several(rule), batch_sizes=(5, 3, 4, 0), num_steps=4), replicas)
    _, one_sided = on_ranks(ranks, scenario, "one_sided")
    parts, _ = on_ranks(ranks, scenario, "collective")
    assert_equal(scenario, parts, one_sided)


@pytest.mark.parametrize("rule, replicas", [("row_wise_adagrad", 2), ("adam", 2), ("adam", 4)])
def test_groups_that_are_the_nodes_change_no_bit(ranks, rule, replicas):
    """One group adds up node by node, which is then group by group; of more than two groups the order matters."""
    plain = Scenario(tables=several(rule), batch_sizes=(5, 3, 4, 2), num_steps=4, ranks_per_node=4 // replicas)
    _, whole = on_ranks(ranks, plain)
    parts, _ = on_ranks(ranks, in_groups(plain, replicas))
    assert_equal(plain, parts, whole)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("mode", ["exact", "average"])
def test_copies_within_groups_stay_equal(ranks, rule, transport, mode):
    tables = several("adam")
    of_group = make_plan(tables, 2, 2, lambda number: (rule if number % 2 else "cyclic", number, number, True))
    plan = Plan(tuple(replace(t, replicas=2) for t in of_group.tables), 4, 4)
    scenario = Scenario(
        tables=tables, batch_sizes=(5, 3, 4, 4), num_steps=4, plan=plan, synchronization=Synchronization(mode)
    )
    _, whole = on_ranks(ranks, scenario, transport)
    assert_equal(scenario, cyclic_in_groups(ranks, replace(scenario, plan=None), transport), whole)


@cache  # that of every rule
def cyclic_in_groups(ranks, scenario, transport):
    return on_ranks(ranks, in_groups(scenario, 2), transport)[0]


AVERAGES = {
    "scenario": jobs(),
    "transport": st.sampled_from(TRANSPORTS),
    "every": st.integers(1, 3),
    "size": st.integers(1, 5),
}


@settings(max_examples=10)
@given(**AVERAGES)
def test_average_is_algorithm_1(ranks, scenario, transport, every, size):
    check_average(ranks, scenario, transport, every, size)


@pytest.mark.slow
@settings(max_examples=100)
@given(**AVERAGES)
def test_many_averages_are_algorithm_1(ranks, scenario, transport, every, size):
    check_average(ranks, scenario, transport, every, size)


def check_average(ranks, scenario, transport, every, size):
    """Groups of equally many samples: the mean over ranks is then the mean over samples."""
    scenario = replace(
        scenario,
        batch_sizes=(size,) * scenario.world_size,
        synchronization=Synchronization("average", every=every),
    )
    _, whole = on_ranks(ranks, scenario, transport)
    assert scenario.plan is not None
    expected = train_algorithm_1(scenario, scenario.plan.replicas, every, scenario.plan.together)
    assert_close(scenario, whole, expected)


@pytest.mark.parametrize("scale", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("rule", [RowWiseAdaGrad(lr=0.1, eps=0.01, moment_scale=1.0)], ids=["row_wise_adagrad"])
def test_average_with_a_chosen_scale(ranks, rule, scale):
    tables = (table("user", 30), table("item", 9, 16))
    tables = tuple(replace(spec, optimizer=replace(rule, moment_scale=scale)) for spec in tables)
    scenario = in_groups(Scenario(tables=tables, batch_sizes=(4, 4), num_steps=8), 2)
    scenario = replace(scenario, synchronization=Synchronization("average", every=2))
    _, whole = on_ranks(ranks, scenario)
    assert_close(scenario, whole, train_algorithm_1(scenario, 2, 2))


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "row_wise_adagrad", "adam"])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float64, torch.bfloat16))],
)
def test_touched_rows_are_all_that_differ(ranks, replicas, rule, dtype):
    """Averaging them equals averaging whole tables, to the bit."""
    scenario = in_groups(Scenario(tables=several(rule, dtype), batch_sizes=(3, 3, 3, 3), num_steps=5), replicas)
    touched = replace(scenario, synchronization=Synchronization("average", every=2))
    dense = replace(scenario, synchronization=Synchronization("average", every=2, dense=True))
    _, expected = on_ranks(ranks, dense, "one_sided")
    parts, _ = on_ranks(ranks, touched, "one_sided")
    assert_equal(scenario, parts, expected)
    found = [[c.synchronization for c in part.counters.values()] for part in parts]
    assert all(counters.rows for part in found for counters in part)


def test_replicas_share_what_is_saved(ranks):
    scenario = in_groups(Scenario(tables=several("adam"), batch_sizes=(3, 3, 3, 3)), 2)
    parts, _ = on_ranks(ranks, scenario, "one_sided")
    assert all(0 < len(part.owned["item"]) <= 51 for part in parts)


@pytest.mark.parametrize("rule", ["cyclic", "node", "replicated"])
@pytest.mark.parametrize("together", ["shards", "replicas"])
def test_two_hops_within_groups(ranks, rule, together):
    """Groups of two hosts each: node leaders and owners are ranks of the group, whatever their numbers in the whole."""
    tables = several("row_wise_adagrad")
    of_group = make_plan(tables, 2, 1, lambda number: (rule, number, number, True))
    plan = Plan(tuple(replace(t, replicas=2) for t in of_group.tables), 4, 1, together=together)
    scenario = Scenario(tables=tables, batch_sizes=(5, 3, 4, 2), plan=plan, ranks_per_node=1)
    _, whole = on_ranks(ranks, scenario)
    cyclic, _ = on_ranks(ranks, in_groups(scenario, 2, together))
    assert_equal(scenario, cyclic, whole)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("mode", ["exact", "average"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_migrations_of_replicas(ranks, replicas, mode, transport):
    scenario = in_groups(Scenario(tables=several("adam"), batch_sizes=(3, 2, 4, 3), num_steps=5), replicas)
    size = 4 // replicas
    of_group = make_plan(scenario.tables, size, size, lambda number: (RULES[number % 4], number, number, False))
    plan = Plan(tuple(replace(t, replicas=replicas) for t in of_group.tables), 4, 4)
    scenario = replace(scenario, synchronization=Synchronization(mode))  # averages of every step are due anyway
    _, stayed = on_ranks(ranks, scenario, transport)
    moved, _ = on_ranks(ranks, replace(scenario, migrations=((2, plan), (4, scenario.plan))), transport)
    assert_equal(scenario, moved, stayed)


AVERAGED = [
    TableSpec(name="item", num_rows=8, dim=3, optimizer=RowWiseAdaGrad(lr=0.5), initializer=Constant(value=0.0))
]


def averaged(mesh, every):
    synchronization = Synchronization("average", every=every)
    collection = EmbeddingCollection(AVERAGED, mesh=mesh, replicas=2, synchronization=synchronization)
    return collection, EmbeddingOptimizer(collection)


def step(collection, optimizer, *rows):
    batch = SparseBatch.from_bags({"item": [[row] for row in rows]})
    (collection(batch).values + 1.0).square().sum().backward()
    optimizer.step()


def rows_of(collection):
    return torch.cat([piece.values.clone() for piece in collection.held_rows("item")])


def load_between_averages(mesh, folder):
    collection, optimizer = averaged(mesh, 4)
    for number in range(4):
        step(collection, optimizer, number)
    save(folder, collection, {}, peers=mesh.peers)
    saved = rows_of(collection)
    step(collection, optimizer, 5 + mesh.rank)
    load(folder, collection)
    collection.barrier()
    collection.synchronize()
    return saved, rows_of(collection)


def test_a_load_between_two_averages_is_what_replicas_have(ranks, tmp_path):
    for saved, loaded in ranks.run(load_between_averages, tmp_path, world_size=2):
        assert torch.equal(saved, loaded)


def resume(mesh, folder):
    """The same steps straight on, and from what was saved after the third."""
    straight, optimizer = averaged(mesh, 2)
    for number in range(3):
        step(straight, optimizer, number, 2 * mesh.rank)
    save(folder, straight, {}, peers=mesh.peers)
    resumed, other = averaged(mesh, 2)
    load(folder, resumed)
    resumed.barrier()
    with in_form("elsewhere"):  # their rows are in the checkpoint
        other.load_state_dict(optimizer.state_dict())
    for collection, each in ((straight, optimizer), (resumed, other)):
        for number in range(3):
            step(collection, each, number, 3 * mesh.rank)
        collection.synchronize()
    return rows_of(straight), rows_of(resumed)


def test_averages_are_due_at_the_same_steps_after_a_load(ranks, tmp_path):
    for straight, resumed in ranks.run(resume, tmp_path, world_size=2):
        assert torch.equal(straight, resumed)


def read_at_once(mesh, replicas):
    """What this rank holds straight after a step."""
    collection = EmbeddingCollection(AVERAGED, mesh=mesh, replicas=replicas)
    step(collection, EmbeddingOptimizer(collection), mesh.rank, 7)
    held = {
        row: value
        for piece in collection.held_rows("item")
        for row, value in zip(piece.rows, piece.values.clone(), strict=True)
    }
    collection.barrier()
    return held


@pytest.mark.parametrize("replicas", [2, 4])
def test_rows_read_straight_after_a_step_are_up_to_date(ranks, replicas):
    expected = {row: value for held in ranks.run(read_at_once, 1, world_size=4) for row, value in held.items()}
    for held in ranks.run(read_at_once, replicas, world_size=4):
        for row, value in held.items():
            torch.testing.assert_close(value, expected[row])


def views_after_a_barrier(mesh, replicas):
    """What views that were given before a step show after it, and what they ought to."""
    collection = EmbeddingCollection(AVERAGED, mesh=mesh, replicas=replicas)
    (given,) = (piece.values for piece in collection.held_rows("item"))
    step(collection, EmbeddingOptimizer(collection), *range(8))
    collection.barrier()
    seen = given.clone()
    return seen, rows_of(collection)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_barrier_brings_rows_up_to_date(ranks, replicas):
    for seen, expected in ranks.run(views_after_a_barrier, replicas, world_size=4):
        assert torch.equal(seen, expected)
        assert bool((seen != 0).all())


def out_of_step(mesh):
    collection, optimizer = averaged(mesh, 1)
    step(collection, optimizer, 1)
    with pytest.raises(PeerError, match="out of step: rank 0 is in step 2, rank 1 is in synchronize 1"):
        step(collection, optimizer, 1) if mesh.rank == 0 else collection.synchronize()


def test_replicas_that_are_out_of_step_are_named(ranks):
    ranks.run(out_of_step, world_size=2)


def spread(mesh):
    mesh = replace(mesh, hosts=(0, 0, 0, 1))
    with pytest.raises(ConfigurationError, match=r"ranks \[2, 3\] hold a replica and are on several hosts"):
        EmbeddingCollection(AVERAGED, mesh=mesh, replicas=2, transport="one_sided")
    return EmbeddingCollection(AVERAGED, mesh=mesh, replicas=2).transport


def test_groups_choose_one_transport(ranks):
    assert ranks.run(spread, world_size=4) == ["collective"] * 4


def places(mesh):
    found = {}
    for together in ("shards", "replicas"):
        with torch.device("meta"):
            seen = mesh.device_mesh(Grid(4, 2, together))
        total = torch.tensor([float(mesh.rank)])
        dist.all_reduce(total, group=seen.get_group("replica"))
        found[together] = (seen.get_local_rank("replica"), seen.get_local_rank("shard"), float(total))
    return found


def test_torch_sees_the_same_grid(ranks):
    found = ranks.run(places, world_size=4)
    for together in ("shards", "replicas"):
        grid = Grid(4, 2, together)
        totals = {rank: sum(ranks_) for ranks_ in grid.replicate_groups for rank in ranks_}
        assert [place[together] for place in found] == [(*grid.place(rank), totals[rank]) for rank in range(4)]


def disagree(mesh):
    with pytest.raises(ConfigurationError, match=r"ranks disagree .* rank 0 has replicas .*2.*, rank 1 has .*4"):
        EmbeddingCollection(several("sgd"), mesh=mesh, replicas=2 if mesh.rank == 0 else 4)


def test_ranks_that_disagree_about_replicas(ranks):
    ranks.run(disagree, world_size=4)


def test_bad_settings_are_named():
    with pytest.raises(ConfigurationError, match="1 ranks cannot form 2 replica groups"):
        EmbeddingCollection(several("sgd"), replicas=2)
    with pytest.raises(ConfigurationError, match="no table 'usr'; did you mean 'user'"):
        EmbeddingCollection([table("user", 3)], replicas={"usr": 1})
    with pytest.raises(ConfigurationError, match="do not say how many table 'user' has"):
        EmbeddingCollection([table("user", 3)], replicas={})
    plan = Plan.cyclic([TableShape.of(spec) for spec in several("sgd")], 1)
    with pytest.raises(ConfigurationError, match="replicas or a plan"):
        EmbeddingCollection(several("sgd"), replicas=2, plan=plan)
    scaled = replace(table("user", 30), optimizer=RowWiseAdaGrad(moment_scale=2.0))
    with pytest.raises(ConfigurationError, match=r"'user': moment_scale must be .* at most 1, as its replicas are not"):
        EmbeddingCollection([scaled])
