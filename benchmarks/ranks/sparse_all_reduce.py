"""One rank that keeps copies of rows equal in four ways, from gradients of the rows it touched to updated copies."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import rank as rank_side
from benchmarks.ranks.setup import serve
from benchmarks.workload import Workload
from rowmesh import SGD, EmbeddingCollection, Mesh, SparseBatch, TableSpec
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.route import Route
from rowmesh.exchange.transport import collect
from rowmesh.ops.memory import array_at
from rowmesh.ops.simd import kernel
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.tables.update_rules import Rate, Update

Touched = tuple[np.ndarray, np.ndarray]  # rows int64 [n], distinct, and their gradients float32 [n, D]


@kernel
def _add_rows(target, rows, source, factor):
    """target[rows[i]] += factor · source[i]."""
    for i in range(len(rows)):
        row = rows[i]
        for d in range(source.shape[1]):
            target[row, d] += factor * source[i, d]


@kernel
def _place_rows(target, rows, position, source):
    """target[position[rows[i]]] = source[i]."""
    for i in range(len(rows)):
        place = position[rows[i]]
        for d in range(source.shape[1]):
            target[place, d] = source[i, d]


@kernel
def _unite(lists, counts, position, union):
    """The distinct rows of all lists in order, and the position of each among them."""
    position[:] = -1
    for rank in range(len(counts)):
        for i in range(counts[rank]):
            position[lists[rank, i]] = 0
    found = 0
    for row in range(len(position)):
        if position[row] == 0:
            position[row] = found
            union[found] = row
            found += 1
    return found


class Variant(Protocol):
    """A way to keep copies equal.

    Attributes:
        weights: the copies on this rank, `[rows, D]`.
        bytes_sent: by this rank since the start.
    """

    weights: np.ndarray
    bytes_sent: float

    def prepare(self, touched: Touched) -> None:
        """What every look-up does anyway; not timed."""
        ...

    def synchronize(self, touched: Touched) -> None:
        """Subtracts lr times the sum of all ranks' gradients from the copies; collective."""
        ...


class Owners:
    """rowmesh: gradients to owners, which merge and sum; sums to all. In two hops where hosts have several ranks."""

    def __init__(self, num_rows: int, workload: Workload, mesh: Mesh) -> None:
        table = TableSpec(name="hot", num_rows=num_rows, dim=workload.dim, optimizer=SGD(lr=workload.lr))
        two_hop = 1 < mesh.ranks_per_node < mesh.world_size
        copied = TablePlan(TableShape.of(table), (RowRange(0, num_rows, "replicated", two_hop=two_hop),))
        plan = Plan((copied,), mesh.world_size, mesh.ranks_per_node)
        self._collection = EmbeddingCollection([table], mesh=mesh, transport="collective", plan=plan)
        (held,) = self._collection.held_rows("hot")
        self.weights = held.values.numpy()
        self._lr, self._steps = workload.lr, 0
        self._route: Route | None = None

    def prepare(self, touched: Touched) -> None:
        """Routes the rows, as a look-up would, and lays their gradients out, as its backward would."""
        rows, gradients = touched
        batch = SparseBatch.from_dense(["hot"], torch.from_numpy(rows)[None, :, None])
        self._route = self._collection.route(batch)
        (group,) = self._route.groups
        send = group.look_up.send
        send.reserve_gradients(gradients.nbytes)
        order = array_at(group.look_up.uniques, np.uint32, len(rows))
        np.take(gradients, order, axis=0, out=send.gradients.array(np.float32, *gradients.shape))

    def synchronize(self, touched: Touched) -> None:
        """The transport's own messages, slots included; no row is fetched."""
        assert self._route is not None
        self._steps += 1
        transport = self._collection.engine.shard_groups.stored[0].transport
        transport.fetch(self._route, lambda _: None)
        updates, step = [Update(self._lr, 1.0, self._steps)], Step(self._steps, (Rate(self._lr),))
        collect(transport, partial(transport.prepare, [self._route], updates, step), step)
        transport.apply()
        self._route = None

    @property
    def bytes_sent(self) -> float:
        """By the exchange's counters, opening messages included."""
        everything = (self._collection.common_counters, *self._collection.counters)
        return sum(counters.bytes_sent for counters in everything)

    def close(self) -> None:
        """Lets go of the collection."""
        self._collection.close()


