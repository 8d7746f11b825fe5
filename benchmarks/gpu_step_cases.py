"""The contestants of `benchmarks.gpu_step`: one step each, on batches that lie in pinned memory of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.workload import NUM_DENSE, NUM_TABLES, Zipf
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.data import Batch
from rowmesh.models import DLRM
from rowmesh.pipeline import Pipeline
from rowmesh.sparse import SparseBatch
from rowmesh.tables import Constant, TableSpec
from rowmesh.tables.update_rules import SGD

LR = 0.01
FEATURES = tuple(f"C{number}" for number in range(NUM_TABLES))
_ELEMENT_BYTES, _ID_BYTES = 4, 8


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is.

    Attributes:
        rows: of each of the 26 tables.
        dim: D.
        batch: samples.
        zipf: exponent of the distribution of ids.
        num_batches: batches that differ; steps go round them.
    """

    rows: int = 10_000_000
    dim: int = 128
    batch: int = 65_536
    zipf: float = 1.1
    num_batches: int = 8

    @property
    def table_bytes(self) -> int:
        """Of all rows; plain SGD keeps nothing else."""
        return NUM_TABLES * self.rows * self.dim * _ELEMENT_BYTES


@dataclass(frozen=True)
class Inputs:
    """Batches on the host, ids `[26, B]`, dense `[B, 13]`, labels `[B]`; and the gradient of vectors `[B, 26 · D]`."""

    ids: list[Tensor]
    dense: list[Tensor]
    labels: list[Tensor]
    gradient: Tensor


