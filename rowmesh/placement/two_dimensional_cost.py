"""Cost of a step where tables have replicas: memory, look-ups, all-to-alls within groups, and their synchronisation.

T ranks hold M replicas of a table, each spread over a group of N = T / M ranks; the M ranks that hold the same shard
are a replicate group (`rowmesh.mesh.grid`). Within a shard group everything is as in `rowmesh.placement.cost`. In a
step of b samples a rank, every rank sends to its replicate group, for its shard. A shard group touches a row of it with
probability u, any group with U:

    exact      the group's summed gradients of the rows it touched, w = 4 bytes of slot + gradient each. If
               there are two replicas, each sends u · w to the other; else u · w / M to each, as owners of a share of
               the rows, and as owner U · w / M of sums back to each. u is of b · N samples, U of b · T.
    average    the same with w = 4 + row and optimizer state, every k steps: u is of k · b · N samples, U of k · b · T,
               and a step pays 1 / k of it.
    dense      whole shards by a ring all-reduce every k steps: 2 · S · (M − 1) / T bytes a rank, S that of all tables.

Copies of a row within a group are each kept together with those of other groups, as shards of their own.

Source: two-dimensional sparse parallelism §3.1 and §5, equation (1), which is `dense`. Differs: the paper has neither
`exact` nor sending touched rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rowmesh.mesh.grid import Grid
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement.cost import NODE, ONE_HOP, SLOT_BYTES, TWO_HOP, Cost, Owners, cost_under
from rowmesh.placement.demand import Demand
from rowmesh.placement.pairs import Links
from rowmesh.placement.plan import Plan
from rowmesh.placement.profile import Profile
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Floats, Topology


@dataclass(frozen=True, eq=False)
class ReplicaCost:
    """Expected cost of a step on all T ranks. Matrices are [T, T]: what rank i receives from rank j.

    Attributes:
        memory_bytes: [T], rows and optimizer state, and those marks that averages take; no messages.
        lookups: [T], rows that each rank gathers, for itself and its group.
        exchange_bytes: of all-to-alls within groups; the diagonal is 0.
        sync_bytes: within replicate groups; the diagonal is 0.
        exchange_s: of all-to-alls: the busiest rank's links one by one, its look-ups, and waits.
        sync_s: of synchronisation: the busiest rank's links one by one, and waits.
        dense_s: what averaging whole shards would take instead, as often.
    """

    memory_bytes: np.ndarray
    lookups: np.ndarray
    exchange_bytes: np.ndarray
    sync_bytes: np.ndarray
    exchange_s: float
    sync_s: float
    dense_s: float

    @property
    def total_s(self) -> float:
        """All-to-alls, then synchronisation; the part of it that overlaps is not taken off."""
        return self.exchange_s + self.sync_s

    @property
    def imbalance(self) -> float:
        """Most look-ups of a rank over the mean, 1 where all are equal.

        Source: Table 1, "Imb. Ratio".
        """
        mean = float(self.lookups.mean())
        return float(self.lookups.max()) / mean if mean > 0 else 1.0


def cost_with_replicas(
    plan: Plan, profile: Profile, topology: Topology, request: Request, sync: Synchronization
) -> ReplicaCost:
    """The cost of a step of `request.batch_size` samples a rank under a plan whose tables may have replicas.

    Args:
        plan: for the T ranks of the topology.
        profile: of at least the plan's tables.
        topology: of all T ranks.
        request: what steps are like; in inference nothing is synchronised.
        sync: how replicas are kept together.

    Example:
        >>> from rowmesh.placement import TableShape
        >>> shape = TableShape("item", 4, value_bytes=64, gradient_bytes=64)
        >>> profile = Profile.from_counts({"item": [8, 4, 2, 2]}, [shape], num_samples=16)
        >>> plan = Plan.cyclic([shape], 4, replicas=2)
        >>> cost = cost_with_replicas(plan, profile, Topology.uniform(4), Request(batch_size=1), Synchronization())
        >>> cost.memory_bytes.tolist(), (cost.exchange_bytes > 0).astype(int).tolist()
        ([128, 128, 128, 128], [[0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])
    """
    exchange, sync_bytes, dense = (np.zeros((plan.world_size, plan.world_size)) for _ in range(3))
    lookups, lookup_bytes = (np.zeros(plan.world_size) for _ in range(2))
    exchange_wait = sync_wait = dense_wait = 0.0
    for count in plan.replica_counts:
        part = _Part.of(plan, count, profile, request, sync)
        cost = part.cost(request)
        for group in part.grid.groups:
            exchange[np.ix_(group, group)] += cost.link_bytes
            lookups[group] += cost.lookups
            lookup_bytes[group] += cost.lookup_bytes.sum(axis=0)
        exchange_wait += cost.rounds * _longest(topology.latency_s, part.grid.groups)
        if count > 1 and request.training:
            latency = _longest(topology.latency_s, part.grid.replicate_groups)
            moved, rounds = part.sync(request, sync)
            ring, ring_rounds = part.ring(sync.every)
            sync_bytes, sync_wait = sync_bytes + moved, sync_wait + rounds * latency
            dense, dense_wait = dense + ring, dense_wait + ring_rounds * latency
    has_marks = request.training and sync.mode == "average"
    memory = np.array(plan.memory_bytes) + (np.array(plan.mark_bytes) if has_marks else 0)
    local = lookup_bytes * topology.own_cost
    return ReplicaCost(
        memory,
        lookups,
        exchange,
        sync_bytes,
        exchange_s=float((_busy(exchange * topology.cost) + local).max()) + exchange_wait,
        sync_s=float(_busy(sync_bytes * topology.cost).max()) + sync_wait,
        dense_s=float(_busy(dense * topology.cost).max()) + dense_wait,
    )


class MeanSeconds:
    """Gives what a step takes the mean rank, without waits: that of a plan is the sum of that of its tables.

    Costs of links are summed up once, since matrices of all pairs of ranks are large.

    Args:
        topology: of all T ranks.
        grid: of all tables.
        request: what steps are like.
        sync: how replicas are kept together.
    """

    def __init__(self, topology: Topology, grid: Grid, request: Request, sync: Synchronization) -> None:
        self._grid, self._request, self._sync = grid, request, sync
        self._within = group_topology(topology, grid)
        self._between = np.zeros(grid.shards)
        for shard, ranks in enumerate(grid.replicate_groups):
            links = topology.cost[np.ix_(ranks, ranks)]
            if sync.dense:  # a ring
                self._between[shard] = np.roll(links, -1, axis=0).diagonal().sum()
            else:
                self._between[shard] = links.sum() - links.diagonal().sum()

    def __call__(self, plan: Plan, profile: Profile) -> float:
        """Of tables that all have as many replicas as the grid."""
        M, request, sync = self._grid.replicas, self._request, self._sync
        part = _Part.of(plan, M, profile, request, sync)
        cost = part.cost(request)
        local = Links.of(cost.looked_up_bytes).sent @ self._within.own_cost
        seconds = M * (Links.of(cost.fetched + cost.pushed, self._within.costs).total + local)
        if M > 1 and request.training:
            seconds += self._between @ part.sent_bytes(request, sync)
        return float(seconds) / plan.world_size


def group_topology(topology: Topology, grid: Grid) -> Topology:
    """The links within a replica group, as the mean over groups.

    Example:
        >>> topology = Topology.grouped(num_nodes=2, ranks_per_node=2, inter_over_intra=4.0)
        >>> [group_topology(topology, Grid(4, 2, together)).cost[0, 1].item() for together in ("shards", "replicas")]
        [1.0, 4.0]
    """
    if grid.replicas == 1:
        return topology
    per_node = grid.ranks_per_node(topology.ranks_per_node)
    cost, latency = (
        np.mean([values[np.ix_(group, group)] for group in grid.groups], axis=0)
        for values in (topology.cost, topology.latency_s)
    )
    name = f"{topology.name}, a group of {grid.shards}"
    return replace(
        topology, name=name, num_nodes=grid.shards // per_node, ranks_per_node=per_node, costs=cost, latencies=latency
    )


def restricted(profile: Profile, plan: Plan) -> Profile:
    """The profile of a plan's tables alone, in the plan's order."""
    by_name = {table.name: table for table in profile.tables}
    return replace(profile, tables=tuple(by_name[table.name] for table in plan.tables))


def _busy(seconds: Floats) -> Floats:
    """[T], a rank sends and receives at once, so the greater of both counts."""
    return np.maximum(seconds.sum(axis=0), seconds.sum(axis=1))


def _longest(latency_s: Floats, groups: Sequence[range]) -> float:
    """Latency of a message within a group, on its slowest link."""
    return max(float(latency_s[np.ix_(group, group)].max()) for group in groups)


@dataclass(frozen=True, eq=False)
class _Part:
    """The tables of M replicas: the plan of one group, and what its ranks ask for."""

    plan: Plan
    grid: Grid
    profile: Profile
    demand: Demand
    owners: Owners
    share: float

    @staticmethod
    def of(whole: Plan, replicas: int, profile: Profile, request: Request, sync: Synchronization) -> _Part:
        plan = whole.part(replicas)
        profile = restricted(profile, plan)
        share = 1.0 if sync.mode == "average" else 1.0 / replicas
        demand = Demand.of(profile, plan.world_size, plan.ranks_per_node, request, share=share)
        return _Part(plan, whole.grid(replicas), profile, demand, Owners.of(plan, demand), share)

    def cost(self, request: Request) -> Cost:
        """The cost of a step of one group."""
        return cost_under(self.plan, self.demand, training=request.training)

    def sync(self, request: Request, sync: Synchronization) -> tuple[Floats, float]:
        """Traffic of a step: bytes within replicate groups, [T, T], and messages that wait for each other."""
        if sync.dense:
            return self.ring(sync.every)
        found = np.zeros((self.grid.world_size, self.grid.world_size))
        for ranks, num_bytes in zip(self.grid.replicate_groups, self.sent_bytes(request, sync), strict=True):
            found[np.ix_(ranks, ranks)] = num_bytes
        np.fill_diagonal(found, 0.0)
        return found, (1 if self.grid.replicas == 2 else 2) / sync.every

    def ring(self, every: int) -> tuple[Floats, float]:
        """The same of an all-reduce of whole shards round each replicate group, equation (1)."""
        T, M = self.grid.world_size, self.grid.replicas
        found = np.zeros((T, T))
        for ranks, num_bytes in zip(self.grid.replicate_groups, self._ring_bytes(every), strict=True):
            for rank, following in zip(ranks, [*ranks[1:], ranks[0]], strict=True):
                found[following, rank] = num_bytes
        return found, 2 * (M - 1) / every

    def _ring_bytes(self, every: int) -> Floats:
        M = self.grid.replicas
        return 2 * (M - 1) / M * np.array(self.plan.memory_bytes) / every

    def sent_bytes(self, request: Request, sync: Synchronization) -> Floats:
        """[N], what a rank of each shard sends in a step to each other of its replicate group, or to the next."""
        if sync.dense:
            return self._ring_bytes(sync.every)
        samples, M = request.batch_size * sync.every, self.grid.replicas
        own, union = (
            self._shard_bytes(self._touched(samples * ranks, share, sync.every), sync) / sync.every
            for ranks, share in ((self.grid.shards, self.share), (self.grid.world_size, 1.0))
        )
        return own if M == 2 else (own + union) / M

    def _touched(self, samples: int, share: float, steps: int) -> Floats:
        """[K], the chance that the samples of some steps touch a row of each run."""
        tables = range(len(self.profile.tables))
        return np.concatenate([self.profile.presence(t, samples, share=share, steps=steps) for t in tables])

    def _shard_bytes(self, touched: Floats, sync: Synchronization) -> Floats:
        """[N], of the touched rows that each shard holds."""
        of_table = self.demand.gradient_bytes if sync.mode == "exact" else self.demand.row_bytes
        found = self.owners.sum(touched * (SLOT_BYTES + of_table[self.demand.table]))
        in_nodes = found[NODE].reshape(-1, self.plan.ranks_per_node).sum(axis=0)
        everywhere = found.sum() - found[[ONE_HOP, TWO_HOP, NODE]].sum()
        return found[ONE_HOP] + found[TWO_HOP] + np.tile(in_nodes, self.plan.num_nodes) + everywhere
