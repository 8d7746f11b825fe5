"""Pipeline: trains the model of the plain loop, whatever moves when."""

import threading
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, TableSpec
from rowmesh.data import Batch
from rowmesh.errors import ConfigurationError, DataError, RowmeshError
from rowmesh.pipeline import Pipeline
from rowmesh.sparse import SparseBatch
from rowmesh.tables.update_rules import SGD, Adam
from tests.collection.test_equivalence import assert_close, assert_same_bits, on_ranks
from tests.support.jobs import pipelined_jobs, placed
from tests.support.plans import in_groups, make_plan, with_copies
from tests.support.scenario import Scenario
from tests.support.tables import several, table
from tests.support.training import merged, train, train_reference

TABLES = (
    TableSpec(name="user", num_rows=40, dim=16, features=("user", "friend"), dtype=torch.float64),
    TableSpec(name="tag", num_rows=7, dim=16, pooling="mean", dtype=torch.float64, optimizer=SGD(lr=0.1)),
    TableSpec(name="item", num_rows=100, dim=3, dtype=torch.float64, optimizer=Adam(lr=0.1)),
    TableSpec(name="word", num_rows=9, dim=16, pooling="none", dtype=torch.float64),
)
DOUBLE = several("adam", torch.float64)
TRANSPORTS = ["collective", "collective", "one_sided"]


def whole(ranks, scenario, transport="collective"):
    return merged(scenario, on_ranks(ranks, scenario, transport))


def assert_same(mine, theirs):
    """To the bit, however rows are placed."""
    assert mine.losses == theirs.losses
    pairs = list(zip(mine.outputs + mine.head, theirs.outputs + theirs.head, strict=True))
    pairs += zip(mine.averaged, theirs.averaged, strict=True)
    for name, rows in mine.rows.items():
        pairs.append((rows, theirs.rows[name]))
        pairs += [(values, theirs.state[name][state]) for state, values in mine.state[name].items()]
    assert all(torch.equal(a, b) for a, b in pairs)


def in_turn(scenario, **options):
    """The same job with everything done in turn."""
    return replace(scenario, pipeline=scenario.pipeline | {"depth": 0, "overlap": False} | options)


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
@pytest.mark.parametrize("batch_sizes", [(9,), (7, 5), (4, 0, 6, 3)])
def test_a_pipeline_of_one_micro_batch_is_the_plain_loop(ranks, batch_sizes, transport):
    scenario = Scenario(tables=TABLES, batch_sizes=batch_sizes, num_steps=5, decay=0.9)
    plain = whole(ranks, scenario, transport)
    for depth in (0, 1, 3):
        assert_same(whole(ranks, replace(scenario, pipeline={"depth": depth}), transport), plain)


