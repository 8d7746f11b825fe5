"""One rank of rowmesh: full DLRM steps, and the same steps with the embeddings given, in turns."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import rank as rank_side
from benchmarks.ranks.setup import serve, sparse_batch, table_specs
from benchmarks.workload import NUM_DENSE, Workload, make_batches
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, fast_linear
from rowmesh._support.memory import resident_bytes
from rowmesh.models import DLRM
from rowmesh.ops.linear import ALL, linear
from rowmesh.run.gradients import SharedGradients
from rowmesh.run.precision import Precision, computing_in

PRODUCT, ROUNDS = (512, 512), 20
"""A layer whose product runs as fast as any, and how often it is timed for the floor."""


class Commands:
    """What the benchmark may ask for."""

    def __init__(
        self,
        workload: Workload,
        mesh: Mesh,
        transport: Any,
        cored_rows: int = 0,
        tensor_train_rank: int = 0,
        precision: Precision = "float32",
        sums: Collection[int] = (),
    ) -> None:
        self._workload = workload
        self._precision: Precision = precision
        tables = table_specs(workload, cored_rows, tensor_train_rank, sums)
        self._embeddings = EmbeddingCollection(tables, mesh=mesh, transport=transport)
        self._embedding_optimizer = EmbeddingOptimizer(self._embeddings)
        torch.manual_seed(workload.seed)
        network = DLRM(num_dense=NUM_DENSE, num_features=len(tables), dim=workload.dim)
        self._network = network
        self._gradients = SharedGradients(network, mesh, self._embeddings.transport)
        self._fast = fast_linear(network, workload.global_batch, mesh=mesh)
        self._optimizer = torch.optim.SGD(network.parameters(), lr=workload.lr, fused=True)
        self._loss = nn.BCEWithLogitsLoss()
        batches = make_batches(workload, mesh.rank, mesh.world_size, workload.num_batches)
        self._batches = [(batch.dense, sparse_batch(tables, batch), batch.labels) for batch in batches]
        samples = workload.global_batch // mesh.world_size
        self._given = torch.randn(samples, len(tables), workload.dim, requires_grad=True)
        self._full_step(0)

    def train(self) -> dict[str, Any]:
        """Seconds of full steps, and of the same steps with the embeddings given."""
        variants = {"full": self._full_step, "given": self._given_step}
        return {"seconds": rank_side.alternate(variants, self._workload, self._embeddings.barrier)}

    def parts(self) -> dict[str, Any]:
        """Seconds of full steps and of their sparse part alone, and bytes of tables and optimizer state."""
        variants = {"full": self._full_step, "sparse": self._sparse_step}
        seconds = rank_side.alternate(variants, self._workload, self._embeddings.barrier)
        memory = self._embeddings.memory_bytes
        return {"seconds": seconds, "table_bytes": memory["rows"] + memory["optimizer state"]}

    def memory(self, part: str, steps: int) -> dict[str, Any]:
        """Resident bytes of this rank before, halfway through and after so many steps, "full" or "sparse" ones."""
        step = {"full": self._full_step, "sparse": self._sparse_step}[part]
        resident = [resident_bytes()]
        for number in range(steps):
            step(number)
            if number + 1 in (steps // 2, steps):
                resident.append(resident_bytes())
        return {"resident_bytes": resident}

    def floor(self) -> dict[str, Any]:
        """How long the products of a step take at least: their operations, at the rate of the fastest product."""
        samples = len(self._given)
        x, weight = torch.randn(samples, PRODUCT[1]), torch.randn(PRODUCT)
        seconds = []
        with torch.no_grad(), computing_in(self._precision):
            for _ in range(ROUNDS):
                self._embeddings.barrier()
                for run in (lambda: F.linear(x, weight), lambda: linear(x, weight, passes=ALL)):
                    began_s = time.perf_counter()
                    run()
                    seconds.append(time.perf_counter() - began_s)
        rate = 2 * samples * weight.numel() / min(seconds)
        operations = samples * self._operations()
        return {"gflop": operations / 1e9, "gflop_per_s": rate / 1e9, "floor_ms": 1e3 * operations / rate}

    def _operations(self) -> int:
        """Of a sample's products, forward and backward: every pair of vectors once, and no gradient of the data."""
        layers = [layer.weight.numel() for layer in self._network.modules() if isinstance(layer, nn.Linear)]
        num_tables = len(self._workload.table_rows)
        pairs = num_tables * (num_tables + 1) // 2
        return 2 * (3 * (sum(layers) + pairs * self._workload.dim) - layers[0])

    def _full_step(self, number: int) -> None:
        dense, sparse, labels = self._batches[number % len(self._batches)]
        self._dense_step(dense, self._embeddings(sparse).stacked(), labels)
        self._embedding_optimizer.step()

    def _sparse_step(self, number: int) -> None:
        _, sparse, _ = self._batches[number % len(self._batches)]
        vectors = self._embeddings(sparse).stacked()
        vectors.backward(self._given.detach())
        self._embedding_optimizer.step()

    def _given_step(self, number: int) -> None:
        dense, _, labels = self._batches[number % len(self._batches)]
        self._given.grad = None
        self._dense_step(dense, self._given, labels)

    def _dense_step(self, dense: Tensor, vectors: Tensor, labels: Tensor) -> None:
        self._gradients.zero()
        with self._fast(), computing_in(self._precision):
            logits = self._network(dense, vectors)
        self._gradients.sends_early()
        self._loss(logits.float(), labels).backward()
        self._gradients.average()
        self._optimizer.step()

    def close(self) -> None:
        """Lets go of shared memory."""
        self._embeddings.close()


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "train", "parts", "memory", "floor")


if __name__ == "__main__":
    main()
