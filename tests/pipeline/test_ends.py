"""Ends of data, errors ahead, and loops that are left: every rank has trained the same steps, and can go on."""

import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
from numba.core.compiler_lock import global_compiler_lock

from rowmesh import AdaGrad, EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, TableSpec
from rowmesh.data import Batch
from rowmesh.errors import DataError, RowmeshError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.pipeline import Pipeline, loop, runner
from rowmesh.tables import Dynamic, Uniform
from tests.support.ranks import RankPool
from tests.support.tables import table

NUM_ROWS, NUM_BATCHES, BAD = 50, 9, 5
TIMEOUT_S = 3.0
DYNAMIC = TableSpec(
    name="item",
    dim=4,
    storage="dynamic",
    dynamic=Dynamic(capacity=24, shards=1, admit_after=1),
    initializer=Uniform(bound=0.1),
)
TABLES = {
    "dynamic": [DYNAMIC],
    "dynamic, one-sided": [DYNAMIC, table("word", NUM_ROWS, 4)],
    "dynamic, averaged": [DYNAMIC],
    "collective": [table("item", NUM_ROWS, 4)],
    "one_sided": [table("item", NUM_ROWS, 4)],
    "tiered": [TableSpec(name="item", num_rows=NUM_ROWS, dim=4, storage="tiered")],
    "cores": [TableSpec(name="item", num_rows=NUM_ROWS, dim=4, storage="tensor_train", optimizer=AdaGrad())],
    "both": [
        table("item", NUM_ROWS, 4),
        TableSpec(name="word", num_rows=60, dim=4, storage="tensor_train", optimizer=AdaGrad()),
    ],
}


def make(mesh, kind):
    transport = "auto"
    if kind == "dynamic, averaged":
        averages = Synchronization("average", every=2)
        collection = EmbeddingCollection(TABLES[kind], mesh=mesh, replicas=2, synchronization=averages)
        return collection, EmbeddingOptimizer(collection)
    if mesh.world_size > 1 and kind != "tiered":
        transport = "one_sided" if kind in ("one_sided", "dynamic, one-sided") else "collective"
    collection = EmbeddingCollection(TABLES[kind], mesh=mesh, transport=transport)
    return collection, EmbeddingOptimizer(collection)


def batch_of(ids, kind):
    bags = {"item": [[i] for i in ids]}
    if kind in ("both", "dynamic, one-sided"):
        bags["word"] = bags["item"]
    return Batch(torch.zeros(len(ids), 0), SparseBatch.from_bags(bags), torch.zeros(len(ids)))


def batches(rank, kind, count=NUM_BATCHES, spoil=None):
    """`spoil` is the number of a batch and what becomes of it there."""
    generator = torch.Generator().manual_seed(rank)
    for number in range(count):
        ids = torch.randint(0, NUM_ROWS, (8,), generator=generator).tolist()
        if spoil is not None and number == spoil[0]:
            if spoil[1] == "raises":
                raise DataError("line 7 is not a sample")
            if spoil[1] == "ends":
                return
            if spoil[1] == "bad id":
                ids[3] = NUM_ROWS
            if spoil[1] == "no room":
                ids = list(range(NUM_ROWS))
        yield batch_of(ids, kind)


def train(window, optimizer):
    for part in window:
        part.embeddings.values.square().sum().backward()
    optimizer.step()


def values(collection):
    found = []
    for spec in collection.tables:
        if spec.storage == "dynamic":
            known = collection.known_rows(spec.name)
            found += [known.ids, known.values, known.counts, known.last_steps, known.scores, *known.state.values()]
            counters = collection.dynamic_counters[spec.name] if len(known.ids) else None
            found.append(torch.tensor([counters.admitted, counters.evicted, counters.hits] if counters else []))
        elif spec.storage == "tensor_train":
            found += [core.clone() for core in collection.cores(spec.name).cores]
        else:
            found += [piece.values.clone() for piece in collection.local_rows(spec.name)]
    return found


