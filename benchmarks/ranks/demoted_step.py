"""One rank of rowmesh: steps of a DLRM whose dynamic tables hold all ids, or a share of them above a store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.ranks.pipeline import Item
from benchmarks.ranks.setup import dynamic_specs, serve
from benchmarks.workload import NUM_DENSE, NUM_TABLES, Workload, Zipf
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, fast_linear
from rowmesh.models import DLRM
from rowmesh.pipeline import Pipeline
from rowmesh.run.gradients import SharedGradients
from rowmesh.tables import Dynamic

_FILL = 100  # steps, at least, in which all ids are made known: a batch must fit into the shards


class Commands:
    """What the benchmark may ask for.

    Args:
        workload: its batches are drawn anew at each step, so that ids come back as their frequencies say.
        mesh: the ranks.
        store: for the records of demoted ids; "": all ids are in fast memory.
        share: of the ids of large tables that are in fast memory.
        least_rows: of a large table.
        depth: batches ahead.
    """

    def __init__(
        self, workload: Workload, mesh: Mesh, *, store: str, share: float, least_rows: int, depth: int
    ) -> None:
        self._workload, self._mesh, self._step = workload, mesh, 0
        self._demoting = [i for i, rows in enumerate(workload.table_rows) if store and rows >= least_rows]
        rules = {i: _rules(workload.table_rows[i], share, store) for i in self._demoting}
        self._tables = dynamic_specs(workload, rules)
        self._embeddings = EmbeddingCollection(self._tables, mesh=mesh)
        self._optimizer = EmbeddingOptimizer(self._embeddings)
        torch.manual_seed(workload.seed)
        network = DLRM(num_dense=NUM_DENSE, num_features=NUM_TABLES, dim=workload.dim)
        self._network, self._loss = network, nn.BCEWithLogitsLoss()
        self._gradients = SharedGradients(network, mesh, self._embeddings.transport)
        self._fast = fast_linear(network, workload.global_batch, mesh=mesh)
        self._dense = torch.optim.SGD(network.parameters(), lr=workload.lr, fused=True)
        self._samplers = {rows: Zipf(rows, workload.zipf) for rows in set(workload.table_rows)}
        self._pipeline = Pipeline[Item](self._embeddings, depth=depth)
        self._fill()

    def _fill(self) -> None:
        """Makes all ids known, a part of each table at a time."""
        rank, size, rows = self._mesh.rank, self._mesh.world_size, self._workload.table_rows
        steps = max(_FILL, max(rows) // self._workload.global_batch)
        for step in range(steps):
            part = step * size + rank
            ids = {
                table.name: [[i] for i in range(n * part // (steps * size), n * (part + 1) // (steps * size))]
                for table, n in zip(self._tables, rows, strict=True)
            }
            most = max(map(len, ids.values()))
            self._embeddings(
                SparseBatch.from_bags({name: each + [[]] * (most - len(each)) for name, each in ids.items()})
            )

    def round(self, warmup: int, steps: int) -> dict[str, Any]:
        """Seconds and processor time of a step, after some that are not timed, and what the stores moved in one."""
        elapsed_s = cpu_s = 0.0
        before: tuple[int, ...] = (0, 0, 0)
        for number, window in enumerate(self._pipeline.windows(self._items(warmup + steps))):
            if number == warmup:
                elapsed_s, cpu_s, before = time.perf_counter(), time.process_time(), self._moved()
            self._gradients.zero()
            for part in window:
                logits = self._network(window.item.dense[part.samples], part.embeddings.stacked())
                self._loss(logits, window.item.labels[part.samples]).backward()
            self._optimizer.step()
            self._gradients.average()
            self._dense.step()
        self._pipeline.wait()
        elapsed_s, cpu_s = time.perf_counter() - elapsed_s, time.process_time() - cpu_s
        hits, promoted, demoted = (after - old for after, old in zip(self._moved(), before, strict=True))
        moved = {"hits": hits / steps, "promoted": promoted / steps, "demoted": demoted / steps}
        return {"seconds": {"step": [elapsed_s / steps]}, "cpu_s": cpu_s / steps, **moved}

    def _moved(self) -> tuple[int, int, int]:
        counters = self._embeddings.dynamic_counters
        of = [counters[self._tables[i].name] for i in self._demoting if self._tables[i].name in counters]
        return sum(each.hits for each in of), sum(each.promoted for each in of), sum(each.evicted for each in of)

    def _items(self, count: int) -> Iterator[Item]:
        total, size = self._workload.global_batch, self._mesh.world_size
        part = slice(self._mesh.rank * total // size, (self._mesh.rank + 1) * total // size)
        drawn = []
        for _ in range(count):  # before the first is timed
            random = np.random.default_rng([self._workload.seed, self._step])
            self._step += 1
            ids = [self._samplers[rows].sample(random, (total, 1))[part] for rows in self._workload.table_rows]
            sparse = SparseBatch.from_dense([table.name for table in self._tables], torch.from_numpy(np.stack(ids)))
            dense = torch.from_numpy(random.random((total, NUM_DENSE), dtype=np.float32)[part])
            drawn.append(Item(dense, sparse, torch.from_numpy((random.random(total) < 0.25)[part].astype(np.float32))))
        return iter(drawn)

    def close(self) -> None:
        """Lets go of shared memory and stores."""
        self._embeddings.close()


def _rules(num_ids: int, share: float, store: str) -> Dynamic:
    room = 2 * num_ids if store.startswith("file:") else None
    return Dynamic(capacity=int(num_ids * share), mode="demote", store=store, store_capacity=room)


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "round")


if __name__ == "__main__":
    main()
