"""Tiered tables train the same model, through a pipeline and without, however small their fast memory is."""

import threading
import time
from dataclasses import replace

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, TableSpec
from rowmesh.data import Batch
from rowmesh.errors import ConfigurationError, NoRoomError
from rowmesh.pipeline import Pipeline
from rowmesh.tables import Tiers
from rowmesh.tables.update_rules import SGD, Adam
from tests.support.scenario import Scenario
from tests.support.training import merged, train

DENSE = (
    TableSpec(name="user", num_rows=400, dim=16, features=("user", "friend"), dtype=torch.float64),
    TableSpec(name="tag", num_rows=7, dim=16, pooling="mean", dtype=torch.float64, optimizer=SGD(lr=0.1)),
    TableSpec(name="item", num_rows=300, dim=3, dtype=torch.float64, optimizer=Adam(lr=0.1)),
)
TIERED = tuple(replace(table, storage="tiered") for table in DENSE)
MIXED = (TIERED[0], DENSE[1], TIERED[2])


def run(ranks, scenario):
    if scenario.world_size == 1:
        return merged(scenario, [train(Mesh(), scenario)])
    return merged(scenario, ranks.run(train, scenario, "collective", world_size=scenario.world_size))


FEW = [((9,), TIERED, True), ((7, 5), MIXED, False), ((7, 5), TIERED, True), ((4, 0, 6, 3), MIXED, True)]