class _Peer:
    """What the others share."""

    def __init__(self, num_rows: int, workload: Workload, mesh: Mesh) -> None:
        self.weights = np.zeros((num_rows, workload.dim), np.float32)
        self.bytes_sent = 0.0
        self._block = torch.zeros(num_rows, workload.dim)
        self._lr, self._mesh = np.float32(workload.lr), mesh

    def prepare(self, touched: Touched) -> None:
        """Nothing."""

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(mine) for _ in range(self._mesh.world_size)]
        dist.all_gather(everyone, mine, group=self._mesh.group)
        self.bytes_sent += mine.nbytes * (self._mesh.world_size - 1)
        return everyone

    def _counts(self, touched: Touched) -> np.ndarray:
        return torch.cat(self._gather(torch.tensor([len(touched[0])]))).numpy()

    def _reduce(self, block: torch.Tensor) -> None:
        """A dense all-reduce, which gloo does as a ring."""
        dist.all_reduce(block, group=self._mesh.group)
        self.bytes_sent += block.nbytes * 2 * (self._mesh.world_size - 1) / self._mesh.world_size


class LocalAggregated(_Peer):
    """The paper's (OPER §5.3): the union of all indices, a block of zeros and own gradients, a dense all-reduce."""

    def __init__(self, num_rows: int, workload: Workload, mesh: Mesh) -> None:
        super().__init__(num_rows, workload, mesh)
        self._position = np.empty(num_rows, np.int32)
        self._union = np.empty(num_rows, np.int32)

    def synchronize(self, touched: Touched) -> None:
        """See `Variant`."""
        rows, gradients = touched
        counts = self._counts(touched)
        mine = torch.zeros(int(counts.max()), dtype=torch.int32)
        mine[: len(rows)] = torch.from_numpy(rows)
        lists = torch.stack(self._gather(mine)).numpy()
        found = _unite(lists, counts, self._position, self._union)
        block = self._block[:found].zero_()
        _place_rows(block.numpy(), rows, self._position, gradients)
        self._reduce(block)
        _add_rows(self.weights, self._union[:found], block.numpy(), -self._lr)


class Dense(_Peer):
    """One all-reduce of the gradients of all copied rows, touched or not."""

    def synchronize(self, touched: Touched) -> None:
        """See `Variant`."""
        rows, gradients = touched
        block = self._block.zero_()
        _add_rows(block.numpy(), rows, gradients, np.float32(1))
        self._reduce(block)
        torch.from_numpy(self.weights).sub_(block, alpha=float(self._lr))


class AllGather(_Peer):
    """Every rank's rows and gradients to every rank, which adds them in the order of the ranks.

    Straight to the weights, which is enough for SGD alone: other rules need the sum first, and would take longer.
    """

    def synchronize(self, touched: Touched) -> None:
        """See `Variant`."""
        rows, gradients = touched
        counts = self._counts(touched)
        most, dim = int(counts.max()), gradients.shape[1]
        mine = torch.zeros(most, 1 + dim)
        mine[: len(rows), 0].view(torch.int32).copy_(torch.from_numpy(rows))
        mine[: len(rows), 1:] = torch.from_numpy(gradients)
        for count, theirs in zip(counts.tolist(), self._gather(mine), strict=True):
            part = theirs[:count].numpy()
            _add_rows(self.weights, part.view(np.int32)[:, 0], part[:, 1:], -self._lr)


VARIANTS = {"owners": Owners, "local_aggregated": LocalAggregated, "dense": Dense, "all_gather": AllGather}