def train_plain(mesh, kind, numbers, micro_batches=1, looked_at=()):
    """What a loop in turn trains on these batches; others it looks up alone."""
    collection, optimizer = make(mesh, kind)
    for number, item in enumerate(batches(mesh.rank, kind)):
        if number in looked_at:
            collection(item.sparse)
        if number not in numbers:
            continue
        # A pipeline each, so that nothing is ahead.
        with Pipeline(collection, depth=0, micro_batches=micro_batches, overlap=False) as pipeline:
            for window in pipeline.windows([item]):
                train(window, optimizer)
    rows = values(collection)
    collection.close()
    return rows


def same(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def meet_an_error(mesh, kind, how, depth, micro_batches, culprits, overlap=True):
    """Trains until the error, then goes on with the batches behind it."""
    collection, optimizer = make(mesh, kind)
    spoil = (BAD, how) if mesh.rank in culprits else None
    given, error, threads = 0, None, set(threading.enumerate())
    pipeline = Pipeline(collection, depth=depth, micro_batches=micro_batches, overlap=overlap)
    try:
        for window in pipeline.windows(batches(mesh.rank, kind, spoil=spoil)):
            train(window, optimizer)
            given += 1
    except RowmeshError as caught:
        error = type(caught).__name__, str(caught)
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("rowmesh")]
    steps, rows = collection.step_count, values(collection)
    behind = [item for number, item in enumerate(batches(mesh.rank, kind)) if number > BAD]
    for window in pipeline.windows(behind):
        train(window, optimizer)
    after = values(collection)
    pipeline.close()
    collection.close()
    return given, steps, error, left, rows, after


def check_an_error(ends, plain, gone_on, culprits, how):
    for rank, (given, steps, error, left, rows, after) in enumerate(ends):
        assert (given, steps, left) == (BAD, BAD, []), (rank, error)
        assert same(rows, plain[rank])
        assert same(after, gone_on[rank])
        kind, text = error or ("none", "")
        if how == "ends":
            if len(culprits) == len(ends):
                assert error is None
            else:
                assert kind == "PeerError"
                ended = ", ".join(map(str, sorted(culprits)))
                assert text.startswith(f"rank {rank}: ranks are out of step: rank"), text
                assert f"{ended} has no batch {BAD} and rank" in text or f"s {ended} has no batch" in text, text
        elif rank in culprits:
            stage = "read" if how == "raises" else "route"
            assert text.startswith(f"rank {rank} in stage '{stage}' of batch {BAD}: "), text
            assert kind == {"raises": "DataError", "no room": "NoRoomError"}.get(how, "IdRangeError")
        elif how == "no room":  # an owner has none, and says so to all
            assert kind == "NoRoomError"
        else:
            assert kind == "PeerError"
            assert f"could not read batch {BAD} or make it ready; " in text, text


HOWS = ("raises", "ends", "bad id")
KINDS = ("collective", "one_sided", "tiered", "cores", "both")
DYNAMICS = ("dynamic", "dynamic, one-sided")
CASES = [
    *((how, kind) for how in HOWS for kind in KINDS),
    *((how, kind) for how in ("raises", "ends", "no room") for kind in DYNAMICS),
    ("bad id", "dynamic, one-sided"),
]


@pytest.mark.parametrize("how, kind", [case for case in CASES if case[1] not in ("one_sided", "both")])
def test_an_error_ahead_is_the_end_of_data_on_one_rank(how, kind):
    for depth, micro_batches, overlap in ((0, 1, True), (1, 2, True), (3, 1, True), (3, 2, False)):
        ends = [meet_an_error(Mesh(), kind, how, depth, micro_batches, {0}, overlap)]
        before, behind = range(BAD), [n for n in range(NUM_BATCHES) if n != BAD]
        plain = [train_plain(Mesh(), kind, before, micro_batches)]
        gone_on = [train_plain(Mesh(), kind, behind, micro_batches)]
        check_an_error(ends, plain, gone_on, {0}, how)


