"""What a program can do wrong around a pipeline, and what it may do: nothing is stale, and nothing waits for ever."""

import gc
import threading
import time
from dataclasses import replace

import pytest
import torch

import rowmesh
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch
from rowmesh.data import Batch
from rowmesh.errors import DataError, RowmeshError
from rowmesh.pipeline import Pipeline
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from tests.support.tables import table

ITEM = table("item", 100, 3)


def make(mesh=None, **options):
    collection = EmbeddingCollection([ITEM], mesh=mesh or Mesh(), transport="collective" if mesh else "auto", **options)
    return collection, EmbeddingOptimizer(collection)


def items(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        sparse = SparseBatch.from_bags({"item": torch.randint(0, 100, (6, 2), generator=generator).tolist()})
        yield Batch(torch.zeros(6, 0), sparse, torch.zeros(6))


def compute(window):
    for part in window:
        part.embeddings.values.square().sum().backward()


def train(window, optimizer):
    compute(window)
    optimizer.step()


def values(collection, name="item"):
    return torch.cat([piece.values.clone() for piece in collection.local_rows(name)])


def look_up(collection):
    with torch.no_grad():
        return collection(next(items(1)).sparse).values.clone()


def test_micro_batches_are_given_once():
    collection, optimizer = make()
    with Pipeline(collection, micro_batches=2) as pipeline:
        for window in pipeline.windows(items(2)):
            compute(window)
            with pytest.raises(RowmeshError, match=r"the micro-batches of batch \d were given before"):
                compute(window)
            optimizer.step()


def test_a_loop_that_cannot_begin_leaves_the_collection_free(monkeypatch):
    collection, optimizer = make()
    pipeline = Pipeline(collection)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline._windows.all[0], "begin", failing)
        with pytest.raises(RowmeshError, match="nothing begins"):
            next(pipeline.windows(items(2)))
    look_up(collection)
    for window in pipeline.windows(items(2)):
        train(window, optimizer)
    assert collection.step_count == 2


def failing(number):
    raise RowmeshError("nothing begins")


def test_a_loop_that_was_closed_ends_no_other():
    collection, optimizer = make()
    pipeline = Pipeline(collection)
    old = pipeline.windows(items(5))
    train(next(old), optimizer)
    pipeline.close()
    for number, window in enumerate(pipeline.windows(items(5))):
        if number == 1:
            del old
            gc.collect()
        train(window, optimizer)
    assert collection.step_count == 6


def test_a_batch_whose_loop_was_left():
    collection, optimizer = make()
    pipeline = Pipeline(collection, micro_batches=2)
    left = next(running := pipeline.windows(items(3)))
    part = next(iter(left))
    pipeline.close()
    with pytest.raises(RowmeshError, match="batch 0 is not under way any more: its loop was left"):
        part.embeddings.values.sum().backward()
    for window in pipeline.windows(items(3)):
        train(window, optimizer)
    running.close()


def test_two_pipelines_of_one_collection():
    collection, optimizer = make()
    first, second = Pipeline(collection), Pipeline(collection)
    running = first.windows(items(3))
    train(next(running), optimizer)
    with pytest.raises(RowmeshError, match=r"a pipeline runs, .* leave its loop before another one begins"):
        next(second.windows(items(3)))
    train(next(running), optimizer)
    running.close()
    for window in second.windows(items(3)):
        train(window, optimizer)
    assert collection.step_count == 5


def pipeline_two_collections(mesh):
    (first, one), (second, other) = make(mesh), make(mesh)
    running = Pipeline(first).windows(items(3, mesh.rank))
    train(next(running), one)
    try:
        next(Pipeline(second).windows(items(3, mesh.rank)))
    except RowmeshError as error:
        message = str(error)
    for window in running:
        train(window, one)
    for window in Pipeline(second).windows(items(3, mesh.rank)):
        train(window, other)
    same = torch.equal(values(first), values(second))
    first.close()
    second.close()
    return message, same


