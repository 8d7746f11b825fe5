"""One rank of rowmesh: full DLRM steps, and the same steps with the embeddings given, in turns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks import rank as rank_side
from benchmarks.ranks.setup import serve, sparse_batch, table_specs
from benchmarks.workload import NUM_DENSE, NUM_TABLES, Workload, make_batches
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh
from rowmesh.models import DLRM
from rowmesh.observe.memory import resident_bytes


class Commands:
    """What the benchmark may ask for."""

    def __init__(
        self, workload: Workload, mesh: Mesh, transport: Any, cored_rows: int = 0, tensor_train_rank: int = 0
    ) -> None:
        self._workload = workload
        tables = table_specs(workload, cored_rows, tensor_train_rank)
        self._embeddings = EmbeddingCollection(tables, mesh=mesh, transport=transport)
        self._embedding_optimizer = EmbeddingOptimizer(self._embeddings)
        torch.manual_seed(workload.seed)
        network = DLRM(num_dense=NUM_DENSE, num_features=NUM_TABLES, dim=workload.dim)
        self._network = DistributedDataParallel(network, process_group=mesh.group)
        self._optimizer = torch.optim.SGD(network.parameters(), lr=workload.lr)
        self._loss = nn.BCEWithLogitsLoss()
        batches = make_batches(workload, mesh.rank, mesh.world_size, workload.num_batches)
        self._batches = [(batch.dense, sparse_batch(tables, batch), batch.labels) for batch in batches]
        samples = workload.global_batch // mesh.world_size
        self._given = torch.randn(samples, NUM_TABLES, workload.dim, requires_grad=True)
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
        self._optimizer.zero_grad(set_to_none=True)
        self._loss(self._network(dense, vectors), labels).backward()
        self._optimizer.step()

    def close(self) -> None:
        """Lets go of shared memory."""
        self._embeddings.close()


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "train", "parts", "memory")


if __name__ == "__main__":
    main()