def assert_equal(mine, theirs):
    assert mine.losses == theirs.losses
    for a, b in zip(mine.outputs, theirs.outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for name, rows in mine.rows.items():
        torch.testing.assert_close(rows, theirs.rows[name], rtol=0, atol=0)
        for state, values in mine.state[name].items():
            torch.testing.assert_close(values, theirs.state[name][state], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("batch_sizes", "tables", "on_disk"),
    [
        pytest.param(sizes, tables, on_disk, marks=() if (sizes, tables, on_disk) in FEW else (pytest.mark.slow,))
        for sizes in [(9,), (7, 5), (4, 0, 6, 3)]
        for tables in (TIERED, MIXED)
        for on_disk in (False, True)
    ],
)
def test_tiers_change_nothing(ranks, tmp_path, batch_sizes, tables, on_disk):
    scenario = Scenario(tables=DENSE, batch_sizes=batch_sizes, num_steps=6, evaluates=True)
    plain = run(ranks, scenario)
    tiers = Tiers(fast_share=0.01, fast_rows=130, folder=tmp_path if on_disk else None, verify=True, poison=True)
    tiered = replace(scenario, tables=tables, tiers=tiers)
    assert_equal(run(ranks, tiered), plain)
    for depth in (0, 1, 2):
        piped = replace(tiered, pipeline={"depth": depth, "verify": True})
        assert_equal(run(ranks, piped), plain)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_waits_for_the_room_of_the_one_before(ranks):
    """Two batches do not fit into fast memory together, so that the next is brought when this one is updated."""
    scenario = Scenario(tables=DENSE, batch_sizes=(40, 40), bag_sizes=(2, 3), skew=1.0, num_steps=6)
    tiers = Tiers(fast_share=0.01, fast_rows=160, timeout_s=20.0)
    tiered = replace(scenario, tables=TIERED, tiers=tiers, pipeline={"depth": 1})
    assert_equal(run(ranks, tiered), run(ranks, replace(scenario, pipeline={"depth": 0})))


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_micro_batches_over_tiers_are_those_over_dense_rows(ranks, depth):
    options = {"depth": depth, "micro_batches": 3, "sizes": "light_ends", "clustering": "greedy"}
    scenario = Scenario(tables=DENSE, batch_sizes=(9, 8), num_steps=6, pipeline=options)
    tiers = Tiers(fast_share=0.01, fast_rows=150, poison=True)
    assert_equal(run(ranks, replace(scenario, tables=TIERED, tiers=tiers)), run(ranks, scenario))


# Little room


ITEM = TableSpec(name="item", num_rows=1000, dim=3, storage="tiered", optimizer=SGD(lr=0.1))
ROWS = 12  # of a batch of one rank; none is in two batches


def make(mesh, num_batches):
    """A collection with room for so many batches, and its optimizer."""
    rows = num_batches * ROWS * mesh.world_size
    tiers = Tiers(fast_share=0.001, fast_rows=rows, poison=True, timeout_s=30.0)
    return (collection := EmbeddingCollection([ITEM], mesh=mesh, tiers=tiers)), EmbeddingOptimizer(collection)


def item(mesh, number):
    """The batch of a rank; its rows are owned by all ranks."""
    first = (number * mesh.world_size + mesh.rank) * ROWS
    sparse = SparseBatch.from_bags({"item": [[row] for row in range(first, first + ROWS)]})
    return Batch(torch.zeros(ROWS, 0), sparse, torch.zeros(ROWS))


def train_on(window, optimizer):
    for part in window:
        part.embeddings.values.square().sum().backward()
    optimizer.step()


def fetch_twice(mesh):
    """A route that is fetched again after an update holds its rows once."""
    collection, optimizer = make(mesh, 2)
    first, second = (collection.route(item(mesh, number).sparse) for number in (0, 1))
    collection.fetch(first)
    collection.pool(collection.fetch(second)).values.sum().backward()
    optimizer.step()
    collection.pool(collection.fetch(first)).values.sum().backward()
    optimizer.step()
    del first, second
    for number in (2, 3):  # takes all room
        kept = collection(item(mesh, number).sparse)
    collection.close()
    return kept.values.isnan().any()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_route_may_be_fetched_again(ranks, world_size):
    assert not any(ranks.run(fetch_twice, world_size=world_size))


def leave_a_loop(mesh, depth, num_batches, with_step):
    """Leaves a loop in its third batch, before or after its step, and trains on what comes from there."""
    before = set(threading.enumerate())
    collection, optimizer = make(mesh, num_batches)
    pipeline, began = Pipeline(collection, depth=depth, micro_batches=2, verify=True), time.monotonic()
    for number, window in enumerate(pipeline.windows(item(mesh, number) for number in range(8))):
        if number == 2:
            if with_step:
                train_on(window, optimizer)
            else:
                next(iter(window))
            break
        train_on(window, optimizer)
    elapsed_s = time.monotonic() - began
    threads = [thread.name for thread in set(threading.enumerate()) - before]
    with torch.no_grad():
        collection(item(mesh, 20).sparse)  # takes all the room of a batch
    for window in pipeline.windows(item(mesh, number) for number in range(2 + with_step, 8)):
        train_on(window, optimizer)
    rows = [piece.values.clone() for piece in collection.local_rows("item")]
    collection.close()
    return elapsed_s, [name for name in threads if "write-back" not in name], rows


def train_in_turn(mesh):
    collection, optimizer = make(mesh, 1)
    for number in range(8):
        collection(item(mesh, number).sparse).values.square().sum().backward()
        optimizer.step()
    rows = [piece.values.clone() for piece in collection.local_rows("item")]
    collection.close()
    return rows


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("depth, num_batches", [(1, 1), (2, 1), (2, 2), (2, 5)])
def test_a_loop_that_is_left_gives_its_rows_up(ranks, world_size, depth, num_batches):
    """What waits for the room of a batch that will never be updated ends, and the next loop finds all room."""
    expected = ranks.run(train_in_turn, world_size=world_size)
    for with_step in (False, True):
        left = ranks.run(leave_a_loop, depth, num_batches, with_step, world_size=world_size)
        for (elapsed_s, threads, rows), theirs in zip(left, expected, strict=True):
            assert elapsed_s < 8
            assert threads == []
            assert all(torch.equal(a, b) for a, b in zip(rows, theirs, strict=True))


def go_through(collection, optimizer, between, **options):
    """Four batches, with something done after each but the last two; returns how long it took."""
    began = time.monotonic()
    with Pipeline(collection, **options) as pipeline:
        for number, window in enumerate(pipeline.windows(item(Mesh(), number) for number in range(4))):
            train_on(window, optimizer)
            if number < 2:
                between()
    return time.monotonic() - began


@pytest.mark.parametrize("depth, num_batches", [(1, 1), (4, 2)])
def test_look_ups_between_windows_do_not_wait_for_room_that_comes_later(depth, num_batches):
    collection, optimizer = make(Mesh(), num_batches)

    def look_up():
        with torch.no_grad(), pytest.raises(NoRoomError, match=r"needs 12 more slots .* \(waited 0.\d s\)"):
            collection(item(Mesh(), 20).sparse)

    assert go_through(collection, optimizer, look_up, depth=depth) < 5


def test_look_ahead_that_does_not_fit_is_reported_where_rows_are_looked_up_between_windows():
    """Otherwise the update of the batch before prefetches it; here nothing would."""
    collection, optimizer = make(Mesh(), 1)
    with pytest.raises(NoRoomError, match=r"rank 0 in stage 'retrieve' of batch 2: .* \(waited \d.\d s\)"):
        go_through(collection, optimizer, collection.engine.wait, depth=4)


def test_one_thread_cannot_wait_for_itself():
    began = time.monotonic()
    with pytest.raises(NoRoomError, match="look ahead over fewer batches"):
        go_through(*make(Mesh(), 1), lambda: None, depth=1, overlap=False)
    collection, optimizer = make(Mesh(), 1)
    collection(item(Mesh(), 0).sparse).values.sum().backward()
    with pytest.raises(NoRoomError, match="1 other"):
        collection(item(Mesh(), 1).sparse)
    optimizer.step()
    collection(item(Mesh(), 1).sparse).values.sum().backward()
    assert time.monotonic() - began < 5


def make_without_a_folder(mesh, folders):
    try:
        EmbeddingCollection([ITEM], mesh=mesh, tiers=Tiers(folder=folders[mesh.rank]))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_all_ranks_learn_that_one_cannot_make_its_file(ranks, tmp_path):
    errors = ranks.run(make_without_a_folder, [tmp_path, tmp_path / "missing"], world_size=2)
    assert errors[0] == errors[1]
    assert errors[0].startswith(f"rank 1: cannot make file store {tmp_path / 'missing'}")