@pytest.mark.parametrize("form", ["unsplit", "naive", "delta"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_micro_batches_train_the_reference(ranks, form, depth):
    options = {"depth": depth, "micro_batches": 3, "exchange": form, "verify": True}
    scenario = Scenario(tables=DOUBLE, batch_sizes=(9, 8), num_steps=5, pipeline=options, evaluates=True)
    assert_close(scenario, whole(ranks, scenario), train_reference(scenario))


def test_copied_rows_and_replicas_travel_by_micro_batch_too(ranks):
    options = {"depth": 1, "micro_batches": 3, "verify": True}
    scenario = Scenario(tables=DOUBLE, batch_sizes=(9, 8, 5, 7), num_steps=5, pipeline=options, sharing="hot")
    copied = replace(scenario, plan=with_copies(DOUBLE, world_size=4))
    for placed_job in (copied, in_groups(scenario, 2)):
        parts = on_ranks(ranks, placed_job, "collective")
        assert all("by micro-batch (delta)" in reason for part in parts for reason in part.reasons)
        assert_close(scenario, merged(placed_job, parts), train_reference(scenario))


def test_copied_rows_are_not_fetched(ranks):
    options = {"depth": 1, "micro_batches": 3, "final_rows": False}
    scenario = Scenario(tables=DOUBLE, batch_sizes=(9, 8), num_steps=4, pipeline=options)
    everywhere = make_plan(DOUBLE, 2, 2, lambda number: ("replicated", 0, 0, False))
    received = [
        sum(group.bytes_received for group in on_ranks(ranks, each, "collective")[0].counters.values())
        for each in (scenario, replace(scenario, plan=everywhere, pipeline=None), replace(scenario, plan=everywhere))
    ]
    uses_bytes = 4 * sum(group.unique_ids for group in on_ranks(ranks, scenario, "collective")[1].counters.values())
    assert received[1] <= received[2] <= received[1] + uses_bytes, "as in the plain loop, but for the uses of each row"


MORE = [pytest.param(2, 60, marks=pytest.mark.slow), pytest.param(4, 40, marks=pytest.mark.slow)]


@pytest.mark.parametrize("world_size, examples", [(1, 6), (2, 8), (4, 5), *MORE])
def test_when_rows_move_changes_no_bit(ranks, world_size, examples):
    """Depth, threads, rows that are final, transports, plans: the model is that of everything in turn."""

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data):
        scenario = data.draw(pipelined_jobs(world_size))
        there = data.draw(placed(scenario))
        transport = data.draw(st.sampled_from(TRANSPORTS))
        if there.ranks_per_node:
            transport = "collective"
        mine = whole(ranks, there, transport)
        if scenario.pipeline["exchange"] == "naive" or there.synchronization is not None:
            assert_same(mine, whole(ranks, in_turn(there), transport))
            return
        scenario = replace(scenario, ranks_per_node=there.ranks_per_node)
        assert_same(mine, whole(ranks, in_turn(scenario, exchange="unsplit"), "collective"))

    check()


@settings(max_examples=15)
@given(data=st.data(), world_size=st.sampled_from([1, 2]))
def test_one_micro_batch_is_the_plain_loop(ranks, data, world_size):
    scenario = data.draw(pipelined_jobs(world_size, micro_batches=1, clustering="off"))
    scenario = data.draw(placed(scenario))
    assert_same(whole(ranks, scenario), whole(ranks, replace(scenario, pipeline=None)))


@settings(max_examples=15)
@given(data=st.data(), world_size=st.sampled_from([1, 2, 4]))
def test_any_options_train_the_reference(ranks, data, world_size):
    scenario = data.draw(pipelined_jobs(world_size))
    double = tuple(replace(spec, dtype=torch.float64) for spec in scenario.tables)
    scenario = replace(scenario, tables=double)
    assert_close(scenario, whole(ranks, scenario), train_reference(scenario))


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("breaks, plain", [((2,), ()), ((1, 2, 5), ()), ((), (0, 3)), ((2,), (4, 5))])
def test_loops_that_are_left_and_begun_again(ranks, transport, overlap, breaks, plain):
    """What was read ahead is dropped, and the steps that were taken are done."""
    options = {"depth": 2, "micro_batches": 1, "verify": True, "overlap": overlap}
    scenario = Scenario(tables=DOUBLE, batch_sizes=(5, 4), num_steps=7, pipeline=options, evaluates=True)
    expected = whole(ranks, replace(scenario, pipeline=None), transport)
    assert_same(whole(ranks, replace(scenario, breaks=breaks, plain=plain), transport), expected)


def leave_within_a_window(mesh, transport):
    """Leaves between two micro-batches of the third batch, then trains the same batches and one more."""
    before = set(threading.enumerate())  # collections of earlier tests may not be freed yet
    scenario = Scenario(tables=DOUBLE, batch_sizes=(6, 5), num_steps=5)
    collection = EmbeddingCollection(scenario.tables, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    batches = [scenario.local_batch(step, 0, mesh.rank).sparse for step in range(5)]
    items = [Batch(torch.zeros(each.batch_size, 0), each, torch.zeros(each.batch_size)) for each in batches]
    with Pipeline(collection, depth=2, micro_batches=2, verify=True) as pipeline:
        for number, window in enumerate(pipeline.windows(items)):
            for part in window:
                part.embeddings.values.square().sum().backward()
                if number == 2:
                    break
            if number == 2:
                break
            optimizer.step()
        new = set(threading.enumerate()) - before
        threads = [thread.name for thread in new if thread.name.startswith("rowmesh ")]
        for window in pipeline.windows(items[2:]):
            for part in window:
                part.embeddings.values.square().sum().backward()
            optimizer.step()
    rows = [piece.values.clone() for spec in scenario.tables for piece in collection.local_rows(spec.name)]
    collection.close()
    return rows, threads


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
def test_a_loop_that_is_left_within_a_window(ranks, transport):
    left = ranks.run(leave_within_a_window, transport, world_size=2)
    again = ranks.run(train_in_turn, transport, world_size=2)
    for (rows, threads), expected in zip(left, again, strict=True):
        assert threads == []
        assert all(torch.equal(a, b) for a, b in zip(rows, expected, strict=True))


def train_in_turn(mesh, transport):
    scenario = Scenario(tables=DOUBLE, batch_sizes=(6, 5), num_steps=5)
    collection = EmbeddingCollection(scenario.tables, mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    for step in range(5):
        sparse = scenario.local_batch(step, 0, mesh.rank).sparse
        item = Batch(torch.zeros(sparse.batch_size, 0), sparse, torch.zeros(sparse.batch_size))
        with Pipeline(collection, depth=0, micro_batches=2, overlap=False) as pipeline:
            for window in pipeline.windows([item]):
                for part in window:
                    part.embeddings.values.square().sum().backward()
                optimizer.step()
    rows = [piece.values.clone() for spec in scenario.tables for piece in collection.local_rows(spec.name)]
    collection.close()
    return rows


def test_transports_do_the_same(ranks):
    options = {"depth": 2, "micro_batches": 4}
    scenario = Scenario(tables=several("row_wise_adagrad"), batch_sizes=(30, 25), num_steps=6, pipeline=options)
    parts = [on_ranks(ranks, scenario, transport) for transport in ("collective", "one_sided")]
    for mine, theirs in zip(*parts, strict=True):
        assert_same_bits(mine, theirs)


def test_thirty_one_micro_batches(ranks):
    scenario = Scenario(
        tables=DOUBLE, batch_sizes=(40, 3), num_steps=3, pipeline={"depth": 1, "micro_batches": 31, "verify": True}
    )
    mine = whole(ranks, scenario)
    assert_same(mine, whole(ranks, in_turn(scenario)))
    assert_close(scenario, mine, train_reference(scenario))


# What a program can do wrong


def pipeline_of_one(**options):
    collection = EmbeddingCollection([table("item", 10, 4)], mesh=Mesh())
    return collection, EmbeddingOptimizer(collection), Pipeline(collection, **options)


def items(number, bad=None):
    for n in range(number):
        ids = [[99]] if n == bad else [[n % 10], [3], [7]]
        sparse = SparseBatch.from_bags({"item": ids})
        yield Batch(torch.zeros(len(ids), 0), sparse, torch.zeros(len(ids)))


def run_all(pipeline, loader, step):
    for window in pipeline.windows(loader):
        for part in window:
            part.embeddings.values.sum().backward()
        step()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_window_without_a_step(overlap):
    _, _, pipeline = pipeline_of_one(overlap=overlap)
    with pipeline, pytest.raises(RowmeshError, match="batch 0 had no step"):
        run_all(pipeline, items(3), lambda: None)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_micro_batch_without_a_backward(overlap):
    _, _, pipeline = pipeline_of_one(micro_batches=2, overlap=overlap)
    with pipeline:
        running = pipeline.windows(items(3))
        window = next(running)
        with pytest.raises(RowmeshError, match="micro-batch 0 of batch 0 had no backward"):
            list(window)


def test_a_step_too_early_or_twice():
    _, optimizer, pipeline = pipeline_of_one(micro_batches=2)
    with pipeline:
        for window in pipeline.windows(items(2)):
            with pytest.raises(RowmeshError, match="there is nothing to step"):
                optimizer.step()
            for part in window:
                part.embeddings.values.sum().backward()
            optimizer.step()
            with pytest.raises(RowmeshError, match="there is nothing to step"):
                optimizer.step()


def test_two_loops_at_once():
    _, _, pipeline = pipeline_of_one()
    with pipeline:
        running = pipeline.windows(items(3))
        next(running)
        with pytest.raises(RowmeshError, match="one loader at a time"):
            next(pipeline.windows(items(3)))


@pytest.mark.parametrize("overlap", [True, False])
def test_errors_keep_their_class_and_say_where(overlap):
    def spoilt():
        yield from items(2)
        raise DataError("line 7 is not a sample")

    for loader, text in (
        (spoilt(), "rank 0 in stage 'read' of batch 2: line 7 is not a sample"),
        (items(5, bad=3), "rank 0 in stage 'route' of batch 3: rank 0: feature 'item': 1 of 1 ids are outside"),
    ):
        collection, optimizer, pipeline = pipeline_of_one(overlap=overlap)
        with pipeline, pytest.raises(DataError) as caught:
            run_all(pipeline, loader, optimizer.step)
        assert str(caught.value).startswith(text)
        collection(SparseBatch.from_bags({"item": [[1]]}))  # and the tables are as good as before


@pytest.mark.parametrize("overlap", [True, False])
def test_what_fails_after_a_loop_was_left_is_told(overlap):
    collection, optimizer, pipeline = pipeline_of_one(overlap=overlap, disturb=spoil_updates)
    with pytest.raises(RowmeshError, match="rank 0 in stage 'update' of batch 1: ValueError: spoilt"), pipeline:
        take_two_steps(pipeline, optimizer)
    take_two_steps(pipeline, optimizer, number=1)
    assert collection.step_count == 2


def spoil_updates(task):
    if (task.stage, task.batch) == ("update", 1):
        raise ValueError("spoilt")


def take_two_steps(pipeline, optimizer, number=2):
    for count, window in enumerate(pipeline.windows(items(9)), 1):
        for part in window:
            part.embeddings.values.sum().backward()
        optimizer.step()
        if count == number:
            break


@pytest.mark.parametrize("ends", ["break", "raise", "drop"])
def test_a_loader_is_let_go_of(ends):
    closed = []

    def loader():
        try:
            yield from items(9)
        finally:
            closed.append(True)

    _, optimizer, pipeline = pipeline_of_one(depth=2)
    try:
        for window in pipeline.windows(loader()):
            if ends == "drop":
                break
            for part in window:
                part.embeddings.values.sum().backward()
            optimizer.step()
            if ends == "raise":
                raise KeyboardInterrupt
            break
    except KeyboardInterrupt:
        pass
    assert closed == [True]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rowmesh ")]


@pytest.mark.parametrize(
    "options, text",
    [
        ({"depth": -1}, "depth must be 0 or more, got -1"),
        ({"depth": 1.5}, "depth must be a whole number, got 1.5"),
        ({"depth": "1"}, "depth must be a whole number, got '1'"),
        ({"depth": None}, "depth must be a whole number, got None"),
        ({"depth": True}, "depth must be a whole number, got True"),
        ({"micro_batches": 2.0}, "micro_batches must be a whole number, got 2.0"),
        ({"micro_batches": "2"}, "micro_batches must be a whole number, got '2'"),
        ({"micro_batches": 32}, "micro_batches must be 1 to 31, got 32"),
        ({"exchange": "twice"}, "exchange must be one of"),
        ({"clustering": "yes"}, "clustering must be one of"),
    ],
)
def test_options_that_cannot_be(options, text):
    with pytest.raises(ConfigurationError, match=text):
        pipeline_of_one(**options)


def test_one_rank_alone():
    """Without other ranks rows are read in place."""
    scenario = Scenario(tables=DOUBLE, batch_sizes=(12,), num_steps=4, pipeline={"depth": 2, "micro_batches": 3})
    assert_close(scenario, merged(scenario, [train(Mesh(), scenario)]), train_reference(scenario))


def small_batches(count):
    sparse = SparseBatch.from_bags({"item": [[3], [4]]})
    return [Batch(torch.full((2, 1), float(number)), sparse, torch.zeros(2)) for number in range(count)]


def train_all(pipeline, items, optimizer):
    """Gives back what the dense features of each window's item are."""
    dense = []
    for window in pipeline.windows(items):
        dense.append(float(window.item.dense[0]))
        for part in window:
            part.embeddings.values.sum().backward()
        optimizer.step()
    return dense


def test_items_are_copied_in_a_thread_of_their_own():
    """The loop is given what the program made of an item."""
    collection, threads = EmbeddingCollection([table("item", 20, dim=2)]), set()
    optimizer = EmbeddingOptimizer(collection)

    def copy(item):
        threads.add(threading.current_thread().name)
        return replace(item, dense=item.dense + 10)

    pipeline = Pipeline(collection, depth=2, copy=copy, joins=False)
    assert train_all(pipeline, small_batches(5), optimizer) == [10, 11, 12, 13, 14]
    assert threads == {"rowmesh copier"}
    assert pipeline.threads == "threads: reader, copier, router, rows, gradients"
    joined = Pipeline(collection, depth=2, joins=True)
    assert joined.threads.startswith("threads: worker, rows, gradients (reads, copies and routes: ")
    assert Pipeline(collection, overlap=False).threads == "all is done in turn, in one thread"


def test_a_copy_that_fails_ends_the_data_there():
    collection = EmbeddingCollection([table("item", 20, dim=2)])
    optimizer = EmbeddingOptimizer(collection)

    def copy(item):
        if item.dense[0] == 2:
            raise MemoryError("no room on the device")
        return item

    with pytest.raises(RowmeshError, match="rank 0 in stage 'copy' of batch 2: MemoryError: no room on the device"):
        train_all(Pipeline(collection, copy=copy), small_batches(5), optimizer)
    assert collection.step_count == 2


# Gradients of several items, and one step

ACCUMULATED = Scenario(tables=DOUBLE, batch_sizes=(5, 4), num_steps=3, accumulate=3, decay=0.9)


@pytest.mark.parametrize(
    "options, transport, more",
    [
        ({"depth": 2, "micro_batches": 2, "verify": True}, "collective", {"max_norm": 0.02}),
        ({"depth": 1, "micro_batches": 2, "clustering": "greedy"}, "collective", {"is_weighted": True}),
        ({"depth": 1, "exchange": "naive"}, "collective", {"trains_weights": True}),
        ({"depth": 2}, "one_sided", {"is_scaled": True, "evaluates": True, "bag_sizes": (2, 2)}),
        ({"depth": 0, "overlap": False, "micro_batches": 3}, "collective", {"batch_sizes": (0, 2)}),
    ],
)
def test_a_window_of_several_items_is_the_plain_loop_that_accumulates(ranks, options, transport, more):
    scenario = replace(ACCUMULATED, pipeline=options, **more)
    mine = whole(ranks, scenario, transport)
    assert_close(scenario, mine, train_reference(scenario))
    assert_close(scenario, mine, whole(ranks, replace(scenario, pipeline=None), transport))


def test_the_last_window_may_have_fewer_items():
    collection, optimizer, pipeline = pipeline_of_one(accumulate=3, micro_batches=2)
    found = []
    with pipeline:
        for window in pipeline.windows(items(4)):
            parts = []
            for part in window:
                assert part.item is window.items[min(len(parts) // 2, len(window.items) - 1)]
                parts.append((part.samples.stop - part.samples.start, part.weight))
                part.embeddings.values.sum().backward()
            optimizer.step()
            found.append((len(window.items), [samples for samples, _ in parts]))
            assert sum(weight for _, weight in parts) == pytest.approx(1.0)
        with pytest.raises(RowmeshError, match="a window of 3 items has no one item"):
            next(pipeline.windows(items(4))).item  # noqa: B018
    assert found == [(3, [1, 2, 1, 2, 1, 2]), (1, [1, 2, 0, 0, 0, 0])]
    assert collection.step_count == 2


@pytest.mark.parametrize("accumulate", [0, 16, 1.5])
def test_how_many_items_a_window_has(accumulate):
    with pytest.raises(ConfigurationError, match="accumulate must be"):
        pipeline_of_one(micro_batches=2, accumulate=accumulate)
