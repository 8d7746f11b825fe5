"""One rank of rowmesh: full steps through pipelines of one or more collections, which take turns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.intervals import Interval, exposed_s, seconds, within
from benchmarks.ranks.setup import serve, sparse_batch, table_specs
from benchmarks.tower import Tower
from benchmarks.workload import NUM_DENSE, NUM_TABLES, Workload, make_batches
from rowmesh import AdaGrad, EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch, TableSpec
from rowmesh._support.memory import resident_bytes
from rowmesh.errors import ConfigurationError
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.pipeline import BatchInFlight, Part, Pipeline
from rowmesh.pipeline.schedule import COMPUTE
from rowmesh.run.gradients import SharedGradients
from rowmesh.sparse import take
from rowmesh.tables import TensorTrain, Tiers

RETRIEVAL = ("read", "copy", "route", "retrieve")
"""Stages before a batch's rows can be fetched."""


@dataclass(frozen=True)
class Item:
    """What a loader gives."""

    dense: Tensor
    sparse: SparseBatch
    labels: Tensor

    def take(self, samples: Tensor) -> Item:
        """The given samples."""
        return Item(self.dense[samples], take(self.sparse, samples), self.labels[samples])


class Clock:
    """What was counted until now."""

    def __init__(self, tables: Tables) -> None:
        self.received_bytes, self.tier = tables.received_bytes, tables.tier
        self.began, self.cpu_s = time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Storages:
    """Where the rows of tables are.

    Attributes:
        tables: the storage of each table, in their order; without any all are tiered where there are tiers, else dense.
        rank: of tensor-train tables.
    """

    tables: tuple[str, ...] = ()
    rank: int = 16

    def specs(self, workload: Workload, *, has_tiers: bool) -> list[TableSpec]:
        """The tables of a workload; AdaGrad trains cores, since they have no state by row."""
        specs = table_specs(workload)
        names = self.tables or ("tiered" if has_tiers else "dense",) * len(specs)
        cored = {"optimizer": AdaGrad(lr=workload.lr), "tensor_train": TensorTrain(rank=self.rank)}
        return [
            replace(spec, storage=name, **(cored if name == "tensor_train" else {}))
            for spec, name in zip(specs, names, strict=True)
        ]


class Tables:
    """A collection and its optimizer."""

    def __init__(
        self,
        workload: Workload,
        mesh: Mesh,
        tiers: dict[str, Any] | None,
        storages: Storages = Storages(),
        **options: Any,
    ) -> None:
        specs = storages.specs(workload, has_tiers=tiers is not None)
        if tiers is None:
            self.embeddings = EmbeddingCollection(specs, mesh=mesh, transport="collective", **options)
        else:
            self.embeddings = EmbeddingCollection(specs, mesh=mesh, tiers=Tiers(**tiers), **options)
            self._write_all()
        self.optimizer = EmbeddingOptimizer(self.embeddings)

    def _write_all(self) -> None:
        """Writes every tiered row, so that none is computed instead of read."""
        for table in self.embeddings.tables:
            if table.storage == "tiered":
                for piece in self.embeddings.local_rows(table.name):
                    piece.commit()

    @property
    def received_bytes(self) -> int:
        """What this rank received of others, replicas among them, since the start."""
        counters = self.embeddings.counters
        return sum(each.bytes_received + each.synchronization.bytes_received for each in counters)

    @property
    def tier(self) -> dict[str, float]:
        """What the arena did since the start."""
        return next((asdict(counters) for counters in self.embeddings.tier_counters.values()), {})