def draw(sizes: Sizes, device: torch.device) -> Inputs:
    """The same batches for every contestant."""
    generator, sampler = np.random.default_rng(0), Zipf(sizes.rows, sizes.zipf)
    is_pinned = device.type == "cuda"

    def pinned(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if is_pinned else tensor

    count, batch = range(sizes.num_batches), sizes.batch
    gradient = torch.randn(batch, NUM_TABLES * sizes.dim, generator=torch.Generator().manual_seed(0)) / batch
    return Inputs(
        ids=[pinned(sampler.sample(generator, (NUM_TABLES, batch))) for _ in count],
        dense=[pinned(generator.random((batch, NUM_DENSE), dtype=np.float32)) for _ in count],
        labels=[pinned((generator.random(batch) < 0.25).astype(np.float32)) for _ in count],
        gradient=gradient.to(device),
    )


def floor_bytes(sizes: Sizes, inputs: Inputs) -> int:
    """What a sparse step must move at least, mean over batches.

    Ids are read once; distinct rows are read for the look-up, and read and written by the update; vectors are written,
    and their gradients read.
    """
    distinct = sum(int(np.unique(table).size) for ids in inputs.ids for table in ids.numpy()) / len(inputs.ids)
    row_bytes, num_ids = sizes.dim * _ELEMENT_BYTES, NUM_TABLES * sizes.batch
    return round(num_ids * (_ID_BYTES + 2 * row_bytes) + 3 * distinct * row_bytes)


class Rowmesh:
    """The tables in an EmbeddingCollection.

    Args:
        sizes: of them.
        device: "cuda".
    """

    def __init__(self, sizes: Sizes, device: str) -> None:
        tables = [
            TableSpec(
                name=name, num_rows=sizes.rows, dim=sizes.dim, optimizer=SGD(lr=LR), initializer=Constant(value=0.0)
            )
            for name in FEATURES
        ]
        self.embeddings = EmbeddingCollection(tables, device=device)
        self._optimizer = EmbeddingOptimizer(self.embeddings)

    def look_up(self, ids: Tensor) -> Tensor:
        """`[26, B]` on the host → `[B, 26 · D]` on the device."""
        return self.embeddings(SparseBatch.from_dense(FEATURES, ids)).values

    def update(self) -> None:
        """After the backward."""
        self._optimizer.step()

    def row(self, table: int, rows: Tensor) -> Tensor:
        """Some rows of a table, on the host; for the comparison."""
        (piece, *rest) = self.embeddings.local_rows(FEATURES[table])
        assert not rest, "tables to compare are small"
        return piece.values[rows]


class EmbeddingBags:
    """The tables as `nn.EmbeddingBag(sparse=True)`, with torch's SGD on sparse gradients.

    Args:
        sizes: of them.
        device: where.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._device = device
        shape = sizes.rows, sizes.dim
        zeros = [torch.zeros(*shape, device=device) for _ in FEATURES]
        self._bags = [nn.EmbeddingBag(*shape, mode="sum", sparse=True, _weight=each) for each in zeros]
        self._offsets = torch.arange(sizes.batch, device=device)
        self._optimizer = torch.optim.SGD([bag.weight for bag in self._bags], lr=LR)

    def look_up(self, ids: Tensor) -> Tensor:
        """`[26, B]` on the host → `[B, 26 · D]` on the device."""
        self._optimizer.zero_grad()
        here = ids.to(self._device, non_blocking=True)
        return torch.cat([bag(each, self._offsets) for bag, each in zip(self._bags, here, strict=True)], 1)

    def update(self) -> None:
        """After the backward."""
        self._optimizer.step()

    def row(self, table: int, rows: Tensor) -> Tensor:
        """Some rows of a table, on the host; for the comparison."""
        return self._bags[table].weight.detach()[rows.to(self._device)].cpu()


Tables = Rowmesh | EmbeddingBags


def sparse_step(tables: Tables, inputs: Inputs) -> Callable[[int], None]:
    """Look-up, backward from a given gradient, and update, of batch number so-and-so."""

    def step(number: int) -> None:
        vectors = tables.look_up(inputs.ids[number % len(inputs.ids)])
        vectors.backward(inputs.gradient)
        tables.update()

    return step


def _train_network(
    network: DLRM, optimizer: torch.optim.Optimizer, dense: Tensor, labels: Tensor, vectors: Tensor
) -> None:
    """Forward, backward and update, given batches on the host and vectors on the device."""
    dense, labels = (part.to(vectors.device, non_blocking=True) for part in (dense, labels))
    optimizer.zero_grad()
    logits = network(dense, vectors.view(len(dense), NUM_TABLES, network.dim))
    nn.functional.binary_cross_entropy_with_logits(logits, labels).backward()
    optimizer.step()


def dense_step(sizes: Sizes, inputs: Inputs, device: torch.device, tables: Tables | None) -> Callable[[int], None]:
    """A whole step of a DLRM; without tables the dense network's part, whose vectors are there already."""
    network = DLRM(num_dense=NUM_DENSE, num_features=NUM_TABLES, dim=sizes.dim).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    given = torch.zeros_like(inputs.gradient).requires_grad_()

    def step(number: int) -> None:
        place = number % len(inputs.ids)
        vectors = given if tables is None else tables.look_up(inputs.ids[place])
        given.grad = None
        _train_network(network, optimizer, inputs.dense[place], inputs.labels[place], vectors)
        if tables is not None:
            tables.update()

    return step


class PipelinedStep:
    """The same with our tables, through a pipeline that is a batch ahead; to be closed."""

    def __init__(self, sizes: Sizes, inputs: Inputs, device: torch.device, tables: Rowmesh) -> None:
        self._network = DLRM(num_dense=NUM_DENSE, num_features=NUM_TABLES, dim=sizes.dim).to(device)
        self._optimizer = torch.optim.SGD(self._network.parameters(), lr=LR)
        self._tables, self._pipeline = tables, Pipeline[Batch](tables.embeddings, depth=1)
        self._windows = self._pipeline.windows(_batches(inputs))

    def __call__(self, _: int) -> None:
        """The next batch."""
        window = next(self._windows)
        for part in window:
            item, vectors = window.item, part.embeddings.values
            _train_network(self._network, self._optimizer, item.dense, item.labels, vectors)
        self._tables.update()

    def close(self) -> None:
        """Ends the pipeline."""
        self._pipeline.close()


def _batches(inputs: Inputs) -> Iterator[Batch]:
    for dense, ids, labels in cycle(zip(inputs.dense, inputs.ids, inputs.labels, strict=True)):
        yield Batch(dense, SparseBatch.from_dense(FEATURES, ids), labels)


def check(sizes: Sizes, device: torch.device, name: str = "cuda") -> None:
    """Raises AssertionError where two steps of the contestants leave different rows; takes small sizes."""
    inputs = draw(sizes, device)
    contestants: Sequence[Tables] = (Rowmesh(sizes, name), EmbeddingBags(sizes, device))
    for tables in contestants:
        step = sparse_step(tables, inputs)
        for number in range(2):
            step(number)
    for table in (0, NUM_TABLES - 1):
        rows = torch.cat([ids[table] for ids in inputs.ids]).unique()
        ours, theirs = (tables.row(table, rows) for tables in contestants)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 / sizes.batch)
