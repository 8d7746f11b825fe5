"""Buffers of a batch that are written again, by torch or behind its back, once the batch is made."""

import numpy as np
import pytest
import torch

from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, TableSpec
from rowmesh.errors import DataError
from rowmesh.pipeline import Pipeline
from rowmesh.tables import Uniform
from rowmesh.tables.update_rules import SGD
from rowmesh.tensor_train.module import TensorTrainEmbeddingBag

NUM_ROWS = 50
FAR = 1 << 40  # kernels that read so far crash


def tables(pooling="sum", **options):
    options.setdefault("optimizer", SGD(lr=1.0))
    return [TableSpec(name="item", num_rows=NUM_ROWS, dim=4, pooling=pooling, initializer=Uniform(), **options)]


class Reused:
    """A batch over buffers that are used again, and one that has the same values for itself."""

    def __init__(self, rank=0):
        self.ids = np.arange(6) + rank
        self.offsets = np.array([0, 1, 3, 6])
        self.batch = SparseBatch(
            ("item",), torch.from_numpy(self.ids), 3, jagged_offsets=torch.from_numpy(self.offsets)
        )
        self.own = SparseBatch(
            ("item",), torch.from_numpy(self.ids.copy()), 3, jagged_offsets=torch.from_numpy(self.offsets.copy())
        )

    def change(self):
        """Neither is counted: NumPy wrote."""
        self.ids[:] = -1
        self.offsets[:] = [0, FAR, -FAR, 3]


def step_of(collection, optimizer, change=None, rank=0):
    """The vectors and the rows after a step on one batch, whose buffers change once they are looked up."""
    reused = Reused(rank)
    out = collection(reused.own if change is None else reused.batch)
    if change is not None:
        change(reused)
    vectors = out["item"] if isinstance(out["item"], torch.Tensor) else out["item"].values
    (vectors * torch.arange(1.0, 1 + vectors.numel(), device=vectors.device).view_as(vectors)).sum().backward()
    optimizer.step()
    return vectors.detach().clone()


def rows_of(collection):
    if collection.tables[0].storage == "tensor_train":
        return collection.cores("item").rows(torch.arange(NUM_ROWS))
    return torch.cat([part.values for part in collection.local_rows("item")])


def steps(mesh, transport, options, changes):
    torch.set_num_threads(1)
    collection = EmbeddingCollection(tables(**options), mesh=mesh, transport=transport)
    optimizer = EmbeddingOptimizer(collection)
    found = [step_of(collection, optimizer, Reused.change if changes else None, mesh.rank) for _ in range(2)]
    return found, rows_of(collection).clone()


CASES = {
    "pooled": {},
    "mean": {"pooling": "mean"},
    "not pooled": {"pooling": "none"},
    "tiered": {"storage": "tiered"},
    "tensor-train": {"storage": "tensor_train"},
}


@pytest.mark.parametrize("case", CASES)
def test_buffers_may_be_used_again_once_a_batch_is_looked_up(case):
    mine, theirs = (steps(Mesh(), "auto", CASES[case], changes) for changes in (True, False))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["one_sided", "collective"])
@pytest.mark.parametrize("case", CASES)
def test_and_so_on_two_ranks(ranks, transport, case):
    mine, theirs = (ranks.run(steps, transport, CASES[case], changes) for changes in (True, False))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.triton
@pytest.mark.parametrize("case", ["pooled", "not pooled"])
def test_and_so_on_a_device(case, device):
    found = []
    for changes in (True, False):
        collection = EmbeddingCollection(tables(**CASES[case]), device="cuda")
        change = (lambda reused: reused.offsets.fill(FAR)) if changes else None  # ids may be on their way
        step_of(collection, optimizer := EmbeddingOptimizer(collection), change)
        optimizer.zero_grad()
        found.append(rows_of(collection).cpu())
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Item:
    def __init__(self, sparse):
        self.sparse = sparse

    def take(self, samples):
        raise AssertionError


@pytest.mark.parametrize("offsets", [[0, 1, 3, 7], [0, FAR, 3, 6], [0, 4, 3, 6], [1, 2, 3, 6], [-FAR, 1, 3, 6]])
@pytest.mark.parametrize("case", CASES)
def test_offsets_that_do_not_fit_any_more_are_refused_where_they_are_used(case, offsets):
    collection = EmbeddingCollection(tables(**CASES[case]))
    reused = Reused()
    reused.offsets[:] = offsets
    with pytest.raises(DataError, match=r"offsets .* changed .* \[0, 6\]|offsets must"):
        collection(reused.batch)
    assert collection(Reused().batch)  # nothing is lost


def test_offsets_that_do_not_fit_any_more_stop_a_pipeline():
    collection = EmbeddingCollection(tables())
    reused = Reused()
    reused.offsets[:] = [0, 1, 3, 7]
    with Pipeline(collection) as pipeline, pytest.raises(DataError, match="offsets"):
        list(pipeline.windows([Item(reused.batch)]))


@pytest.mark.parametrize("name", ["ids", "weights"])
@pytest.mark.parametrize("bag_size", [None, 2])
def test_buffers_that_were_made_shorter_are_refused_where_they_are_used(name, bag_size):
    ids, offsets = torch.arange(6), torch.tensor([0, 1, 3, 6]) if bag_size is None else None
    batch = SparseBatch(("item",), ids, 3, bag_size, offsets, torch.ones(6))
    getattr(batch, name).resize_(2)
    with pytest.raises(DataError, match=name):
        EmbeddingCollection(tables())(batch)


def test_a_tensor_train_bag_reads_neither_ids_nor_offsets_again():
    bag = TensorTrainEmbeddingBag(NUM_ROWS, 4, mode="sum", rank=2, seed=0, include_last_offset=True)
    gradients = []
    for changes in (True, False):
        reused = Reused()
        out = bag(reused.batch.ids, reused.batch.jagged_offsets)
        if changes:
            reused.change()
        (out * torch.arange(12.0).view(3, 4)).sum().backward()
        gradients.append([core.grad.clone() for core in bag.cores])
        bag.zero_grad()
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