def meet_errors(mesh, kind, how, micro_batches, cases):
    before, behind = range(BAD), [number for number in range(NUM_BATCHES) if number != BAD]
    plain = [train_plain(mesh, kind, numbers, micro_batches) for numbers in (before, behind)]
    return [(meet_an_error(mesh, kind, how, depth, micro_batches, each), *plain) for depth, each in cases]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("how, kind", CASES)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_ahead_is_the_end_of_data_on_all_ranks(ranks, how, kind, world_size, micro_batches):
    """Loops in a row on one mesh, none of which hangs or meets a message of the one before."""
    culprits = [{1}, {0}, set(range(world_size))]
    cases = [(depth, each) for depth in (0, 1, 3) for each in culprits]
    found = ranks.run(meet_errors, kind, how, micro_batches, cases, world_size=world_size)
    for (_, each), of_ranks in zip(cases, zip(*found, strict=True), strict=True):
        ends, plain, gone_on = zip(*of_ranks, strict=True)
        check_an_error(ends, plain, gone_on, each, how)


# A loop that is left


class BodyError(Exception):
    """Of a loop's body."""


def leave(mesh, kind, how, depth, micro_batches, culprits, disturb=None):
    """Leaves the fourth batch, or after it, on some ranks; then all go on with the next batches."""
    collection, optimizer = make(mesh, kind)
    given, error, threads = 0, None, set(threading.enumerate())
    pipeline = Pipeline(collection, depth=depth, micro_batches=micro_batches, disturb=disturb)
    try:
        for window in pipeline.windows(batches(mesh.rank, kind)):
            given += 1
            goes = given == 4 and mesh.rank in culprits
            for place, part in enumerate(window):
                if goes and how == "amid" and place == micro_batches - 1:
                    raise BodyError
                part.embeddings.values.square().sum().backward()
            if goes and how == "before its step":
                break
            optimizer.step()
            if goes and how == "after its step":
                raise BodyError
    except (RowmeshError, BodyError) as caught:
        error = type(caught).__name__, str(caught)
    left = [thread.name for thread in set(threading.enumerate()) - threads if thread.name.startswith("rowmesh")]
    steps, rows = collection.step_count, values(collection)
    behind = [item for number, item in enumerate(batches(mesh.rank, kind)) if number > BAD]
    for window in pipeline.windows(behind):
        train(window, optimizer)
    after = values(collection)
    pipeline.close()
    collection.close()
    return given, steps, error, left, rows, after


def leave_loops(mesh, kind, how, micro_batches, cases):
    trained = range(4 if how == "after its step" else 3)
    behind = [*trained, *range(BAD + 1, NUM_BATCHES)]
    looked_at = () if how == "after its step" else (3,)
    plain = [train_plain(mesh, kind, numbers, micro_batches, looked_at) for numbers in (trained, behind)]
    return [(leave(mesh, kind, how, depth, micro_batches, each), *plain) for depth, each in cases]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("how", ["amid", "before its step", "after its step"])
@pytest.mark.parametrize("kind", [*KINDS, *DYNAMICS])
def test_a_loop_that_is_left_on_some_ranks(ranks, how, kind, micro_batches):
    cases = [(depth, each) for depth in (0, 1, 3) for each in ({1}, {0}, {0, 1})]
    found = ranks.run(leave_loops, kind, how, micro_batches, cases, world_size=2)
    for (_, culprits), of_ranks in zip(cases, zip(*found, strict=True), strict=True):
        ends, plain, gone_on = zip(*of_ranks, strict=True)
        for rank, (given, steps, error, left, rows, after) in enumerate(ends):
            assert (steps, left) == (4 if how == "after its step" else 3, []), (rank, error)
            assert same(rows, plain[rank])
            assert same(after, gone_on[rank])
            if rank in culprits:
                assert error == (None if how == "before its step" else ("BodyError", ""))
            else:
                (gone,) = culprits
                assert error[0] == "PeerError"
                assert f"rank {gone}" in error[1]
                assert "left" in error[1]
                assert given <= steps + 1


