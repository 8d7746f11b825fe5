"""Weights of ids that are trained: against plain torch, wherever rows are and however they travel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Pipeline, PositionWeights, SparseBatch, TableSpec
from rowmesh.errors import DataError, RowmeshError
from rowmesh.tables import Tiers
from tests.collection.test_equivalence import assert_close, check, on_ranks, scenarios
from tests.support.plans import in_groups, with_copies
from tests.support.scenario import Scenario
from tests.support.tables import several, table
from tests.support.training import Item, merged, train_reference
from tests.test_tensor_train_tables import mixed

TABLES = several("adagrad", torch.float64)
HARD = {
    "one rank": Scenario(tables=TABLES, batch_sizes=(6,), trains_weights=True, evaluates=True),
    "two ranks, weights of their own too": Scenario(tables=TABLES, is_weighted=True, trains_weights=True, decay=0.5),
    "fixed bags": Scenario(tables=several("sgd"), bag_sizes=(2, 2), trains_weights=True),
    "one id a bag": Scenario(tables=several("sgd"), bag_sizes=(1, 1), trains_weights=True),
    "no ids": Scenario(tables=several("sgd"), bag_sizes=(0, 0), trains_weights=True),
    "a rank without samples": Scenario(tables=TABLES, batch_sizes=(0, 4), trains_weights=True),
    "several backwards a step": Scenario(tables=TABLES, trains_weights=True, accumulate=2),
    "copies": Scenario(tables=TABLES, trains_weights=True, plan=with_copies(TABLES, 2)),
    "replicas": in_groups(Scenario(tables=TABLES, trains_weights=True), 2),
    "tensor-train tables": Scenario(tables=mixed("adam", torch.float64), trains_weights=True),
}


@pytest.mark.parametrize("name", HARD)
def test_equals_plain_torch(ranks, name):
    if name == "replicas":  # of one rank each: nothing is read from another one
        scenario = HARD[name]
        for transport in ("one_sided", "collective"):
            assert_close(scenario, merged(scenario, on_ranks(ranks, scenario, transport)), train_reference(scenario))
        return
    check(ranks, HARD[name])


@settings(max_examples=5)
@given(scenario=scenarios())
def test_random_configurations(ranks, scenario):
    check(ranks, replace(scenario, trains_weights=True))


@pytest.mark.slow
@settings(max_examples=100)
@given(scenario=scenarios(dims=(1, 3, 16)))
def test_many_random_configurations(ranks, scenario):
    check(ranks, replace(scenario, trains_weights=True))


def test_tiered_tables(ranks):
    """Rows leave fast memory between the look-up and the backward, or may."""
    scenario = Scenario(tables=TABLES, trains_weights=True, accumulate=2, evaluates=True)
    tiered = replace(
        scenario,
        tables=tuple(replace(spec, storage="tiered") for spec in TABLES),
        tiers=Tiers(fast_share=0.001, fast_rows=80, verify=True, poison=True, timeout_s=20.0),
    )
    for transport in ("one_sided", "collective"):
        found = merged(tiered, on_ranks(ranks, tiered, transport))
        assert_close(scenario, found, train_reference(scenario))


BAGS = {"item": [[3, 3, 4], [4], []], "user": [[1, 2], [], [2]]}


def weighted(weights):
    return replace(SparseBatch.from_bags(BAGS), weights=weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_any_dtype_get_a_gradient_of_it(dtype):
    """Also where bags are looked up in another order, and some of them alone."""
    embeddings = EmbeddingCollection([table("user", 9, 3), table("item", 9, 3)])
    rows = embeddings.local_rows("item")[0].values.clone()
    mine, theirs = (torch.arange(1, 8, dtype=dtype).requires_grad_() for _ in range(2))
    embeddings(weighted(mine), features=["item"]).values.square().sum().backward()
    ids, offsets = torch.tensor([3, 3, 4, 4]), torch.tensor([0, 3, 4, 4])
    weights = theirs[:4].to(rows.dtype)
    expected = F.embedding_bag(ids, rows, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
    expected.square().sum().backward()
    assert mine.grad.dtype == dtype
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_rows_are_those_of_the_look_up():
    """Though another step changes them before the backward."""
    embeddings = EmbeddingCollection([table("user", 9, 3), table("item", 9, 3)])
    optimizer = EmbeddingOptimizer(embeddings)
    weights = torch.ones(7, requires_grad=True)
    rows = embeddings.local_rows("item")[0].values.clone()
    late = embeddings(weighted(weights))["item"].sum()
    embeddings(SparseBatch.from_bags(BAGS)).values.sum().backward()
    optimizer.step()
    late.backward()
    torch.testing.assert_close(weights.grad[:4], rows[[3, 3, 4, 4]].sum(1))


def test_evaluations_need_no_gradient():
    embeddings = EmbeddingCollection([table("user", 9, 3), table("item", 9, 3)])
    with torch.no_grad():
        assert not embeddings(weighted(torch.ones(7, requires_grad=True))).values.requires_grad


def test_frozen_tables_refuse_them():
    embeddings = EmbeddingCollection([table("user", 9, 3), table("item", 9, 3)]).requires_grad_(False)
    batch = weighted(torch.ones(7, requires_grad=True))
    with pytest.raises(RowmeshError, match=r"weights of ids get no gradient through tables that are frozen; look"):
        embeddings(batch)
    with pytest.raises(RowmeshError, match="frozen"):
        embeddings.route(batch=batch)
    with torch.no_grad():
        embeddings(batch)
    embeddings(weighted(torch.ones(7)))


def test_pipelines_refuse_them():
    embeddings = EmbeddingCollection([table("user", 9, 3), table("item", 9, 3)])
    item = Item(weighted(torch.ones(7, requires_grad=True)), torch.zeros(3))
    with Pipeline(embeddings) as pipeline, pytest.raises(DataError, match="give them with each micro-batch"):
        next(iter(pipeline.windows([item])))


PIPED = Scenario(
    tables=TABLES,
    batch_sizes=(5, 4),
    num_steps=4,
    trains_weights=True,
    pipeline={"depth": 2, "micro_batches": 3, "verify": True},
)


@pytest.mark.parametrize(
    "job, transport",
    [
        (PIPED, "collective"),
        (replace(PIPED, is_weighted=True), "one_sided"),
        (replace(PIPED, pipeline={"depth": 1, "micro_batches": 2, "exchange": "naive"}), "collective"),
        (replace(PIPED, plan=with_copies(PIPED.tables, world_size=2), max_norm=0.02), "collective"),
        (replace(PIPED, pipeline={"depth": 0, "clustering": "greedy", "micro_batches": 2}), "collective"),
        (replace(PIPED, tables=mixed("adam", torch.float64), is_weighted=True), "collective"),
    ],
    ids=["by micro-batch", "whole, beside given ones", "naive", "copied rows, clipped", "clustered", "tensor-train"],
)
def test_pipelines_take_them_with_micro_batches(ranks, job, transport):
    assert_close(job, merged(job, on_ranks(ranks, job, transport)), train_reference(job))


def test_a_micro_batch_is_looked_up_once_with_a_weight_for_every_id():
    embeddings = EmbeddingCollection([table("user", 9, 3), table("item", 9, 3)])
    with Pipeline(embeddings, micro_batches=2) as pipeline:
        windows = pipeline.windows([Item(SparseBatch.from_bags(BAGS), torch.zeros(3))])
        part = next(iter(next(windows)))
        with pytest.raises(DataError, match="needs as many weights, got none"):
            part.look_up(lambda batch: batch)
        part.look_up(lambda batch: replace(batch, weights=torch.ones(len(batch.ids))))
        with pytest.raises(RowmeshError, match="a micro-batch is looked up once"):
            part.look_up(lambda batch: batch)
        windows.close()


class Model(torch.nn.Module):
    """A model with tables and position weights inside, as a user writes it."""

    def __init__(self, mesh):
        super().__init__()
        self.positions = PositionWeights({"seen": 4}, dtype=torch.float64)
        tables = [TableSpec(name="seen", num_rows=9, dim=3, dtype=torch.float64)]
        self.embeddings = EmbeddingCollection(tables, mesh=mesh)

    def forward(self, batch):
        return self.embeddings(self.positions(batch))["seen"].square().sum(1)


def train_under_ddp(mesh):
    """What two steps leave of the position weights; samples are dealt over the ranks."""
    model = Model(mesh)
    wrapped = DistributedDataParallel(model, process_group=mesh.group) if mesh.world_size > 1 else model
    dense, sparse = torch.optim.SGD(model.positions.parameters(), lr=0.1), EmbeddingOptimizer(model.embeddings)
    for bags in ([[1, 2, 3, 4], [5], [], [1, 1]], [[2], [3, 4], [5, 6, 1], [8]]):
        dense.zero_grad()
        wrapped(SparseBatch.from_bags({"seen": bags[mesh.rank :: mesh.world_size]})).mean().backward()
        dense.step()
        sparse.step()
    return model.positions.weight.detach().clone()


def test_distributed_data_parallel_averages_position_weights(ranks):
    (alone,) = ranks.run(train_under_ddp, world_size=1)
    first, second = ranks.run(train_under_ddp, world_size=2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, alone)
    assert not torch.equal(alone, torch.ones(4, dtype=torch.float64))
