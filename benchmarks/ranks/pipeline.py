"""One rank of rowmesh: full steps through pipelines of one collection, which take turns."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.ranks.setup import serve, sparse_batch, table_specs
from benchmarks.tower import Tower
from benchmarks.workload import NUM_DENSE, NUM_TABLES, Workload, make_batches
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch
from rowmesh._support.memory import resident_bytes
from rowmesh.pipeline import BatchInFlight, Part, Pipeline
from rowmesh.run.gradients import SharedGradients
from rowmesh.sparse import take
from rowmesh.tables import Tiers


@dataclass(frozen=True)
class Item:
    """What a loader gives."""

    dense: Tensor
    sparse: SparseBatch
    labels: Tensor

    def take(self, samples: Tensor) -> Item:
        """The given samples."""
        return Item(self.dense[samples], take(self.sparse, samples), self.labels[samples])


class Commands:
    """What the benchmark may ask for."""

    def __init__(
        self, workload: Workload, mesh: Mesh, tiers: dict[str, Any] | None = None, num_batches: int = 0
    ) -> None:
        self._workload, self._mesh, tables = workload, mesh, table_specs(workload)
        if tiers is not None:
            tables = [replace(table, storage="tiered") for table in tables]
            folder = Path(tiers.pop("folder"))
            self._embeddings = EmbeddingCollection(tables, mesh=mesh, tiers=Tiers(folder=folder, **tiers))
            self._write_all()
        else:
            self._embeddings = EmbeddingCollection(tables, mesh=mesh, transport="collective")
        self._optimizer = EmbeddingOptimizer(self._embeddings)
        self._loss = nn.BCEWithLogitsLoss(reduction="sum")
        batches = make_batches(workload, mesh.rank, mesh.world_size, num_batches or workload.num_batches)
        self._items = [Item(batch.dense, sparse_batch(tables, batch), batch.labels) for batch in batches]
        self._position = -1
        self._pipelines: dict[str, Pipeline[Item]] = {}
        self._build(64)

    def _write_all(self) -> None:
        """Writes every row, so that none is computed instead of read."""
        for table in self._embeddings.tables:
            for piece in self._embeddings.local_rows(table.name):
                piece.commit()

    def _build(self, hidden: int) -> None:
        torch.manual_seed(self._workload.seed)
        self._network: Tower = Tower(NUM_DENSE, NUM_TABLES, self._workload.dim, hidden)
        self._gradients = SharedGradients(self._network, self._mesh)
        self._dense = torch.optim.SGD(self._network.parameters(), lr=self._workload.lr)

    def compute(self, hidden: int, steps: int) -> dict[str, Any]:
        """Seconds of forward and backward of a network of this width, embeddings given."""
        self._build(hidden)
        item, seconds = self._items[0], []
        given = self._given_vectors().requires_grad_()
        for _ in range(steps + 1):
            began = time.perf_counter()
            self._loss(self._network(item.dense, given), item.labels).backward()
            seconds.append(time.perf_counter() - began)
        return {"seconds": {"step": seconds[1:]}, "parameters": sum(p.numel() for p in self._network.parameters())}

    def _given_vectors(self) -> Tensor:
        return torch.randn(len(self._items[0].labels), NUM_TABLES, self._workload.dim)

    def make(self, name: str, hidden: int, wait_ms: float = 0.0, **options: Any) -> dict[str, Any]:
        """Makes a pipeline, and the network anew; with `wait_ms` so long a wait takes the place of computing it."""
        self._build(hidden)
        self._wait_s, self._given = wait_ms / 1e3, self._given_vectors() if wait_ms else torch.empty(0)
        self._pipelines[name] = Pipeline[Item](self._embeddings, **options)
        return {"reasons": self._pipelines[name].reasons}

    def round(self, name: str, warmup: int, steps: int) -> dict[str, Any]:
        """Seconds of a step of a loop, after some that are not timed, and of its tasks by stage and micro-batch."""
        pipeline, averaged_s, before, began = self._pipelines[name], 0.0, 0, 0.0
        elapsed_s, cpu_s = 0.0, 0.0
        items = (self._next() for _ in range(warmup + steps))
        for number, window in enumerate(pipeline.windows(items)):
            if number == warmup:
                averaged_s, before, began, cpu_s = 0.0, self._received, time.perf_counter(), time.process_time()
            averaged_s += self._step(window)
            if number == warmup + steps - 1:
                pipeline.wait()
                elapsed_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
        tasks: dict[str, float] = {"average.0": averaged_s / steps}
        for span in pipeline.recorder.spans():
            if span.start_s >= began:
                key = f"{span.task.stage}.{span.task.part}"
                tasks[key] = tasks.get(key, 0.0) + (span.end_s - span.start_s) / steps
        received = (self._received - before) / steps
        return {
            "seconds": {"step": [elapsed_s / steps]},
            "cpu_s": cpu_s / steps,
            "tasks": tasks,
            "received_bytes": received,
            "memory": self._embeddings.memory_bytes,
            "resident_bytes": resident_bytes(),
            "tier": self._tier(),
        }

    def _tier(self) -> dict[str, float]:
        """What the arenas did since the start."""
        return next((asdict(counters) for counters in self._embeddings.tier_counters.values()), {})

    def _next(self) -> Item:
        """The next batch; after the last, the first."""
        self._position += 1
        return self._items[self._position % len(self._items)]

    @property
    def _received(self) -> int:
        return sum(counters.bytes_received for counters in self._embeddings.counters)

    def _step(self, window: BatchInFlight[Item]) -> float:
        """One step; returns the seconds of averaging the network's gradients."""
        self._gradients.zero()
        for part in window:
            self._compute(window.item, part)
        self._optimizer.step()
        began = time.perf_counter()
        self._gradients.average()
        averaged_s = time.perf_counter() - began
        self._dense.step()
        return averaged_s

    def _compute(self, item: Item, part: Part) -> None:
        """Forward and backward of a micro-batch."""
        vectors, scale = part.embeddings.stacked(), 1 / len(item.labels)
        if self._wait_s:
            time.sleep(self._wait_s * scale * len(vectors))
            vectors.backward(self._given[part.samples] * scale)
            return
        logits = self._network(item.dense[part.samples], vectors)
        (self._loss(logits, item.labels[part.samples]) * scale).backward()

    def close(self) -> None:
        """Lets go of shared memory."""
        self._embeddings.close()


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "compute", "make", "round")


if __name__ == "__main__":
    main()
