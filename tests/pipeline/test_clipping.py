"""Clipping, and a GradScaler, in a pipeline: the norm and the model of plain torch, and steps that are left out."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from rowmesh import SGD, EmbeddingCollection, EmbeddingOptimizer, JointOptimizer, Mesh, SparseBatch, TableSpec
from rowmesh.data import Batch
from rowmesh.errors import ConfigurationError, PeerError, RowmeshError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.pipeline import Pipeline
from rowmesh.tables import Dynamic, TensorTrain, Tiers, Uniform
from tests.collection.test_equivalence import assert_close, assert_same_bits, on_ranks
from tests.support.pipelines import Delays
from tests.support.plans import in_groups, with_copies
from tests.support.scenario import Scenario
from tests.support.tables import several
from tests.support.training import merged, train_reference

DOUBLE = several("adam", torch.float64)
CORES = tuple(
    replace(spec, storage="tensor_train", tensor_train=TensorTrain(rank=2)) if spec.num_rows > 10 else spec
    for spec in several("sgd", torch.float64)
)
TIERED = tuple(replace(spec, storage="tiered") for spec in DOUBLE)
OPTIONS: dict[str, Any] = {"depth": 2, "micro_batches": 3, "verify": True}
JOB = Scenario(
    tables=DOUBLE,
    batch_sizes=(5, 4),
    num_steps=4,
    max_norm=0.02,
    decay=0.9,
    pipeline=OPTIONS,
)
FOUR = replace(JOB, batch_sizes=(3, 4, 0, 2))
FAST = Tiers(fast_share=0.01, fast_rows=200, verify=True, poison=True)
JOBS = {
    "by micro-batch": JOB,
    "naive": replace(JOB, pipeline=OPTIONS | {"exchange": "naive"}),
    "in turn": replace(JOB, pipeline={"depth": 0, "micro_batches": 2, "overlap": False}),
    "copied rows": replace(JOB, plan=with_copies(DOUBLE, world_size=2)),
    "two hosts": replace(FOUR, ranks_per_node=2),
    "exact replicas": in_groups(FOUR, 2),
    "tiers": replace(JOB, tables=TIERED, tiers=FAST),
    "cores": replace(JOB, tables=CORES),
    "scaled": replace(JOB, is_scaled=True),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_pipeline_clips_as_plain_torch(ranks, name):
    job = JOBS[name]
    assert_close(job, merged(job, on_ranks(ranks, job, "collective")), train_reference(job))


@pytest.mark.parametrize("transport", ["collective", "one_sided"])
def test_when_rows_move_changes_no_bit_of_a_clipped_job(ranks, transport):
    parts = []
    for options in ({"depth": 0, "overlap": False}, {"depth": 1, "disturb": Delays(1)}, {"depth": 3}):
        job = replace(JOB, pipeline=OPTIONS | options)
        parts.append(merged(job, on_ranks(ranks, job, transport)))
    assert_same_bits(parts[1], parts[0])
    assert_same_bits(parts[2], parts[0])


def test_what_travels_whole_is_clipped_as_in_the_plain_loop_to_the_bit(ranks):
    job = replace(JOB, pipeline={"depth": 2})
    mine, plain = (merged(each, on_ranks(ranks, each, "one_sided")) for each in (job, replace(job, pipeline=None)))
    assert_same_bits(mine, plain)


# Guests of dynamic tables, whose gradients are dropped

KNOWN = 7_000_000_005


def clip_beside_guests(mesh, transport, accumulate, pipelined):
    """Every batch has an id that is known by now, and one that is new; returns norms, and the row of the known one."""
    rules = Dynamic(capacity=8, admit_after=3 * mesh.world_size)
    how = {"storage": "dynamic", "dynamic": rules, "initializer": Uniform(bound=0.1)}
    tables = [TableSpec(name=name, dim=1, optimizer=SGD(lr=0.1), dtype=torch.float64, **how) for name in "ab"]
    embeddings = EmbeddingCollection(tables, mesh=mesh, transport=transport)
    optimizer, norms = EmbeddingOptimizer(embeddings), []
    sparse = [SparseBatch.from_bags({"a": [[1], []], "b": [[KNOWN], [number]]}) for number in range(7 * accumulate)]
    items = [Batch(torch.zeros(2, 0), each, torch.zeros(2)) for each in sparse]
    if pipelined:
        with Pipeline(embeddings, depth=2, micro_batches=2, accumulate=accumulate) as pipeline:
            for window in pipeline.windows(items):
                for part in window:
                    (part.embeddings.values + 1.0).square().sum().backward()
                norms.append(float(optimizer.clip_grad_norm_(0.5)))
                optimizer.step()
    else:
        for number, each in enumerate(sparse, 1):
            (embeddings(each).values + 1.0).square().sum().backward()
            if number % accumulate == 0:
                norms.append(float(optimizer.clip_grad_norm_(0.5)))
                optimizer.step()
    known = embeddings.known_rows("b")
    found = known.values[known.ids == KNOWN].clone()
    embeddings.close()
    return norms, found


@pytest.mark.parametrize("transport, accumulate", [("collective", 1), ("one_sided", 1), ("collective", 3)])
def test_gradients_of_guests_do_not_count(ranks, transport, accumulate):
    mine, plain = (ranks.run(clip_beside_guests, transport, accumulate, each, world_size=2) for each in (True, False))
    for (norms, rows), (others, expected) in zip(mine, plain, strict=True):
        assert norms == pytest.approx(others, rel=1e-12)
        assert 0.0 < norms[-1] < norms[4]
        torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-12)


# Steps that are left out

ITEM = TableSpec(name="item", num_rows=40, dim=3, optimizer=SGD(lr=0.1), dtype=torch.float64)
KINDS = {
    "collective": ITEM,
    "one_sided": ITEM,
    "tiered": replace(ITEM, storage="tiered"),
    "cores": replace(ITEM, storage="tensor_train", tensor_train=TensorTrain(rank=2)),
    "dynamic": TableSpec(
        name="item",
        dim=3,
        storage="dynamic",
        dynamic=Dynamic(capacity=40),
        initializer=Uniform(bound=0.1),
        optimizer=SGD(lr=0.1),
        dtype=torch.float64,
    ),
}
OVERFLOWS = (1, 2, 4)
NUM_ITEMS = 6


def items_of(rank):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(NUM_ITEMS):
        sparse = SparseBatch.from_bags({"item": torch.randint(0, 40, (6, 2), generator=generator).tolist()})
        yield Batch(torch.zeros(6, 0), sparse, torch.zeros(6))


class _Training:
    """A table and a dense network under one scaler; some steps overflow on the last rank, in the rows or elsewhere."""

    def __init__(self, mesh, kind, where="rows"):
        self.mesh, self.where, self.kind = mesh, where, kind
        transport = "auto" if mesh.world_size == 1 else "one_sided" if kind == "one_sided" else "collective"
        tiers = Tiers(fast_share=0.01, fast_rows=30, verify=True, poison=True)
        options: dict[str, Any] = {"tiers": tiers} if kind == "tiered" else {}
        self.embeddings = EmbeddingCollection([KINDS[kind]], mesh=mesh, transport=transport, **options)
        self.optimizer, self.dense = EmbeddingOptimizer(self.embeddings), torch.nn.Parameter(torch.ones(1))
        self.both = JointOptimizer(torch.optim.SGD([self.dense], lr=0.1), self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)

    def backward(self, values, number):
        is_late = self.mesh.rank == self.mesh.world_size - 1
        if number in OVERFLOWS and self.where == "rows" and is_late:
            values.register_hook(lambda grad: grad * float("inf"))
        self.scaler.scale((values.float() * 1.5).square().sum() * 0.1).backward()

    def step(self, number):
        overflows = number in OVERFLOWS and self.where == "dense"
        self.dense.grad = torch.full((1,), float("inf") if overflows else 1024.0)
        self.scaler.step(self.both)
        self.scaler.update(1024.0)

    def plain(self):
        for number, item in enumerate(items_of(self.mesh.rank)):
            self.both.zero_grad()
            self.backward(self.embeddings(item.sparse).values, number)
            self.step(number)
        return self.found()

    def pipelined(self, evaluates, **options):
        options.setdefault("verify", True)
        with Pipeline(self.embeddings, **options) as pipeline:
            for number, window in enumerate(pipeline.windows(items_of(self.mesh.rank))):
                self.both.zero_grad()
                for part in window:
                    self.backward(part.embeddings.values, number)
                self.step(number)
                if evaluates:
                    with torch.no_grad():
                        self.embeddings(next(items_of(0)).sparse)
        return self.found()

    def found(self):
        steps, kind = self.embeddings.step_count, self.embeddings.tables[0].storage
        if kind == "tensor_train":
            rows = [core.clone() for core in self.embeddings.cores("item").cores]
        elif kind == "dynamic":
            known = self.embeddings.known_rows("item")
            rows = [known.ids, known.values.clone(), known.counts]
        else:
            rows = [piece.values.clone() for piece in self.embeddings.local_rows("item")]
        self.embeddings.close()
        return steps, self.dense.detach().clone(), rows


def leave_out(mesh, kind, where, pipelined, evaluates=False, **options):
    training = _Training(mesh, kind, where)
    return training.pipelined(evaluates, **options) if pipelined else training.plain()


@pytest.mark.parametrize(
    "kind, where, options",
    [
        ("collective", "rows", {"depth": 2, "micro_batches": 3}),
        ("collective", "dense", {"depth": 1, "micro_batches": 2, "evaluates": True}),
        ("one_sided", "rows", {"depth": 2, "micro_batches": 2, "evaluates": True}),
        ("tiered", "rows", {"depth": 1, "micro_batches": 2}),
        ("cores", "rows", {"depth": 1, "micro_batches": 2}),
        ("dynamic", "rows", {"depth": 2, "micro_batches": 2}),
    ],
)
def test_a_step_that_overflows_is_left_out_on_all_ranks(ranks, kind, where, options):
    plain = ranks.run(leave_out, kind, where, False, world_size=2)
    mine = ranks.run(leave_out_by, kind, where, options, world_size=2)
    for (steps, dense, rows), (others, weight, expected) in zip(mine, plain, strict=True):
        assert steps == others == NUM_ITEMS - len(OVERFLOWS)
        assert torch.equal(dense, weight)
        torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)


def leave_out_by(mesh, kind, where, options):
    return leave_out(mesh, kind, where, True, **options)


@pytest.mark.parametrize("overlap", [True, False])
def test_and_on_one_rank(overlap):
    steps, _, (rows,) = leave_out(Mesh(), "one_sided", "rows", True, depth=1, overlap=overlap)
    _, _, (expected,) = leave_out(Mesh(), "one_sided", "rows", False)
    assert steps == NUM_ITEMS - len(OVERFLOWS)
    torch.testing.assert_close(rows, expected, rtol=1e-6, atol=1e-7)


# Mistakes


def make(mesh=None, **options):
    embeddings = EmbeddingCollection([ITEM], mesh=mesh, transport="collective" if mesh else "auto", **options)
    return embeddings, EmbeddingOptimizer(embeddings)


def compute(window):
    for part in window:
        part.embeddings.values.square().sum().backward()


def test_a_norm_comes_after_the_last_backward_and_before_the_step():
    embeddings, optimizer = make()
    with Pipeline(embeddings, micro_batches=2) as pipeline:
        for window in pipeline.windows(items_of(0)):
            for part in window:
                part.embeddings.values.square().sum().backward()
                if not window.is_computed:
                    with pytest.raises(RowmeshError, match="there is nothing to clip or unscale"):
                        optimizer.clip_grad_norm_(1.0)
            assert optimizer.clip_grad_norm_(1e-3) > 0.1
            assert float(optimizer.clip_grad_norm_(1.0)) == pytest.approx(1e-3, rel=1e-3), "they are clipped by now"
            optimizer.step()
            with pytest.raises(RowmeshError, match="there is nothing to clip or unscale"):
                optimizer.clip_grad_norm_(1.0)


def test_gradients_of_a_step_that_was_left_out_are_not_added_to_the_next():
    embeddings, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with Pipeline(embeddings) as pipeline:
        windows = pipeline.windows(items_of(0))
        for _ in range(2):
            for part in next(windows):
                scaler.scale(part.embeddings.values.square().sum()).backward()
            scaler.unscale_(optimizer)
            scaler.update(2.0)
        with pytest.raises(RowmeshError, match=r"step of batch 0 was left out.* call zero_grad\(\) before the first"):
            optimizer.step()
        windows.close()


def clip_on_one_rank(mesh, clips):
    """What each rank is told where one clips, and others do what `clips` says."""
    embeddings, optimizer = make(mesh)
    message = ""
    pipeline = Pipeline(embeddings, micro_batches=2)
    try:
        for number, window in enumerate(pipeline.windows(items_of(mesh.rank))):
            compute(window)
            if number == 2 and mesh.rank == 0:
                optimizer.clip_grad_norm_(1.0)
            elif number == 2 and clips == "leaves":
                break
            optimizer.step()
    except PeerError as error:
        message = str(error)
    finally:
        pipeline.close()
    steps = embeddings.step_count
    for window in pipeline.windows(items_of(mesh.rank)):
        compute(window)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    after = embeddings.step_count - steps
    embeddings.close()
    return message, steps, after


def test_all_ranks_clip_or_none(ranks):
    for message, steps, after in ranks.run(clip_on_one_rank, "steps", world_size=2):
        assert "rank 0 called for the norm of the gradients" in message
        assert (steps, after) == (2, NUM_ITEMS)


def test_a_rank_that_leaves_its_loop_is_named_where_others_clip(ranks):
    found = ranks.run(clip_on_one_rank, "leaves", world_size=2)
    assert "rank 1 left its loop amid batch 2" in found[0][0]
    assert [steps for _, steps, _ in found] == [2, 2]
    assert [after for _, _, after in found] == [NUM_ITEMS] * 2


def clip_averaged_replicas(mesh, options):
    embeddings, optimizer = make(mesh, replicas=2, synchronization=Synchronization(mode="average", every=2))
    with Pipeline(embeddings, **options) as pipeline:
        windows = pipeline.windows(items_of(0))
        compute(next(windows))
        with pytest.raises(ConfigurationError, match="replicas that are averaged step on gradients of their own"):
            optimizer.clip_grad_norm_(1.0)
        windows.close()
    embeddings.close()


def test_averaged_replicas_have_no_norm_in_common(ranks):
    ranks.run(clip_averaged_replicas, {"depth": 1}, world_size=2)