def touched_rows(
    num_rows: int, share: float, overlap: str, world_size: int, rank: int, generator: np.random.Generator
) -> np.ndarray:
    """The rows that a rank touches: `same` on all ranks, `independent`, or `disjoint`; in no order.

    Args:
        num_rows: copied.
        share: of them that each rank touches.
        overlap: see above.
        world_size, rank: this rank's.
        generator: in the same state on all ranks.
    """
    count = max(round(share * num_rows), 1)
    permutations = [generator.permutation(num_rows) for _ in range(world_size)]
    if overlap == "independent":
        return permutations[rank][:count]
    first = {"same": 0, "disjoint": rank * count}[overlap]
    return permutations[0][first : first + count]


class Commands:
    """What the benchmark may ask for."""

    def __init__(self, workload: Workload, mesh: Mesh, num_rows: int) -> None:
        self._workload, self._mesh, self._num_rows = workload, mesh, num_rows
        self._variants: dict[str, Variant] = {name: make(num_rows, workload, mesh) for name, make in VARIANTS.items()}
        self._batches: list[Touched] = []

    def draw(self, share: float, overlap: str) -> dict[str, Any]:
        """The next case."""
        generator = np.random.default_rng(self._workload.seed)
        self._batches, unions, mesh = [], [], self._mesh
        for number in range(self._workload.num_batches):
            rows = touched_rows(self._num_rows, share, overlap, mesh.world_size, mesh.rank, generator)
            values = np.random.default_rng([self._workload.seed, number, mesh.rank])
            gradients = values.standard_normal((len(rows), self._workload.dim), dtype=np.float32)
            self._batches.append((rows, gradients))
            touched = torch.zeros(self._num_rows)
            touched[torch.from_numpy(rows)] = 1
            dist.all_reduce(touched, group=mesh.group)
            unions.append(int((touched > 0).sum()))
        return {"touched_rows": len(self._batches[0][0]), "union_rows": round(float(np.mean(unions)))}

    def round(self) -> dict[str, Any]:
        """Seconds of the timed steps of each variant, in turns."""
        seconds: dict[str, list[float]] = {name: [] for name in self._variants}
        for number in range(self._workload.warmup + self._workload.steps):
            touched = self._batches[number % len(self._batches)]
            for name, variant in self._variants.items():
                variant.prepare(touched)
                seconds[name].append(rank_side.timed(partial(variant.synchronize, touched), self._barrier))
        return {"seconds": {name: times[self._workload.warmup :] for name, times in seconds.items()}}

    def count(self) -> dict[str, Any]:
        """Bytes that this rank sends in a step of each variant, the mean over the batches."""
        before = {name: variant.bytes_sent for name, variant in self._variants.items()}
        for touched in self._batches:
            for variant in self._variants.values():
                variant.prepare(touched)
                variant.synchronize(touched)
        return {name: (v.bytes_sent - before[name]) / len(self._batches) for name, v in self._variants.items()}

    def check(self) -> dict[str, Any]:
        """The largest error of each variant over the largest sum, and the bits of its copies, after a step from 0."""
        rows, gradients = touched = self._batches[0]
        expected = torch.zeros(self._num_rows, self._workload.dim, dtype=torch.float64)
        expected[torch.from_numpy(rows)] = torch.from_numpy(gradients).double()
        dist.all_reduce(expected, group=self._mesh.group)
        expected *= -self._workload.lr
        result = {}
        for name, variant in self._variants.items():
            variant.weights[:] = 0
            self._barrier()
            variant.prepare(touched)
            variant.synchronize(touched)
            error = (torch.from_numpy(variant.weights) - expected).abs().max() / expected.abs().max()
            digest = hashlib.blake2b(variant.weights.tobytes(), digest_size=8).hexdigest()
            result[name] = {"error": float(error), "digest": digest}
        return result

    def _barrier(self) -> None:
        dist.barrier(self._mesh.group)

    def close(self) -> None:
        """Lets go of the collection."""
        owners = self._variants["owners"]
        assert isinstance(owners, Owners)
        owners.close()


def main() -> None:
    """Serves until the benchmark hangs up."""
    serve(Commands, "draw", "round", "count", "check")


if __name__ == "__main__":
    main()
