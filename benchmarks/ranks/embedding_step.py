"""One rank of rowmesh: forward, backward and update of the sparse part, through the public API."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import rank as rank_side
from benchmarks.hardware import CopyFloor, PingPong
from benchmarks.phases import PhaseClock
from benchmarks.ranks.setup import dynamic_specs, output_gradient, serve, sparse_batch, table_specs
from benchmarks.workload import Workload, make_batches
from rowmesh import EmbeddingCollection, EmbeddingOptimizer, Mesh, SparseBatch
from rowmesh.collection.engine import Engine
from rowmesh.collection.pooling import Pooling
from rowmesh.exchange.collective import CollectiveGroup, CollectiveTransport
from rowmesh.exchange.copies import Copies, Relay
from rowmesh.exchange.host_group import HostGroupExchange
from rowmesh.exchange.resolve.asking import RequestRouter
from rowmesh.exchange.resolve.owners import Owners
from rowmesh.exchange.resolve.resolver import Resolver
from rowmesh.mesh.barrier import Barrier
from rowmesh.mesh.channel import Channel
from rowmesh.ops.look_up import HostLookUp, HostLookUps
from rowmesh.ops.merge_update.sources import Sources
from rowmesh.placement import Plan
from rowmesh.tables.dynamic.owned import OwnedTable

# (owner, attribute, phase); an inner phase is not counted in the one around it.
PHASES = [
    (Engine, "make_route", "route"),
    (Resolver, "__call__", "resolve"),
    (RequestRouter, "count", "deal"),
    (RequestRouter, "fill", "deal"),
    (RequestRouter, "take", "take"),
    (Owners, "decide", "decide"),
    (OwnedTable, "open", "open"),
    (HostLookUps, "find_unique", "find"),
    (HostLookUp, "place", "find"),
    (Engine, "_fetch", "fetch"),
    (Engine, "_pool", "pool"),
    (HostLookUp, "compress", "compress"),
    (Pooling, "backward", "backward"),
    (Engine, "push", "push"),
    (Barrier, "wait", "barrier"),
    (Sources, "merge", "merge"),
    (HostGroupExchange, "apply", "update"),
    (CollectiveTransport, "_exchange_counts", "counts"),
    (CollectiveGroup, "post_keys", "keys"),
    (CollectiveGroup, "_reply", "gather rows"),
    (Relay, "request", "relay keys"),
    (Relay, "fetch", "relay rows"),
    (Relay, "push", "relay gradients"),
    (Copies, "share", "keep copies equal"),
    (CollectiveTransport, "_compare", "compare"),
    (CollectiveGroup, "post_gradients", "send gradients"),
    (Channel, "wait", "wait"),
]


@dataclass(frozen=True)
class SparsePart:
    """The tables, their optimizer, and batches that go round."""

    embeddings: EmbeddingCollection
    optimizer: EmbeddingOptimizer
    batches: list[SparseBatch]
    gradient: Tensor

    @staticmethod
    def of(
        workload: Workload,
        mesh: Mesh,
        transport: Any,
        plan: Plan | None = None,
        scattered: bool = True,
        wire_dtype: torch.dtype | None = None,
        storage: str = "dense",
        sums: Collection[int] = (),
    ) -> SparsePart:
        """The workload's; `scattered` as in `benchmarks.workload.Zipf`, `sums` as in `table_specs`."""
        tables = dynamic_specs(workload) if storage == "dynamic" else table_specs(workload, sums=sums)
        embeddings = EmbeddingCollection(tables, mesh=mesh, transport=transport, plan=plan, wire_dtype=wire_dtype)
        batches = make_batches(workload, mesh.rank, mesh.world_size, workload.num_batches, scattered)
        gradient = output_gradient(workload, mesh.world_size, len(tables) * workload.dim)
        sparse = [sparse_batch(tables, batch) for batch in batches]
        return SparsePart(embeddings, EmbeddingOptimizer(embeddings), sparse, gradient)

    def step(self, number: int) -> None:
        """Forward, backward, update."""
        out = self.embeddings(self.batches[number % len(self.batches)])
        out.values.backward(self.gradient)
        self.optimizer.step()


class Commands:
    """What the benchmark may ask for."""

    def __init__(
        self,
        workload: Workload,
        mesh: Mesh,
        transport: Any,
        wire_dtype: str = "",
        storage: str = "dense",
        sums: Collection[int] = (),
    ) -> None:
        self._workload, self._mesh = workload, mesh
        narrow = getattr(torch, wire_dtype) if wire_dtype else None
        self._part = SparsePart.of(workload, mesh, transport, wire_dtype=narrow, storage=storage, sums=sums)
        self._part.step(0)  # compiles
        self._floor_bytes = self._count_floor_bytes()
        self._copy = CopyFloor(sum(self._floor_bytes.values()), self._part.embeddings.barrier)
        self._ping_pong = PingPong(mesh) if mesh.is_one_host else None

    def round(self) -> dict[str, Any]:
        """Seconds of the timed steps and bytes received in one, with what the machine could do just then."""
        pings = self._pings()
        floor_s = self._copy.measure_s()
        embeddings, workload = self._part.embeddings, self._workload
        before = self._received_bytes()
        seconds = rank_side.alternate({"step": self._part.step}, workload, embeddings.barrier)
        received = (self._received_bytes() - before) / (workload.warmup + workload.steps)
        return {
            "seconds": seconds,
            "received_bytes": received,
            "ping_pong_ns": [*pings, *self._pings()],
            "floor_s": floor_s,
            "floor_bytes": self._floor_bytes,
        }

    def _pings(self) -> list[float]:
        """The latency between cores, where all ranks are on one host."""
        return [self._ping_pong.measure_ns()] if self._ping_pong else []

    def _received_bytes(self) -> int:
        """What this rank received of others since the start."""
        embeddings = self._part.embeddings
        return sum(each.bytes_received for each in (embeddings.common_counters, *embeddings.counters))

    def phases(self) -> dict[str, Any]:
        """Median milliseconds of each phase. The clock costs about a microsecond a phase."""
        clock, workload = PhaseClock(), self._workload
        with clock.watching(PHASES):
            for number in range(workload.warmup + workload.steps):
                self._part.embeddings.barrier()
                self._part.embeddings.barrier()
                with clock.step():
                    self._part.step(number)
        return {"phase_ms": clock.medians_ms()}

    def _count_floor_bytes(self) -> dict[str, int]:
        """Bytes that a step must move on this rank, by what they are; the mean over the batches."""
        part, rank, steps = self._part, self._mesh.rank, len(self._part.batches)
        (counters,) = part.embeddings.counters
        before = sum(counters.table_distinct.values())
        unique = remote = 0
        for number, batch in enumerate(part.batches):
            (group,) = part.embeddings.route(batch).groups
            unique += group.num_unique
            remote += group.num_unique - (group.look_up.bounds[rank + 1] - group.look_up.bounds[rank])
            part.step(number)
        updated = sum(counters.table_distinct.values()) - before
        row_bytes, output = 4 * self._workload.dim, part.gradient.nbytes
        return {
            "ids": 8 * part.batches[0].ids.numel(),
            "rows read": unique * row_bytes // steps,
            "output written": output,
            "gradient of the output read": output,
            "gradients of other ranks' rows written and read": 2 * remote * row_bytes // steps,
            "rows and their state updated": updated * 2 * (row_bytes + 4) // steps,
        }

    def close(self) -> None:
        """Lets go of shared memory."""
        self._part.embeddings.close()


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "round", "phases")


if __name__ == "__main__":
    main()