def test_two_pipelines_at_once_on_one_mesh(ranks):
    for rank, (message, same) in enumerate(ranks.run(pipeline_two_collections, world_size=2)):
        assert message.startswith(f"rank {rank}: a pipeline runs on this mesh already, and messages of two would cross")
        assert same


def pipeline_side_by_side(mesh, folder, storages):
    """Two loops at once, and what the same loops train one after the other."""
    made, late = [], lambda task: time.sleep(0.001 * (len(task.stage) % 3))
    for side_by_side in (True, False):
        tables = [
            replace(ITEM, name=name, features=("item",), storage=storage)
            for name, storage in zip("ab", storages, strict=True)
        ]
        first = EmbeddingCollection(tables[:1], mesh=mesh)
        second = EmbeddingCollection(tables[1:], mesh=mesh.apart("second"))
        one, other = EmbeddingOptimizer(first), EmbeddingOptimizer(second)
        loops = [
            Pipeline(tables, depth=2, micro_batches=2, disturb=late).windows(items(6, mesh.rank + seed))
            for seed, tables in enumerate((first, second))
        ]
        if side_by_side:
            for mine, theirs in zip(*loops, strict=True):
                train(mine, one)
                train(theirs, other)
        else:
            for loop, optimizer in zip(loops, (one, other), strict=True):
                for window in loop:
                    train(window, optimizer)
        rowmesh.save(folder / f"{side_by_side}", {"first": first, "second": second})
        made.append((values(first, "a"), values(second, "b")))
        first.close()
        second.close()
    return all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@pytest.mark.parametrize("storages", [("dense", "dense"), ("tiered", "dense")])
def test_two_pipelines_side_by_side(ranks, tmp_path, storages):
    assert ranks.run(pipeline_side_by_side, tmp_path, storages, world_size=2) == [True, True]


# Between windows, and within


def be_late(task):
    if task.stage == "update":
        torch.rand(1 << 22).sort()


def test_what_is_read_between_windows_is_after_the_step():
    collection, optimizer = make()
    plain, plain_optimizer = make()
    with Pipeline(collection, depth=2, disturb=be_late) as pipeline:
        for window, item in zip(pipeline.windows(items(4)), items(4), strict=True):
            train(window, optimizer)
            count = optimizer.state_dict()["step_count"]
            plain(item.sparse).values.square().sum().backward()
            plain_optimizer.step()
            assert count == plain.step_count
            assert torch.equal(look_up(collection), look_up(plain))
            assert torch.equal(values(collection), values(plain))