class Commands:
    """What the benchmark may ask for."""

    def __init__(
        self,
        workload: Workload,
        mesh: Mesh,
        tiers: dict[str, Any] | None = None,
        num_batches: int = 0,
        storages: dict[str, Any] | None = None,
    ) -> None:
        self._workload, self._mesh = workload, mesh
        self._tables = {"": Tables(workload, mesh, tiers, Storages(**(storages or {})))}
        self._loss = nn.BCEWithLogitsLoss(reduction="sum")
        batches = make_batches(workload, mesh.rank, mesh.world_size, num_batches or workload.num_batches)
        specs = table_specs(workload)
        self._items = [Item(batch.dense, sparse_batch(specs, batch), batch.labels) for batch in batches]
        self._position = -1
        self._pipelines: dict[str, Pipeline[Item]] = {}
        self._clipped: set[str] = set()  # pipelines whose gradients are
        self._tables_of: dict[str, Tables] = {}
        self._computed: list[Interval] = []  # forward and backward of the network
        self._build(64)

    def hold(
        self, name: str, replicas: int, synchronization: dict[str, Any], tiers: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Makes one more collection of the same tables; says why where there is none."""
        try:
            self._tables[name] = Tables(
                self._workload, self._mesh, tiers, replicas=replicas, synchronization=Synchronization(**synchronization)
            )
        except ConfigurationError as error:
            return {"unavailable": str(error)}
        return {}

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

    def make(
        self, name: str, hidden: int, wait_ms: float = 0.0, tables: str = "", *, clips: bool = False, **options: Any
    ) -> dict[str, Any]:
        """Makes a pipeline, and the network anew; with `wait_ms` so long a wait takes the place of computing it.

        Args:
            name: of the pipeline.
            hidden: width of the network.
            wait_ms: of a whole batch; 0: the network is computed.
            tables: the collection, as `hold` named it.
            clips: whether gradients are clipped by their norm.
            options: of the pipeline.
        """
        self._build(hidden)
        self._wait_s, self._given = wait_ms / 1e3, self._given_vectors() if wait_ms else torch.empty(0)
        self._tables_of[name] = self._tables[tables]
        (self._clipped.add if clips else self._clipped.discard)(name)
        self._pipelines[name] = Pipeline[Item](self._tables[tables].embeddings, **options)
        return {"reasons": self._pipelines[name].reasons}

    def wait(self, wait_ms: float) -> dict[str, Any]:
        """Sets how long all pipelines wait from now on; they were made to wait."""
        self._wait_s = wait_ms / 1e3
        return {}

    def drop(self, name: str) -> dict[str, Any]:
        """Gives the memory of a pipeline back."""
        self._tables_of.pop(name)
        self._pipelines.pop(name).close()
        return {}

    def round(
        self, name: str, warmup: int, steps: int, cooldown: int = 0, messages: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Seconds of a step of a loop, after some that are not timed, and of its tasks by stage and micro-batch.

        Args:
            name: of the pipeline.
            warmup: steps before those that are timed.
            steps: that are timed.
            cooldown: steps after them. With some, time ends where the next step would begin, so that work of steps
                ahead is counted as often as in a loop without end.
            messages: stages that are communication.
        """
        pipeline, tables = self._pipelines[name], self._tables_of[name]
        clock, ended = Clock(tables), Clock(tables)
        averaged_s, mean_averaged_s = 0.0, 0.0
        self._computed.clear()
        items = (self._next() for _ in range(warmup + steps + cooldown))
        for number, window in enumerate(pipeline.windows(items)):
            if number == warmup:
                averaged_s, clock = 0.0, Clock(tables)
            if number == warmup + steps:
                ended, mean_averaged_s = Clock(tables), averaged_s / steps
            averaged_s += self._step(name, window)
            if number == warmup + steps - 1 and not cooldown:
                pipeline.wait()
                ended, mean_averaged_s = Clock(tables), averaged_s / steps
        tasks, processor = {"average.0": mean_averaged_s}, dict[str, float]()
        spans = [span for span in pipeline.recorder.spans() if clock.began <= span.start_s]
        for span in spans:
            if span.start_s < ended.began or not cooldown:
                key = f"{span.task.stage}.{span.task.part}"
                tasks[key] = tasks.get(key, 0.0) + (span.end_s - span.start_s) / steps
                processor[key] = processor.get(key, 0.0) + span.cpu_s / steps
        return {
            "seconds": {"step": [(ended.began - clock.began) / steps]},
            "cpu_s": (ended.cpu_s - clock.cpu_s) / steps,
            "tasks": tasks,
            "processor": processor,
            "received_bytes": (ended.received_bytes - clock.received_bytes) / steps,
            "parts": self._parts(pipeline, clock.began, ended.began, steps, messages),
            "disk": {name: (ended.tier[name] - before) / steps for name, before in clock.tier.items()},
            "memory": tables.embeddings.memory_bytes,
            "resident_bytes": resident_bytes(),
            "tier": tables.tier,
        }

    def _parts(
        self, pipeline: Pipeline[Item], began: float, ended: float, steps: int, messages: tuple[str, ...]
    ) -> dict[str, float]:
        """Seconds of a step's computation, of its communication and retrieval, and of those what nothing hides."""

        def of(stages: tuple[str, ...]) -> list[Interval]:
            spans = (span for span in pipeline.recorder.spans() if span.task.stage in stages)
            return within(((span.start_s, span.end_s) for span in spans), began, ended)

        accelerated, computed = within(self._computed, began, ended), of((COMPUTE,))
        communication, retrieval = of(messages), of(RETRIEVAL)
        parts = {
            "accelerated": seconds(accelerated),
            "computed": seconds(computed),
            "communication": seconds(communication),
            "exposed_communication": exposed_s(communication, computed),
            "retrieval": seconds(retrieval),
            "exposed_retrieval": exposed_s(retrieval, [*computed, *communication]),
        }
        return {name: value / steps for name, value in parts.items()}

    def _next(self) -> Item:
        """The next batch; after the last, the first."""
        self._position += 1
        return self._items[self._position % len(self._items)]

    def _step(self, name: str, window: BatchInFlight[Item]) -> float:
        """One step; returns the seconds of averaging the network's gradients."""
        self._gradients.zero()
        for part in window:
            self._compute(window.item, part)
        optimizer, averaged_s = self._tables_of[name].optimizer, 0.0
        if name in self._clipped:  # by the norm of the average
            averaged_s = self._average()
            optimizer.clip_grad_norm_(1e9, self._network.parameters())
        optimizer.step()
        if name not in self._clipped:
            averaged_s = self._average()
        self._dense.step()
        return averaged_s

    def _average(self) -> float:
        """Averages the network's gradients; returns how long it took, in seconds."""
        began = time.perf_counter()
        self._gradients.average()
        return time.perf_counter() - began

    def _compute(self, item: Item, part: Part) -> None:
        """Forward and backward of a micro-batch."""
        vectors, scale = part.embeddings.stacked(), 1 / len(item.labels)
        if self._wait_s:
            with self._computing():
                time.sleep(self._wait_s * scale * len(vectors))
            vectors.backward(self._given[part.samples] * scale)
            return
        with self._computing():
            logits = self._network(item.dense[part.samples], vectors)
            (self._loss(logits, item.labels[part.samples]) * scale).backward()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._computed.append((began, time.perf_counter()))

    def close(self) -> None:
        """Lets go of shared memory."""
        for tables in self._tables.values():
            tables.embeddings.close()


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "compute", "hold", "make", "wait", "drop", "round")


if __name__ == "__main__":
    main()
