"""Replicas of tables on devices: the model that the CPU trains, all replicas equal to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rowmesh.checkpoint import load, save
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.collection.state_form import in_form
from rowmesh.exchange import replica_rows
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.sparse import SparseBatch
from rowmesh.tables import Constant, TableSpec, Uniform
from rowmesh.tables.update_rules import SGD, RowWiseAdaGrad
from tests.collection.test_equivalence import assert_close, assert_same_bits
from tests.support.devices import train_again, train_on_device
from tests.support.plans import in_groups, with_copies
from tests.support.scenario import Scenario
from tests.support.tables import table
from tests.support.training import train
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
kernels_of("average")  # or all are skipped

TABLES = (table("tag", 7, 3, "adam"), table("item", 20, 5, "adagrad", pooling="mean"))
DOUBLE = (table("a", 9, 4, "row_wise_adagrad", dtype=torch.float64), table("b", 5, 4, "adam", dtype=torch.float64))
SMALL = (table("a", 9, 4, "adam"),)
PAIR = Scenario(tables=TABLES, batch_sizes=(3, 2), num_steps=2)
FOUR = Scenario(tables=SMALL, batch_sizes=(2, 3, 0, 2), num_steps=2)


def averaged(scenario, every):
    return replace(scenario, synchronization=Synchronization("average", every=every))


def copied(scenario, mode):
    """Two replicas, in each of which all ranks have some of the rows."""
    plan = Plan(tuple(replace(of, replicas=2) for of in with_copies(scenario.tables, 2).tables), 4, 4)
    return replace(scenario, plan=plan, synchronization=Synchronization(mode))


SCENARIOS = {
    "exact, accumulation": replace(in_groups(PAIR, 2), accumulate=2),
    "exact, copies within groups": copied(FOUR, "exact"),
    "average, now and then": averaged(in_groups(replace(PAIR, num_steps=3), 2), 2),
    "average, tables differ": averaged(
        in_groups(replace(PAIR, tables=DOUBLE, batch_sizes=(1, 2), evaluates=True), {"a": 2, "b": 1}), 1
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_trains_the_same_model(ranks, name):
    check(ranks, SCENARIOS[name])


def check(ranks, scenario):
    parts = train_on_device(ranks, scenario)
    theirs = ranks.run(train, scenario, "collective", world_size=scenario.world_size)
    for mine, expected in zip(parts, theirs, strict=True):
        assert_close(scenario, mine, expected)
        assert mine.owned == expected.owned
        synchronized = [counters.synchronization.rows for counters in mine.counters.values()]
        assert synchronized == [counters.synchronization.rows for counters in expected.counters.values()]


@pytest.mark.slow
@pytest.mark.parametrize("together", ["shards", "replicas"])
def test_copies_within_averaged_groups(ranks, together):
    scenario = copied(FOUR, "average")
    assert scenario.plan is not None
    check(ranks, replace(scenario, plan=replace(scenario.plan, together=together)))


TWICE = {
    "exact, accumulation": copied(replace(FOUR, accumulate=2, evaluates=True), "exact"),
    "average, evaluations": copied(replace(FOUR, evaluates=True), "average"),
    "average, now and then": averaged(in_groups(replace(FOUR, num_steps=3), 2), 2),
    "average, tables differ": averaged(in_groups(replace(FOUR, tables=DOUBLE), {"a": 2, "b": 1}), 1),
    "whole tables": replace(in_groups(FOUR, 2), synchronization=Synchronization("average", dense=True)),
}


SLOW = ("average, now and then", "average, tables differ", "whole tables", "exact, accumulation")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in TWICE])
def test_trains_the_same_bits_again(ranks, name):
    for mine, again in zip(train_on_device(ranks, TWICE[name]), train_again(ranks, TWICE[name]), strict=True):
        assert_same_bits(mine, again)
        synchronized, synchronized_again = (list(part.counters.values()) for part in (mine, again))
        assert [counters.synchronization for counters in synchronized] == [
            counters.synchronization for counters in synchronized_again
        ]


@pytest.mark.slow
def test_replicas_of_a_shard_next_to_each_other(ranks):
    scenario = in_groups(replace(FOUR, is_weighted=True), 2, "replicas")
    parts = train_on_device(ranks, scenario)
    for mine, expected in zip(parts, ranks.run(train, scenario, "collective", world_size=4), strict=True):
        assert_close(scenario, mine, expected)


def test_groups_are_added_in_their_order(ranks):
    """In one step of short rows differences of order are seen."""
    rule = SGD(lr=0.5)  # multiplies exactly
    tables = (TableSpec(name="a", num_rows=2, dim=16, optimizer=rule, initializer=Uniform(bound=1e-3)),)
    plain = Scenario(tables=tables, batch_sizes=(3, 2, 4, 3), bag_sizes=(2, 2), num_steps=1)
    scenario = in_groups(plain, 4)
    theirs = ranks.run(train, scenario, "collective", world_size=4)
    for mine, expected in zip(train_on_device(ranks, scenario), theirs, strict=True):
        assert_same_bits(mine, expected)


def dense(scenario, every):
    return replace(scenario, synchronization=Synchronization("average", every=every, dense=True))


def train_in_parts(mesh, scenario):
    """With whole tables averaged three rows of the longest group at a time."""
    before, replica_rows.CHUNK_BYTES = replica_rows.CHUNK_BYTES, 3 * 4 * (5 + 5)
    try:
        return train(mesh, scenario, "auto", "cuda")
    finally:
        replica_rows.CHUNK_BYTES = before


@pytest.mark.slow
def test_whole_tables_are_averaged_as_touched_rows_are(ranks):
    """To the bit, like the model of the CPU; touched rows are not counted."""
    scenario = in_groups(PAIR, 2)
    parts = ranks.run(train_in_parts, dense(scenario, 2))
    for mine, touched in zip(parts, train_on_device(ranks, averaged(scenario, 2)), strict=True):
        assert_same_bits(mine, touched)
    for mine, expected in zip(parts, ranks.run(train, dense(scenario, 2), "collective"), strict=True):
        assert_close(scenario, mine, expected)
        synchronized = {name: counters.synchronization.rows for name, counters in mine.counters.items()}
        assert synchronized == {name: counters.synchronization.rows for name, counters in expected.counters.items()}
        assert sorted(set(synchronized.values())) == [2 * 7, 2 * 20]


def test_whole_tables_of_ranks_without_rows(ranks):
    """One rank of each group holds them all."""
    held = TablePlan(TableShape.of(SMALL[0]), (RowRange(0, 9, "fixed", rank=1),), replicas=2)
    check(ranks, dense(replace(FOUR, plan=Plan((held,), 4, 4)), 1))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("tables", [DOUBLE, (table("a", 9, 4, "row_wise_adagrad", dtype=torch.bfloat16),)])
def test_whole_tables_of_any_type_on_four_ranks(ranks, tables, replicas):
    scenario = in_groups(replace(FOUR, tables=tables), replicas)
    parts = train_on_device(ranks, dense(scenario, 1))
    other = train_again if replicas == 2 else train_on_device  # a rank alone reads no other
    for each in (averaged(scenario, 1), dense(scenario, 1)):
        for mine, again in zip(parts, other(ranks, each), strict=True):
            assert_same_bits(mine, again)


ITEM = [TableSpec(name="item", num_rows=8, dim=4, optimizer=RowWiseAdaGrad(lr=0.5), initializer=Constant(value=0.0))]


def collected(mesh, mode="average", every=1):
    synchronization = Synchronization(mode, every=every)
    collection = EmbeddingCollection(ITEM, mesh=mesh, replicas=2, synchronization=synchronization, device="cuda")
    return collection, EmbeddingOptimizer(collection)


def step(collection, optimizer, *rows):
    batch = SparseBatch.from_bags({"item": [[row] for row in rows]})
    (collection(batch).values + 1.0).square().sum().backward()
    optimizer.step()


def rows_of(collection):
    return torch.cat([piece.values for piece in collection.held_rows("item")])


def resume(mesh, folder):
    """The same steps straight on, and from what was saved after the third; and what was loaded between averages."""
    straight, optimizer = collected(mesh, every=2)
    for number in range(3):
        step(straight, optimizer, number, 2 * mesh.rank)
    save(folder, straight, {}, peers=mesh.peers)
    saved = rows_of(straight)
    resumed, other = collected(mesh, every=2)
    step(resumed, other, 5 + mesh.rank)
    load(folder, resumed)
    resumed.barrier()
    resumed.synchronize()
    loaded = rows_of(resumed)
    with in_form("elsewhere"):  # their rows are in the checkpoint
        other.load_state_dict(optimizer.state_dict())
    for collection, each in ((straight, optimizer), (resumed, other)):
        for number in range(2):
            step(collection, each, number, 3 * mesh.rank)
        collection.synchronize()
    return (saved, rows_of(straight)), (loaded, rows_of(resumed))


def test_checkpoints_between_two_averages(ranks, tmp_path):
    for straight, resumed in ranks.run(resume, tmp_path):
        assert torch.equal(straight[0], resumed[0])
        assert torch.equal(straight[1], resumed[1])


def read_at_once(mesh):
    collection, optimizer = collected(mesh, "exact")
    step(collection, optimizer, mesh.rank, 7)
    memory, values = collection.memory_bytes["buffers"], rows_of(collection)
    collection.close()
    return values, memory


def test_rows_read_straight_after_a_step_are_up_to_date(ranks):
    (first, memory), (second, _) = ranks.run(read_at_once)
    assert torch.equal(first, second)
    assert (first != 0).any(1).tolist() == [True, True, False, False, False, False, False, True]
    assert memory == 0


def test_the_list_of_touched_rows_grows_no_further_than_the_table(device):
    """Rows that are touched again take no room, though the host learns it later."""
    collection = EmbeddingCollection(ITEM, device="cuda")
    exchange: Any = collection.engine.exchanges[0]
    means = exchange.replicated = replica_rows.ReplicatedMeans(exchange.arena, device, 0, is_whole=False)
    optimizer = EmbeddingOptimizer(collection)
    for rows in ([1, 2], [2, 1], [1, 4], [0, 3, 4], [5, 6, 7]):
        step(collection, optimizer, *rows)
    delta = means.take()
    assert delta.slots.tolist()[:2] in ([1, 2], [2, 1])
    assert sorted(delta.slots.tolist()) == list(range(8))
    assert not delta.before[0].any()
    assert bool((delta.values[0] != 0).all())
    assert means.num_bytes == 8 + 8 * 8 + 8 * 4 * 4 + 8 * 4
    assert means.count == 0