# What replica groups decide for themselves, and what one thread learns before another


def leave_amid_kernels(mesh, compiles):
    """Rank 1 leaves its loop while a thread of a rank compiles for longer than it waits for others."""

    def disturb(task):
        if mesh.rank == compiles and (task.stage, task.batch) == ("gradients", 3):
            with global_compiler_lock:
                time.sleep(6.0)

    leave(mesh, "collective", "before its step", 1, 1, {1})  # kernels are there
    with mock.patch.object(loop, "_LEAVE_S", 3.0), mock.patch.object(runner, "_CLOSE_S", 3.0):
        return leave(mesh, "collective", "before its step", 1, 1, {1}, disturb)


@pytest.mark.parametrize("compiles", [0, 1])
def test_a_loop_that_is_left_waits_for_ranks_that_compile(ranks, compiles):
    kept, left = ranks.run(leave_amid_kernels, compiles)
    assert "rank 1 left its loop amid batch 3" in kept[2][1]
    assert kept[1] == left[1] == 3
    assert left[3] == [], "threads are left behind"


def end_averages(mesh, how, depth, culprits):
    """Averages are due after the sixth batch, which some ranks do not have; then all go on."""
    kind = "dynamic, averaged"
    if how != "leaves":
        return meet_an_error(mesh, kind, how, depth, 1, culprits)
    collection, optimizer = make(mesh, kind)
    given, error = 0, None
    pipeline = Pipeline(collection, depth=depth)
    try:
        for window in pipeline.windows(batches(mesh.rank, kind)):
            train(window, optimizer)
            given += 1
            if given == BAD and mesh.rank in culprits:
                break
    except RowmeshError as caught:
        error = type(caught).__name__, str(caught)
    steps, rows = collection.step_count, values(collection)
    for window in pipeline.windows([item for number, item in enumerate(batches(mesh.rank, kind)) if number > BAD]):
        train(window, optimizer)
    after = values(collection)
    collection.close()
    return given, steps, error, [], rows, after


@pytest.mark.parametrize("how", ["raises", "ends", "no room", "leaves"])
def test_averages_that_are_due_after_a_batch_that_one_replica_group_lacks(ranks, how):
    kind, before, behind = "dynamic, averaged", range(BAD), [n for n in range(NUM_BATCHES) if n != BAD]
    plain, gone_on = (ranks.run(train_plain, kind, numbers, world_size=2) for numbers in (before, behind))
    for depth in (0, 1):
        for culprit in (0, 1):
            ends = ranks.run(end_averages, how, depth, {culprit}, world_size=2)
            for rank, (given, steps, error, left, rows, after) in enumerate(ends):
                assert (steps, left) == (BAD, []), (rank, error)
                assert same(rows, plain[rank])
                assert same(after, gone_on[rank])
                if rank != culprit:
                    assert error[0] == "PeerError"
                    assert f"ranks [{culprit}]" in error[1] or f"rank {culprit}" in error[1]
                    assert given <= BAD + (how == "leaves")


def refuse_before_averages(mesh, depth, overlap):
    """One rank steps the fifth batch at another learning rate; after the sixth one averages are due."""
    collection, optimizer = make(mesh, "dynamic, averaged")
    error = ""
    try:
        for window in Pipeline(collection, depth=depth, overlap=overlap).windows(batches(mesh.rank, "dynamic")):
            if window.number == BAD - 1 and mesh.rank == 1:
                optimizer.param_groups[0]["lr"] *= 2
            train(window, optimizer)
    except RowmeshError as caught:
        error = str(caught)
    rows = values(collection)
    collection.close()
    return rows, error


