"""Training: the loop of a small model, step by step, as a program of one's own would have it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.data import Batch
from rowmesh.mesh import Mesh
from rowmesh.models import DLRM
from rowmesh.pipeline import Pipeline
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec

BATCH_SIZE, TABLES, ROWS, DIM, DENSE = 2048, 8, 20_000, 16, 13


class Seconds(NamedTuple):
    """The time of a step on this rank, and of look-up and update of tables in it."""

    whole_s: float
    sparse_s: float


class Training:
    """A DLRM on random samples. Making it is collective, as every step is.

    Attributes:
        local_batch: samples of this rank.
        transport: how rows travel.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._names = [f"table {number}" for number in range(TABLES)]
        tables = [TableSpec(name=name, num_rows=ROWS, dim=DIM) for name in self._names]
        self._embeddings = EmbeddingCollection(tables, mesh=mesh)
        self._optimizer = EmbeddingOptimizer(self._embeddings)
        self._network: Any = DLRM(num_dense=DENSE, num_features=TABLES, dim=DIM, bottom=(64,), top=(64,))
        if mesh.group is not None:
            self._network = DistributedDataParallel(self._network, process_group=mesh.group)
        self._dense_optimizer = torch.optim.Adam(self._network.parameters())
        self._generator = torch.Generator().manual_seed(mesh.rank)
        self.local_batch = max(BATCH_SIZE // mesh.world_size, 1)
        self.transport = self._embeddings.transport

    def step(self) -> Seconds:
        """Trains on a batch of its own, which all ranks begin together."""
        size, generator = self.local_batch, self._generator
        batch = SparseBatch.from_dense(self._names, torch.randint(ROWS, (TABLES, size), generator=generator))
        dense, labels = torch.rand(size, DENSE, generator=generator), torch.rand(size, generator=generator).round()
        self._embeddings.barrier()
        began = time.perf_counter()
        vectors = self._embeddings(batch).stacked()
        looked_up = time.perf_counter()
        self._dense_optimizer.zero_grad()
        binary_cross_entropy_with_logits(self._network(dense, vectors), labels).backward()
        self._dense_optimizer.step()
        computed = time.perf_counter()
        self._optimizer.step()
        ended = time.perf_counter()
        return Seconds(ended - began, looked_up - began + ended - computed)

    def window_bytes(self) -> int:
        """Memory of a rank for a batch that a pipeline has in flight. Collective: trains on some."""
        size = self.local_batch
        ids = torch.randint(ROWS, (TABLES, size), generator=self._generator)
        batch = Batch(torch.zeros(size, 0), SparseBatch.from_dense(self._names, ids), torch.zeros(size))
        with Pipeline(self._embeddings) as pipeline:
            for window in pipeline.windows([batch] * 3):
                for part in window:
                    part.embeddings.values.sum().backward()
                self._optimizer.step()
            return pipeline.window_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._embeddings.close()
