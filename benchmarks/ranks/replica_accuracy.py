"""One rank of rowmesh: a whole training run with replica groups, and the normalized entropy that it ends with."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.click_sets import read, table_specs
from benchmarks.ranks.setup import serve
from benchmarks.replica_simulation import DIM, Network
from benchmarks.workload import Workload
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh
from rowmesh.data import Prepared
from rowmesh.mesh.synchronization import Mode, Synchronization
from rowmesh.models import DLRM
from rowmesh.run.gradients import SharedGradients
from rowmesh.run.metrics import Predictions
from rowmesh.tables.update_rules import RowWiseAdaGrad


class Commands:
    """What the benchmark may ask for; see `two_dimensional_accuracy.Case` for the options."""

    def __init__(
        self,
        workload: Workload,
        mesh: Mesh,
        folder: str,
        batch_size: int,
        epochs: int,
        lr: float,
        dense_lr: float,
        seed: int,
    ) -> None:
        self._mesh, self._prepared, self._lr, self._seed = mesh, Prepared.open(folder), lr, seed
        self._network = Network(lr=dense_lr, seed=seed)
        part = {"rank": mesh.rank, "world_size": mesh.world_size}
        self._train = read(self._prepared, "train", batch_size, epochs=epochs, seed=seed, **part)
        self._held_out = read(self._prepared, "test", batch_size, **part)

    def train(self, groups: int, scale: float, mode: Mode) -> dict[str, Any]:
        """Trains from the start, in float64, so that rounding hides nothing."""
        rule = RowWiseAdaGrad(lr=self._lr, moment_scale=scale)
        embeddings = EmbeddingCollection(
            table_specs(self._prepared, DIM, rule, torch.float64),
            mesh=self._mesh,
            seed=self._seed,
            replicas=groups,
            synchronization=Synchronization(mode),
        )
        network = self._fit(embeddings)
        entropy = self._judge(embeddings, network)
        embeddings.close()
        return {"normalized_entropy": entropy}

    def _fit(self, embeddings: EmbeddingCollection) -> DLRM:
        num_dense = self._train[0].dense.shape[1]
        network, optimizer = self._network.make(num_dense, len(embeddings.features), torch.float64)
        gradients, embedding_optimizer = SharedGradients(network, self._mesh), EmbeddingOptimizer(embeddings)
        for batch in self._train:
            gradients.zero()
            logits = network(batch.dense.double(), embeddings(batch.sparse).stacked())
            F.binary_cross_entropy_with_logits(logits, batch.labels.double()).backward()
            gradients.average()
            optimizer.step()
            embedding_optimizer.step()
        embeddings.synchronize()
        return network

    @torch.no_grad()
    def _judge(self, embeddings: EmbeddingCollection, network: DLRM) -> float:
        predictions = Predictions()
        for batch in self._held_out:
            predictions.add(network(batch.dense.double(), embeddings(batch.sparse).stacked()), batch.labels)
        return predictions.metrics(self._mesh).normalized_entropy

    def close(self) -> None:
        """Holds nothing between commands."""


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "train")


if __name__ == "__main__":
    main()
