"""Pipelines over tiered tables on a device, on one rank: the model of the loop in turn, with however little room."""

import functools
import time
from dataclasses import replace

import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, TableSpec
from rowmesh.data import Batch
from rowmesh.errors import NoRoomError
from rowmesh.pipeline import Pipeline
from rowmesh.tables import Tiers
from rowmesh.tables.update_rules import SGD
from tests.collection.test_equivalence import assert_same_bits
from tests.pipeline.test_device import IN_TURN, JOB, on_device
from tests.support.triton import kernels_of

pytestmark = pytest.mark.triton
kernels_of("pool")  # or all are skipped


def tiers(rows):
    return Tiers(fast_share=0.001, fast_rows=rows, verify=True, poison=True, timeout_s=20.0)


def compare(job, *pipelines):
    """A dense table beside tiered ones; micro-batches as they are in turn."""
    tables = (job.tables[0], *(replace(table, storage="tiered") for table in job.tables[1:]))
    mixed = replace(job, tables=tables, tiers=tiers(45))
    for options in pipelines:
        in_parts = options.get("micro_batches", 1) > 1
        plain = on_device(Mesh(), job, IN_TURN | options | {"depth": 0} if in_parts else None)
        assert_same_bits(on_device(Mesh(), mixed, options), plain)


def test_one_rank():
    job = replace(JOB, tables=JOB.tables[:2], batch_sizes=(3,), num_steps=3)
    compare(job, {"depth": 2, "micro_batches": 2})


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_any_depth(depth):
    job = replace(JOB, batch_sizes=(4,), is_weighted=True, evaluates=True, breaks=(1,), plain=(2,))
    compare(job, {"depth": depth}, {"depth": depth, "micro_batches": 3})


ITEM = TableSpec(name="item", num_rows=200, dim=3, storage="tiered", optimizer=SGD(lr=0.1))
ROWS = 6  # of a batch; each shares one with the batch before


def make(num_rows):
    collection = EmbeddingCollection([ITEM], tiers=tiers(num_rows), device="cuda")
    return collection, EmbeddingOptimizer(collection)


def item(number):
    rows = range(number * (ROWS - 1), number * (ROWS - 1) + ROWS)
    return Batch(torch.zeros(ROWS, 0), SparseBatch.from_bags({"item": [[row] for row in rows]}), torch.zeros(ROWS))


def train_on(window, optimizer):
    for part in window:
        part.embeddings.values.square().sum().backward()
    optimizer.step()


def rows_of(collection):
    return torch.cat([piece.values for piece in collection.local_rows("item")])


@functools.cache
def in_turn(count):
    """What the loop in turn leaves after so many batches."""
    collection, optimizer = make(200)
    for number in range(count):
        collection(item(number).sparse).values.square().sum().backward()
        optimizer.step()
    rows = rows_of(collection)
    collection.close()
    return rows


@pytest.mark.parametrize(("depth", "num_rows"), [(1, 6), (2, 11), (3, 40)])
def test_little_room(depth, num_rows):
    """What does not fit beside the batches before comes when they are updated."""
    collection, optimizer = make(num_rows)
    with Pipeline(collection, depth=depth, micro_batches=2) as pipeline:
        for window in pipeline.windows(item(number) for number in range(5)):
            train_on(window, optimizer)
    assert torch.equal(rows_of(collection), in_turn(5))
    counters = collection.tier_counters[collection.groups[0].name]
    assert counters.pins == 5
    assert counters.peak_frames <= num_rows
    collection.close()


@pytest.mark.parametrize("with_step", [False, True])
@pytest.mark.parametrize("num_rows", [6, 40])
def test_a_loop_that_is_left_gives_its_rows_up(with_step, num_rows):
    collection, optimizer = make(num_rows)
    pipeline, began = Pipeline(collection, depth=2, micro_batches=2), time.monotonic()
    for number, window in enumerate(pipeline.windows(item(number) for number in range(6))):
        if number == 2 and not with_step:
            next(iter(window))
            break
        train_on(window, optimizer)
        if number == 2:
            break
    assert time.monotonic() - began < 15
    with torch.no_grad():
        collection(item(9).sparse)  # takes all the room of a batch
    for number in range(2 + with_step, 4):
        collection(item(number).sparse).values.square().sum().backward()
        optimizer.step()
    assert torch.equal(rows_of(collection), in_turn(4))
    collection.close()


def test_a_batch_that_never_fits_is_told():
    collection, _ = make(5)
    with pytest.raises(NoRoomError, match=r"rank 0 in stage 'retrieve' of batch 0: .*a batch of 6 rows"):
        next(iter(Pipeline(collection, depth=1).windows(iter([item(0)]))))
    collection.close()