READS = {
    "look up": look_up,
    "values": values,
    "synchronize": EmbeddingCollection.synchronize,
    "barrier": EmbeddingCollection.barrier,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_nothing_is_read_within_a_window(read):
    collection, optimizer = make()
    with Pipeline(collection, micro_batches=2) as pipeline:
        for number, window in enumerate(pipeline.windows(items(3))):
            for part in window:
                part.embeddings.values.sum().backward()
                with pytest.raises(RowmeshError, match=f"batch {number} of the pipeline is half way"):
                    read(collection)
            with pytest.raises(RowmeshError, match="half way"):
                pipeline.wait()
            optimizer.step()


def test_nothing_is_set_amid_a_window_and_nothing_pushed_beside_it():
    collection, optimizer = make()
    with Pipeline(collection) as pipeline:
        for window in pipeline.windows(items(3)):
            for change in (
                lambda: collection.forget_differences(),
                lambda: collection.freeze("item"),
                lambda: collection.migrate(collection.plan),
            ):
                with pytest.raises(RowmeshError, match=r"batch \d of the pipeline is half way"):
                    change()
            train(window, optimizer)
            with pytest.raises(RowmeshError, match=r"a pipeline runs, .* leave its loop before rows are updated"):
                collection.push([], [0.1])
    collection.forget_differences()


def train_over_a_migration(mesh, transport, pipelined):
    collection = EmbeddingCollection([ITEM], mesh=mesh, transport=transport)
    optimizer, parts = EmbeddingOptimizer(collection), []
    ranges = [
        (RowRange(0, 50, "fixed", rank=1), RowRange(50, 100, "fixed", rank=0)),
        (RowRange(0, 7, "replicated"), RowRange(7, 100)),
    ]
    pipeline = Pipeline(collection, depth=2, verify=True)
    for number in range(3):
        if pipelined:
            for window in pipeline.windows(items(3, mesh.rank + 2 * number)):
                train(window, optimizer)
        else:
            for item in items(3, mesh.rank + 2 * number):
                collection(item.sparse).values.square().sum().backward()
                optimizer.step()
        parts.append({row: row_values for piece in collection.local_rows("item") for row, row_values in rows_of(piece)})
        if number < 2:
            collection.migrate(Plan((TablePlan(TableShape.of(ITEM), ranges[number]),), 2, 2))
    collection.close()
    return parts


def rows_of(piece):
    return zip(piece.rows, piece.values.clone().unbind(), strict=True)


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
def test_a_pipeline_goes_on_after_a_migration(ranks, transport):
    """A batch that the program still has, here the last one of the loop, holds nothing up."""
    mine = ranks.run(train_over_a_migration, transport, True, world_size=2)
    plain = ranks.run(train_over_a_migration, transport, False, world_size=2)
    for ours, theirs in zip(mine, plain, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.equal(a[row], b[row]) for row in a)


def count_memory(mesh):
    collection, _ = make(mesh)
    before = collection.memory_bytes["buffers"]
    pipeline = Pipeline(collection, verify=True)
    reported = collection.memory_bytes["buffers"] - before
    rows = sum(len(piece.rows) for piece in collection.held_rows("item"))
    del pipeline
    collection.close()
    return reported, rows, collection.memory_bytes["buffers"] - before


def test_what_a_pipeline_holds_is_counted(ranks):
    for reported, rows, left in ranks.run(count_memory, world_size=2):
        assert reported > 8 * rows  # of each row, who asked for it last, and who changed it
        assert left == 0


def test_a_loop_that_failed_is_over_though_the_program_keeps_it():
    """As one does that keeps what was raised: another loop can begin."""
    given = threading.Event()

    def spoil(task):
        if (task.stage, task.batch, task.part) == ("rows", 1, 1) and not kept:
            given.wait()
            raise ValueError("spoilt")

    kept = []
    collection, optimizer = make()
    pipeline = Pipeline(collection, micro_batches=2, disturb=spoil)
    running = pipeline.windows(items(3))
    train(next(running), optimizer)
    window = next(running)
    given.set()
    with pytest.raises(RowmeshError, match="in stage 'rows' of batch 1: ValueError: spoilt"):
        train(window, optimizer)
    kept.append(running)
    for window in pipeline.windows(items(3)):
        train(window, optimizer)
    assert collection.step_count == 4


# Gradients that are forgotten, items that are none, shares of a batch


def forget(mesh, transport, forgetful):
    """zero_grad() before the step of the third batch: what a plain loop's step does then."""
    collection = EmbeddingCollection([ITEM], mesh=mesh, transport=transport)
    optimizer, error = EmbeddingOptimizer(collection), ""
    pipeline = Pipeline(collection, depth=2, micro_batches=2, verify=True)
    try:
        for number, window in enumerate(pipeline.windows(items(5, mesh.rank))):
            optimizer.zero_grad()  # no backward yet
            compute(window)
            if number == 2 and mesh.rank in forgetful:
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()  # the step has them
    except RowmeshError as caught:
        error = str(caught)
    pipeline.close()
    return values(collection), collection.step_count, error


def skip(mesh, transport, count):
    collection = EmbeddingCollection([ITEM], mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    for number, item in enumerate(items(count, mesh.rank)):
        if number == 2:
            optimizer.step()
            continue
        for window in Pipeline(collection, depth=0, micro_batches=2).windows([item]):
            train(window, optimizer)
    return values(collection), collection.step_count


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
def test_gradients_are_forgotten_on_all_ranks_or_the_step_is_refused(ranks, transport):
    found = ranks.run(forget, transport, {0, 1}, world_size=2)
    for (rows, steps, error), (expected, count) in zip(found, ranks.run(skip, transport, 5), strict=True):
        assert (error, steps) == ("", count)
        assert torch.equal(rows, expected)
    found = ranks.run(forget, transport, {1}, world_size=2)
    for (rows, steps, error), (expected, count) in zip(found, ranks.run(skip, transport, 2), strict=True):
        assert "rank 1 called zero_grad() before the step of batch 2 and other ranks did not" in error
        assert steps == count == 2
        assert torch.equal(rows, expected)


def test_gradients_are_forgotten_on_one_rank():
    rows, steps, error = forget(Mesh(), "auto", {0})
    expected, count = skip(Mesh(), "auto", 5)
    assert (error, steps) == ("", count)
    assert torch.equal(rows, expected)


def test_gradients_are_not_forgotten_amid_a_batch():
    collection, optimizer = make()
    with Pipeline(collection, micro_batches=2) as pipeline:
        for window in pipeline.windows(items(1)):
            for number, part in enumerate(window):
                part.embeddings.values.sum().backward()
                if number == 0:
                    with pytest.raises(RowmeshError, match="of batch 0 are forgotten after 1 of its micro-batches"):
                        optimizer.zero_grad()
            optimizer.step()


class WithoutTake:
    def __init__(self, sparse):
        self.sparse = sparse


def test_items_that_are_none():
    collection, optimizer = make()
    with pytest.raises(
        DataError, match=r"stage 'route' of batch 0: .* gave an item of type SparseBatch without 'sparse'"
    ):
        next(Pipeline(collection).windows([item.sparse for item in items(2)]))
    bare = [WithoutTake(item.sparse) for item in items(2)]
    with pytest.raises(
        DataError, match=r"stage 'route' of batch 0: .* gave an item of type WithoutTake without 'take'"
    ):
        next(Pipeline(collection, micro_batches=2, clustering="greedy").windows(bare))
    for window in Pipeline(collection, micro_batches=2).windows(bare):
        train(window, optimizer)
    assert collection.step_count == 2


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_means_of_micro_batches_add_up_by_their_weights(parts):
    """Also where some micro-batches have no samples: six samples in eight."""
    (collection, optimizer), (plain, plain_optimizer) = make(), make()
    for window in Pipeline(collection, micro_batches=parts).windows(items(1)):
        assert sum(part.weight for part in rows_of_parts(window)) == pytest.approx(1.0)
        optimizer.step()
    for item in items(1):
        plain(item.sparse).values.square().mean(1).mean().backward()
        plain_optimizer.step()
    torch.testing.assert_close(values(collection), values(plain))


def rows_of_parts(window):
    for part in window:
        loss = part.embeddings.values.square().mean(1)
        (loss.mean() * part.weight if len(loss) else loss.sum()).backward()
        yield part


def interrupted(task):
    if (task.stage, task.batch) == ("rows", 2):
        import _thread

        _thread.interrupt_main()


def train_all(pipeline, optimizer, taken):
    for window in pipeline.windows(items(4)):
        train(window, optimizer)
        taken.append(window.number)


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("overlap", [True, False])
def test_ctrl_c_leaves_a_loop_between_two_tasks(overlap):
    """Steps that were taken are in the rows, and counted; the next loop trains on."""
    (collection, optimizer), (plain, plain_optimizer), taken = make(), make(), []
    pipeline = Pipeline(collection, overlap=overlap, disturb=interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_all(pipeline, optimizer, taken)
    assert collection.step_count - len(taken) in (0, 1)  # Ctrl-C may come right behind the step
    for item in items(collection.step_count):
        plain(item.sparse).values.square().sum().backward()
        plain_optimizer.step()
    assert torch.equal(values(collection), values(plain))
    for window in Pipeline(collection).windows(items(1)):
        train(window, optimizer)
    assert collection.step_count == plain.step_count + 1
