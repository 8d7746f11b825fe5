"""Pauses of a pipeline: between two windows a program does all that it may do in a plain loop, and loses no batch."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import rowmesh
from rowmesh import Checkpoints, EmbeddingOptimizer, Mesh
from rowmesh.errors import DataError, RowmeshError
from rowmesh.pipeline import Pipeline
from rowmesh.tables import Dynamic, Tiers
from tests.pipeline.test_ends import batches, make
from tests.pipeline.test_pipeline import DOUBLE, assert_same, in_turn, whole
from tests.support.jobs import pipelined_jobs, placed
from tests.support.plans import random_plans
from tests.support.scenario import Scenario


@pytest.mark.parametrize("world_size, examples", [(1, 3), (2, 3), pytest.param(4, 30, marks=pytest.mark.slow)])
def test_pauses_and_migrations_change_no_bit(ranks, world_size, examples):
    """Whatever was read, routed, opened and fetched ahead, at any depth: the model is that of everything in turn."""

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data):
        scenario = data.draw(pipelined_jobs(world_size))
        there = data.draw(placed(scenario))
        pauses = tuple(data.draw(st.sets(st.integers(1, scenario.num_steps))))
        transport = "collective" if there.ranks_per_node else data.draw(st.sampled_from(["collective", "one_sided"]))
        paused = replace(there, pauses=pauses)
        if there.plan is not None and there.synchronization is None and data.draw(st.booleans()):
            plans = random_plans(there.tables, world_size, there.ranks_per_node)
            paused = replace(paused, migrations=((data.draw(st.integers(1, there.num_steps)), data.draw(plans)),))
        plain = replace(in_turn(there), migrations=paused.migrations)
        assert_same(whole(ranks, paused, transport), whole(ranks, plain, transport))

    check()


@pytest.mark.parametrize("world_size, examples", [(1, 3), (2, 3), pytest.param(4, 30, marks=pytest.mark.slow)])
def test_averages_of_rows_are_those_of_the_plain_loop(ranks, world_size, examples):
    """However tables are stored, ids come and go, and tiers hold little: averages, and all else, to the bit."""

    @settings(max_examples=examples)
    @given(data=st.data())
    def check(data):
        scenario = data.draw(pipelined_jobs(world_size, depth=data.draw(st.integers(0, 2)), micro_batches=1))
        options = scenario.pipeline | {"clustering": "off", "exchange": "delta"}
        scenario = replace(scenario, averages=True, num_steps=4, pipeline=options)
        kinds = data.draw(st.lists(st.sampled_from(["tiered", "dynamic", "dense"]), min_size=4, max_size=4))
        kinds = dict(zip([each.name for each in scenario.tables], kinds, strict=False))
        # Each table has room for the ids of one step, and not for many more.
        most = {
            name: max(1, *(len({*scenario.ids_of(name, step, 0)}) for step in range(scenario.num_steps)))
            for name in kinds
        }
        rules = data.draw(st.sampled_from([{}, {"admit_after": 2}, {"ttl_steps": 2}]))
        dynamic = [
            (name, Dynamic(capacity=most[name], shards=1, **rules)) for name in kinds if kinds[name] == "dynamic"
        ]
        rows = [
            replace(each, storage="tiered" if kinds[each.name] == "tiered" else "dense") for each in scenario.tables
        ]
        scenario = replace(
            scenario,
            tables=tuple(rows),
            dynamic=tuple(dynamic),
            tiers=Tiers(fast_share=0.01, fast_rows=150, verify=True, poison=True, timeout_s=20.0),
        )
        plain = replace(scenario, pipeline=None)
        transport = data.draw(st.sampled_from(["collective", "one_sided"]))
        mine, theirs = whole(ranks, scenario, transport), whole(ranks, plain, transport)
        assert len(mine.averaged) == scenario.num_steps
        assert_same(mine, theirs)

    check()


def clustered(**options):
    how = {"depth": 4, "micro_batches": 3, "clustering": "greedy", "verify": True}
    return Scenario(tables=DOUBLE, batch_sizes=(9, 8), num_steps=6, pipeline=how, evaluates=True, **options)


def test_samples_that_were_clustered_are_clustered_alike_once_more(ranks):
    assert_same(whole(ranks, clustered(pauses=(1, 2, 4, 6))), whole(ranks, clustered()))


def train(window, optimizer):
    for part in window:
        part.embeddings.values.square().sum().backward()
    optimizer.step()


def save_at_every_step(mesh, kind, folder, depth):
    """Saves, asks for statistics and writes checkpoints after every step; returns what the last rows are."""
    collection, optimizer = make(mesh, kind)
    state, found = {"tables": collection, "optimizer": optimizer}, []

    def after(step):
        rowmesh.save(folder / f"{step}", state)
        if kind.startswith("dynamic"):
            known = collection.statistics("item", [*range(50)])
            found.append((known.count.tolist(), known.last_step.tolist(), known.known.tolist()))
        checkpoints.step(step)

    with Checkpoints(folder / "series", state, every_steps=2) as checkpoints:
        checkpoints.resume()
        if depth is None:
            for step, item in enumerate(batches(mesh.rank, kind), 1):
                collection(item.sparse).values.square().sum().backward()
                optimizer.step()
                after(step)
        else:
            for step, window in enumerate(Pipeline(collection, depth=depth).windows(batches(mesh.rank, kind)), 1):
                train(window, optimizer)
                after(step)
        assert checkpoints.last == 8
    collection.close()
    return found


def values_of(mesh, kind, folder, step):
    """The rows of a saved step and, of a dynamic table, which ids they are of."""
    collection, optimizer = make(mesh, kind)
    rowmesh.load(folder / f"{step}", {"tables": collection, "optimizer": optimizer})
    if kind.startswith("dynamic"):
        known = collection.known_rows("item")
        rows = {int(number): values.tolist() for number, values in zip(known.ids, known.values, strict=True)}
    else:
        pieces = collection.local_rows("item")
        rows = {row: values.tolist() for piece in pieces for row, values in zip(piece.rows, piece.values, strict=True)}
    collection.close()
    return rows


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["dynamic", "tiered"])
def test_models_saved_within_a_loop_are_those_of_the_plain_loop(ranks, tmp_path, kind, world_size):
    folders = [tmp_path / "plain", tmp_path / "pipelined"]
    for folder in folders:
        folder.mkdir()
    plain, mine = (
        ranks.run(save_at_every_step, kind, folder, depth, world_size=world_size)
        for folder, depth in zip(folders, (None, 3), strict=True)
    )
    assert mine == plain
    for step in (1, 4, 9):
        theirs, ours = (ranks.run(values_of, kind, folder, step, world_size=world_size) for folder in folders)
        assert ours == theirs
        assert any(theirs)


def test_items_come_once_and_in_order():
    """Also where the loader fails after it was read ahead, and where the pipeline pauses before its first window."""
    collection, optimizer = make(Mesh(), "dynamic")
    read, given_ = [], []

    def items():
        for number, item in enumerate(batches(0, "dynamic", spoil=(7, "raises"))):
            read.append(number)
            yield item

    pipeline = Pipeline(collection, depth=3)

    def go_through():
        for window in pipeline.windows(items()):
            given_.append(window.number)
            train(window, optimizer)
            pipeline.pause()
            pipeline.pause()

    with pytest.raises(RowmeshError, match=r"rank 0 in stage 'read' of batch 7: line 7 is not a sample") as caught:
        go_through()
    assert isinstance(caught.value.__cause__, DataError)
    assert given_ == read == [*range(7)]
    assert collection.step_count == 7
    pipeline.pause()  # no loop runs


def test_a_window_that_is_half_way_is_not_left():
    collection, optimizer = make(Mesh(), "dynamic")
    with Pipeline(collection) as pipeline:
        for window in pipeline.windows(batches(0, "dynamic", count=3)):
            with pytest.raises(RowmeshError, match=r"batch \d of the pipeline is half way"):
                pipeline.pause()
            train(window, optimizer)
    assert collection.step_count == 3


def leave_while_it_pauses(mesh, kind, leavers):
    """Some ranks leave their loop after step 3, when the pipelines pause; returns the steps and what is raised."""
    collection, optimizer = make(mesh, kind)
    error, pipeline = "", Pipeline(collection, depth=2)
    try:
        for number, window in enumerate(pipeline.windows(batches(mesh.rank, kind)), 1):
            train(window, optimizer)
            if number == 3:
                pipeline.pause()
                if mesh.rank in leavers:
                    break
    except RowmeshError as raised:
        error = str(raised)
    steps = collection.step_count
    for window in Pipeline(collection).windows(batches(mesh.rank, kind, count=2)):  # the mesh is free
        train(window, optimizer)
    collection.close()
    return steps, error


@pytest.mark.parametrize("kind", ["dynamic", "one_sided"])
@pytest.mark.parametrize("leavers", [(1,), (0, 1)])
def test_ranks_that_leave_a_loop_that_pauses_say_so(ranks, kind, leavers):
    ends = ranks.run(leave_while_it_pauses, kind, leavers, world_size=2)
    assert [steps for steps, _ in ends] == [3, 3]
    for rank, (_, error) in enumerate(ends):
        assert ("was left before batch 3" in error) is (rank not in leavers)


def pause_averages(mesh):
    collection, optimizer = make(mesh, "dynamic, averaged")
    errors = []
    for window in Pipeline(collection).windows(batches(mesh.rank, "dynamic", count=4)):
        train(window, optimizer)
        try:
            collection.statistics("item", [1])
        except RowmeshError as error:
            errors.append(str(error))
    collection.close()
    return collection.step_count, errors


def test_what_cannot_be_taken_back_is_not_paused(ranks):
    """And the loop goes on."""
    for steps, errors in ranks.run(pause_averages, world_size=2):
        assert steps == 4
        assert errors
        assert all("has opened a batch ahead that cannot be taken back" in error for error in errors)


def test_rows_that_are_set_between_two_windows_are_those_that_the_next_one_reads():
    (collection, optimizer), (plain, plain_optimizer) = make(Mesh(), "tiered"), make(Mesh(), "tiered")

    def reset(tables):
        tables.forget_differences()
        for piece in tables.held_rows("item"):
            piece.values.zero_()

    for window in Pipeline(collection, depth=2).windows(batches(0, "tiered")):
        train(window, optimizer)
        reset(collection)
    for item in batches(0, "tiered"):
        plain(item.sparse).values.square().sum().backward()
        plain_optimizer.step()
        reset(plain)
    assert torch.equal(*(tables.local_rows("item")[0].values for tables in (collection, plain)))


def test_a_loop_that_is_left_near_the_end_of_its_data_decides_nothing_more():
    """Its pipeline has read, routed and opened all that there is."""
    (collection, optimizer), (plain, plain_optimizer) = make(Mesh(), "dynamic"), make(Mesh(), "dynamic")
    for number, window in enumerate(Pipeline(collection, depth=4).windows(batches(0, "dynamic", count=5)), 1):
        train(window, optimizer)
        if number == 2:
            collection.engine.wait()
            break
    for item in batches(0, "dynamic", count=2):
        plain(item.sparse).values.square().sum().backward()
        plain_optimizer.step()
    mine, theirs = (tables.statistics("item", [*range(50)]) for tables in (collection, plain))
    assert mine.count.tolist() == theirs.count.tolist()
    assert mine.known.tolist() == theirs.known.tolist()


def test_windows_are_numbered_on_where_a_loop_is_left_while_it_pauses():
    """Marks of rows name the windows that touched them."""
    collection, _ = make(Mesh(), "tiered")
    optimizer, numbers = EmbeddingOptimizer(collection), []
    with Pipeline(collection, depth=2, verify=True) as pipeline:
        for _ in range(3):
            for window in pipeline.windows(batches(0, "tiered")):
                assert window.window is not None
                numbers.append(window.window.number)
                train(window, optimizer)
                if window.number == 4:
                    pipeline.pause()
                    break
    assert numbers == sorted(set(numbers))
    assert collection.step_count == 15


def test_two_loops_one_after_the_other():
    collection, _ = make(Mesh(), "dynamic")
    optimizer, done = EmbeddingOptimizer(collection), []
    with Pipeline(collection, depth=2) as pipeline:
        for _ in range(2):
            for window in pipeline.windows(batches(0, "dynamic", count=3)):
                done.append(window.number)
                train(window, optimizer)
                pipeline.pause()
    assert done == [0, 1, 2, 0, 1, 2]
