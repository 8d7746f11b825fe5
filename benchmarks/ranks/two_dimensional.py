"""One rank of rowmesh with several collections of the same tables, which take turns: with replicas, and without."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks.embedding_step import SparsePart
from benchmarks.ranks.setup import output_gradient, serve, sparse_batch, table_specs
from benchmarks.workload import NUM_TABLES, Workload, make_batches
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh
from rowmesh.data import Batch
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.pipeline import Pipeline
from rowmesh.placement import Plan


class Commands:
    """What the benchmark may ask for."""

    def __init__(self, workload: Workload, mesh: Mesh) -> None:
        torch.manual_seed(workload.seed + mesh.rank)  # gradients, which all share to end with equal rows
        self._workload, self._mesh, self._tables = workload, mesh, table_specs(workload)
        batches = make_batches(workload, mesh.rank, mesh.world_size, workload.num_batches, scattered=False)
        self._batches = [sparse_batch(self._tables, batch) for batch in batches]
        self._gradient = output_gradient(workload, mesh.world_size, NUM_TABLES * workload.dim)
        self._parts: dict[str, SparsePart] = {}
        self._pipelines: dict[str, Pipeline[Batch]] = {}

    def make(self, name: str, plan: str, synchronization: dict[str, Any], ahead: bool = False) -> dict[str, Any]:
        """Makes a collection by the plan of a file; `ahead` has a pipeline look one batch ahead."""
        embeddings = EmbeddingCollection(
            self._tables,
            mesh=self._mesh,
            plan=Plan.load(Path(plan)),
            synchronization=Synchronization(**synchronization),
        )
        self._parts[name] = SparsePart(embeddings, EmbeddingOptimizer(embeddings), self._batches, self._gradient)
        if ahead:
            self._pipelines[name] = Pipeline[Batch](embeddings, depth=1)
        return {"transport": embeddings.transport, "memory_bytes": sum(embeddings.memory_bytes.values())}

    def drop(self, name: str) -> dict[str, Any]:
        """Gives the memory of a collection back."""
        if name in self._pipelines:
            self._pipelines.pop(name).close()
        self._parts.pop(name).embeddings.close()
        gc.collect()
        return {}

    def round(self, name: str, warmup: int, steps: int, rest_ms: float) -> dict[str, Any]:
        """Seconds of a step, from a loop between two barriers, and what all steps moved.

        The last rows that replicas sent have arrived when the second barrier ends. Nothing is timed within the loop:
        what one step defers to the next must not be hidden.
        """
        part, pipeline = self._parts[name], self._pipelines.get(name)
        before = _counted(part.embeddings)
        _loop(part, pipeline, 0, warmup, rest_ms)
        seconds = _timed(lambda: _loop(part, pipeline, warmup, steps, rest_ms), part.embeddings.barrier)
        seconds /= max(steps, 1)
        moved = {what: count - before[what] for what, count in _counted(part.embeddings).items()}
        return {"seconds": {"step": [seconds]}, **moved}

    def digest(self, name: str) -> dict[str, Any]:
        """What the first batch looks up now, by its bits: equal where training was."""
        with torch.no_grad():
            values = self._parts[name].embeddings(self._batches[0]).values
        return {"digest": hashlib.blake2b(values.contiguous().numpy().tobytes(), digest_size=8).hexdigest()}

    def close(self) -> None:
        """Lets go of shared memory."""
        for pipeline in self._pipelines.values():
            pipeline.close()
        for part in self._parts.values():
            part.embeddings.close()


def _loop(part: SparsePart, pipeline: Pipeline[Batch] | None, first: int, steps: int, rest_ms: float) -> None:
    """Steps; after each, a pause, as while an accelerator has work that does not depend on rows."""
    for _ in _steps(part, first, steps) if pipeline is None else _steps_ahead(part, pipeline, first, steps):
        if rest_ms:
            time.sleep(rest_ms / 1e3)


def _steps(part: SparsePart, first: int, steps: int) -> Iterator[None]:
    """One after the other."""
    for number in range(first, first + steps):
        part.step(number)
        yield


def _steps_ahead(part: SparsePart, pipeline: Pipeline[Batch], first: int, steps: int) -> Iterator[None]:
    """The same steps, while the rows of the next are on their way."""
    sparse = (part.batches[number % len(part.batches)] for number in range(first, first + steps))
    none = torch.zeros(part.batches[0].batch_size, 0)
    for window in pipeline.windows(Batch(none, batch, none[:, :0].sum(1)) for batch in sparse):
        for piece in window:
            piece.embeddings.values.backward(part.gradient)
        part.optimizer.step()
        yield


def _timed(function: Callable[[], None], barrier: Callable[[], None]) -> float:
    """Seconds from when all ranks have begun until all are done."""
    barrier()
    barrier()
    began = time.perf_counter()
    function()
    barrier()
    return time.perf_counter() - began


def _counted(embeddings: EmbeddingCollection) -> dict[str, int]:
    """What this rank received within its replica group and from other replicas, and rows it sent to those."""
    synchronization = [counters.synchronization for counters in embeddings.counters]
    return {
        "exchange_bytes": sum(counters.bytes_received for counters in embeddings.counters)
        + embeddings.common_counters.bytes_received,
        "synchronization_bytes": sum(counters.bytes_received for counters in synchronization),
        "told_rows": sum(counters.rows for counters in synchronization),
    }


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "make", "drop", "round", "digest")


if __name__ == "__main__":
    main()
