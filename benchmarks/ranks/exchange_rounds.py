"""One rank of rowmesh over gloo: tables fused into one exchange, one exchange a table, and no deduplication at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import rank as rank_side
from benchmarks.ranks.direct_exchange import DirectExchange
from benchmarks.ranks.setup import output_gradient, serve, sparse_batch, table_specs
from benchmarks.workload import Workload, WorkloadBatch, make_batches
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, TableSpec


class Collections:
    """The public API over some split of the tables into collections."""

    def __init__(self, parts: list[list[TableSpec]], batches: list[WorkloadBatch], mesh: Mesh) -> None:
        self._collections = [EmbeddingCollection(part, mesh=mesh, transport="collective") for part in parts]
        self._optimizers = [EmbeddingOptimizer(collection) for collection in self._collections]
        self._batches = []
        for batch in batches:
            pieces = batch.ids.split([len(part) for part in parts])
            self._batches.append(
                [sparse_batch(p, replace(batch, ids=ids)) for p, ids in zip(parts, pieces, strict=True)]
            )
        columns = [sum(table.dim for table in part) for part in parts]
        gradient = torch.randn(batches[0].ids.shape[1], sum(columns)) * 1e-3
        self._gradients = [part.contiguous() for part in gradient.split(columns, dim=1)]

    def step(self, number: int) -> None:
        """Forward, backward, update."""
        batches = self._batches[number % len(self._batches)]
        outputs = [collection(batch).values for collection, batch in zip(self._collections, batches, strict=True)]
        torch.autograd.backward(outputs, self._gradients)
        for optimizer in self._optimizers:
            optimizer.step()

    def totals(self) -> tuple[int, int]:
        """All-to-all rounds and bytes sent since the start, messages that serve all groups included."""
        everything = [each for one in self._collections for each in (one.common_counters, *one.counters)]
        return sum(each.all_to_all_rounds for each in everything), sum(each.bytes_sent for each in everything)


class Commands:
    """What the benchmark may ask for."""

    def __init__(self, workload: Workload, mesh: Mesh, num_tables: int) -> None:
        self._workload, self._mesh = workload, mesh
        every = table_specs(workload)
        largest = sorted(range(len(every)), key=lambda i: -every[i].num_rows)[:num_tables]
        tables = [every[i] for i in largest]
        batches = [
            replace(batch, ids=batch.ids[largest].contiguous())
            for batch in make_batches(workload, mesh.rank, mesh.world_size, workload.num_batches)
        ]
        gradient = output_gradient(workload, mesh.world_size, num_tables * workload.dim)
        self._variants = {
            "fused": Collections([tables], batches, mesh),
            "per_table": Collections([[table] for table in tables], batches, mesh),
            "no_dedup": DirectExchange(tables, [batch.ids for batch in batches], gradient, mesh),
        }
        self._each(0)

    def round(self) -> dict[str, Any]:
        """Seconds of the timed steps of each variant, in turns."""
        steps = {name: variant.step for name, variant in self._variants.items()}
        return {"seconds": rank_side.alternate(steps, self._workload, _barrier)}

    def count(self) -> dict[str, Any]:
        """All-to-all rounds and bytes sent of one step of each variant; the mean over the batches."""
        before = {name: variant.totals() for name, variant in self._variants.items()}
        steps = self._workload.num_batches
        for number in range(steps):
            self._each(number)
        return {
            name: [(now - then) / steps for now, then in zip(variant.totals(), before[name], strict=True)]
            for name, variant in self._variants.items()
        }

    def close(self) -> None:
        """Private memory goes by itself."""

    def _each(self, number: int) -> None:
        for variant in self._variants.values():
            variant.step(number)


def _barrier() -> None:
    dist.barrier()


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "round", "count")


if __name__ == "__main__":
    main()