def look_at_the_last(mesh):
    return train_plain(mesh, "dynamic, averaged", range(BAD - 1), looked_at=(BAD - 1,))


@pytest.mark.parametrize("overlap", [True, False])
def test_no_average_is_made_ahead_of_a_step_that_is_refused(ranks, overlap):
    plain = ranks.run(look_at_the_last, world_size=2)
    for depth in (0, 1):
        for rank, (rows, error) in enumerate(ranks.run(refuse_before_averages, depth, overlap, world_size=2)):
            assert "ranks disagree about how fast" in error
            assert same(rows, plain[rank])


def end_in_another_group(mesh, late):
    """Data end on rank 3, which the other replica group learns when rows are due; one of its ranks routes late."""

    def disturb(task):
        if mesh.rank == late and (task.stage, task.batch) == ("route", BAD + 1):
            time.sleep(0.3)

    averages = Synchronization("average", every=100)
    collection = EmbeddingCollection([DYNAMIC], mesh=mesh, replicas=2, synchronization=averages)
    optimizer, error, began = EmbeddingOptimizer(collection), None, time.monotonic()
    pipeline = Pipeline(collection, depth=1, disturb=disturb)
    try:
        for window in pipeline.windows(batches(mesh.rank, "dynamic", spoil=(BAD, "ends") if mesh.rank == 3 else None)):
            train(window, optimizer)
    except RowmeshError as caught:
        error = type(caught).__name__
    steps, took_s = collection.step_count, time.monotonic() - began
    for window in pipeline.windows(batches(mesh.rank, "dynamic")):
        train(window, optimizer)
    after = collection.step_count
    collection.close()
    return steps, error, after, took_s


@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_learn_of_the_end_early_decide_with_the_others_until_they_know(ranks, late):
    for steps, error, after, took_s in ranks.run(end_in_another_group, late, world_size=4):
        assert (steps, error, after) == (BAD, "PeerError", BAD + NUM_BATCHES)
        assert took_s < ranks._mesh_timeout_s / 2


# What fails once ranks have agreed on a batch


def fail_after_all(mesh, kind, stage):
    """One of three batches ahead fails on rank 1 after its first message; the others wait for it in vain."""
    mesh = replace(mesh, timeout_s=TIMEOUT_S)

    def disturb(task):
        if mesh.rank == 1 and (task.stage, task.batch) == (stage, 3):
            raise MemoryError("no room for messages")

    collection, optimizer = make(mesh, kind)
    error = None
    pipeline = Pipeline(collection, depth=1, micro_batches=2, disturb=disturb)
    try:
        for window in pipeline.windows(batches(mesh.rank, kind)):
            train(window, optimizer)
    except RowmeshError as caught:
        error = type(caught).__name__, str(caught)
    return collection.step_count, values(collection), error


STAGES = [
    pytest.param(kind, stage, marks=() if (kind, stage) == ("collective", "final") else pytest.mark.slow)
    for kind in ("collective", "one_sided")
    for stage in ("final", "rows", "gradients", "update")
    if (kind, stage) != ("one_sided", "final")  # when nothing is done
]


@pytest.mark.parametrize("kind, stage", STAGES)
def test_steps_that_all_ranks_took_are_done_whatever_fails_ahead(kind, stage):
    pool = RankPool(mesh_timeout_s=30.0, world_size=2)
    try:
        ends = pool.run(fail_after_all, kind, stage, world_size=2)
    finally:
        pool.close()
    pool = RankPool(mesh_timeout_s=30.0, world_size=2)
    try:
        plain = pool.run(train_plain, kind, range(3), 2, world_size=2)
    finally:
        pool.close()
    for rank, (steps, rows, error) in enumerate(ends):
        assert steps == 3, error
        assert same(rows, plain[rank])
        assert error[0] == ("PeerError" if rank == 0 else "RowmeshError")
    assert ends[1][2][1] == f"rank 1 in stage '{stage}' of batch 3: MemoryError: no room for messages"
