"""Cost of a step under a plan: memory, look-ups, and the bytes between every two ranks, as expectations.

These are the bytes that the exchange counts while it runs. For a row that one rank asks for with rate u, the ranks of
a node together with rate n and all ranks with rate U (`rowmesh.placement.demand`), in a step:

    one hop      the request (4 bytes) goes to the owner and the value comes back: u. In training u gradients follow.
    two hops     requests and gradients go to the *node leader*, the rank of the own node that has the owner's place,
                 which merges them: u between a rank and the leader, n between leader and owner.
    node         the leader holds a copy: values move within the node alone, u. In training the leaders send n summed
                 gradients to the owner, which sends U sums back to the other holders, each with its 4-byte slot.
    replicated   nothing is fetched. In training u gradients with their slots go to the owner (through leaders where the
                 range takes two hops: u, then n), and U sums with their slots go to all others, the same way back.

A table that sends sums (`TablePlan.send`) has one owner, which gets the bags of a rank: 4 bytes an id, 4 a bag where
bags differ in length, and the weights of ids. The owner pools them, so that it looks up every id, and sends a vector a
bag. In training a gradient a bag follows. Neither is rounded.

Where messages are rounded to bfloat16, values and gradients on their way to an owner take half their bytes. The sums
that an owner returns are not rounded, so that copies stay equal to it, nor is what a rank looks up.

Rows are not looked at one by one: arithmetic assigns a run of equal rows to owners, so that 33 M rows take
milliseconds. Nor are matrices of all pairs of ranks kept, which would be gigabytes on thousands of them.

Source: OPER §3.2. Differs: what moves follows from rules instead of a path matrix for each row
(`rowmesh.placement.equations` has those); deduplication, gradients, copies and two hops are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rowmesh.placement.demand import Demand
from rowmesh.placement.pairs import Links, Pairs, Spread
from rowmesh.placement.plan import Plan, RowRange

if TYPE_CHECKING:
    from rowmesh.placement.profile import Profile
    from rowmesh.placement.request import Request
    from rowmesh.placement.topology import Topology

SLOT_BYTES = 4
MESSAGE_BYTES = 8  # that a message of bags begins with
INDEX_BYTES = 12  # of an id that an owner looks up: the id as it is routed, and its place among distinct ones

# How the rows of a range travel; `two_hop` says nothing of `node`.
ONE_HOP, TWO_HOP, NODE, REPLICATED, REPLICATED_TWO_HOP = range(5)


@dataclass(frozen=True, eq=False)
class Cost:
    """Expected cost of a step. Matrices are [W, W]: what rank i receives from rank j; each is made when it is read.

    Attributes:
        memory_bytes: [W], rows and optimizer state.
        looked_up_rows: rows that rank j gathers for rank i; the diagonal is what a rank gathers for itself.
        looked_up_bytes: the bytes of those.
        fetched: bytes of requests and values between ranks; the diagonal is 0.
        pushed: bytes of gradients and of what keeps copies equal; the diagonal is 0.
        rounds: messages that wait for each other in a step.
        owner_bytes: [W], about what an owner of tables that send sums needs for the bags, vectors and gradients of all
            ranks.
    """

    memory_bytes: np.ndarray
    looked_up_rows: Pairs
    looked_up_bytes: Pairs
    fetched: Pairs
    pushed: Pairs
    rounds: int
    owner_bytes: np.ndarray

    @property
    def lookup_rows(self) -> np.ndarray:
        """[W, W], rows that rank j gathers for rank i."""
        return self.looked_up_rows.matrix()

    @property
    def lookup_bytes(self) -> np.ndarray:
        """[W, W], the bytes of those."""
        return self.looked_up_bytes.matrix()

    @property
    def fetch_bytes(self) -> np.ndarray:
        """[W, W], requests and values between ranks."""
        return self.fetched.matrix()

    @property
    def gradient_bytes(self) -> np.ndarray:
        """[W, W], gradients and what keeps copies equal."""
        return self.pushed.matrix()

    @property
    def link_bytes(self) -> np.ndarray:
        """[W, W], what rank i receives from rank j."""
        return (self.fetched + self.pushed).matrix()

    @cached_property
    def links(self) -> Links:
        """Bytes of links, summed up."""
        return Links.of(self.fetched + self.pushed)

    @property
    def fetched_bytes(self) -> float:
        """The bytes of requests and values between all ranks."""
        return Links.of(self.fetched).total

    @property
    def pushed_bytes(self) -> float:
        """The bytes of gradients, and of what keeps copies equal, between all ranks."""
        return Links.of(self.pushed).total

    @property
    def busiest_bytes(self) -> float:
        """The bytes that the busiest rank sends or receives, whichever is more."""
        return float(np.maximum(self.links.sent, self.links.received).max())

    @property
    def total_bytes(self) -> float:
        """The bytes between all ranks."""
        return self.links.total

    @cached_property
    def lookups(self) -> np.ndarray:
        """[W], rows that each rank gathers, for itself and others."""
        return Links.of(self.looked_up_rows).sent

    def link_seconds(self, topology: Topology, fetch_weight: float = 1.0) -> np.ndarray:
        """[W, W], the bytes of each link times its seconds a byte; the diagonal is 0."""
        return (self.fetched.times(fetch_weight) + self.pushed).matrix() * topology.cost

    def seconds(self, topology: Topology, fetch_weight: float = 1.0) -> Links:
        """`link_seconds`, summed up without the matrix."""
        return Links.of(self.fetched.times(fetch_weight) + self.pushed, topology.costs)

    def objective(self, topology: Topology, request: Request) -> float:
        """The number that a placement for `request` is judged by: the sum over links, or the slowest."""
        seconds = self.seconds(topology, request.fetch_weight)
        return seconds.most if request.minimizes_slowest_link else seconds.total

    def busy_seconds(self, topology: Topology, fetch_weight: float = 1.0) -> np.ndarray:
        """[W], how long each rank is busy: its links one by one, and its look-ups.

        A rank sends and receives at once, so the greater of both counts.
        """
        links = self.seconds(topology, fetch_weight)
        return np.maximum(links.sent, links.received) + Links.of(self.looked_up_bytes).sent * topology.own_cost

    def step_seconds(self, topology: Topology) -> float:
        """How long the exchange of a step takes at least: the busiest rank, and waits."""
        return float(self.busy_seconds(topology).max() + self.rounds * topology.longest_latency_s)

    @property
    def memory_balance(self) -> float:
        """Least over most of the ranks."""
        return degree_of_balance(self.memory_bytes)

    @property
    def lookup_balance(self) -> float:
        """Least over most rows looked up."""
        return degree_of_balance(self.lookups)

    def link_balance(self, topology: Topology | None = None) -> float:
        """Least over most of all links between different ranks: bytes, or seconds over a topology."""
        links = self.links if topology is None else self.seconds(topology)
        return links.least / links.most if links.most > 0 else 1.0


def degree_of_balance(values: np.ndarray) -> float:
    """Least over most, 1 where all are 0.

    Source: OPER Table 3 (DoB).
    """
    return float(values.min() / values.max()) if values.size and values.max() > 0 else 1.0


def cost_of(plan: Plan, profile: Profile, request: Request) -> Cost:
    """The cost of a step of `request.batch_size` samples a rank under a plan.

    Example:
        >>> from rowmesh.placement import TableShape
        >>> from rowmesh.placement.profile import Profile
        >>> from rowmesh.placement.request import Request
        >>> shape = TableShape("item", 4, value_bytes=64, gradient_bytes=64)
        >>> profile = Profile.from_counts({"item": [8, 4, 2, 2]}, [shape], num_samples=16)
        >>> cost = cost_of(Plan.cyclic([shape], 2), profile, Request(batch_size=1, mode="infer"))
        >>> cost.fetch_bytes.tolist()  # half of rank 1's accesses to rows 0 and 2, whose requests rank 0 receives
        [[0.0, 26.5], [41.5, 0.0]]
    """
    demand = Demand.of(profile, plan.world_size, plan.ranks_per_node, request)
    return cost_under(plan, demand, training=request.training)


def cost_under(plan: Plan, demand: Demand, *, training: bool) -> Cost:
    """`cost_of` where the demand is at hand."""
    W, G = plan.world_size, plan.ranks_per_node
    owners = Owners.of(plan, demand)
    spread = Spread(W, G)
    sums = _Sums.of(plan, demand)
    travels = ~sums.is_summed[demand.table]
    u, n, U = travels * demand.rank, travels * demand.node, demand.world
    read, summed = demand.value_bytes[demand.table], demand.gradient_bytes[demand.table]
    value, gradient = demand.sent_value_bytes[demand.table], demand.sent_gradient_bytes[demand.table]
    rows, asked = owners.sum(u), owners.sum(n)
    values, values_asked = owners.sum(u * value), owners.sum(n * value)

    fetch = spread.direct(values[ONE_HOP]) + spread.direct(rows[ONE_HOP]).times(SLOT_BYTES).reversed
    fetch += spread.within(values[TWO_HOP] + values[NODE]) + spread.across(values_asked[TWO_HOP])
    fetch += (spread.within(rows[TWO_HOP] + rows[NODE]) + spread.across(asked[TWO_HOP])).times(SLOT_BYTES).reversed
    fetched_sums, pushed_sums = sums_between(spread, sums.bags_bytes, sums.vectors_bytes, training=training)
    fetch, gradients = fetch + fetched_sums, pushed_sums
    if training:
        gradients += _gradients(owners, spread, u * gradient, n * gradient)
        copied = gradient + SLOT_BYTES
        gradients += _copies(owners, spread, u * copied, n * copied, U * (summed + SLOT_BYTES))
    return Cost(
        np.array(plan.memory_bytes),
        _lookups(spread, rows, asked) + spread.direct(sums.ids),
        _lookups(spread, owners.sum(u * read), owners.sum(n * read)) + spread.direct(sums.ids_bytes),
        fetch.without_own(),
        gradients.without_own(),
        _rounds(plan, training),
        W * sums.held_bytes,
    )


def sums_between(
    spread: Spread, bags_bytes: np.ndarray, vectors_bytes: np.ndarray, *, training: bool
) -> tuple[Pairs, Pairs]:
    """What ranks fetch from owners that sum their bags, and push to them.

    Args:
        spread: of the ranks.
        bags_bytes: [W], of the bags that a rank sends to each owner.
        vectors_bytes: [W], of the vectors that it gets.
        training: whether gradients of these follow.
    """
    vectors = spread.direct(vectors_bytes)
    return vectors + spread.direct(bags_bytes).reversed, vectors.reversed.times(float(training))


@dataclass(frozen=True, eq=False)
class _Sums:
    """What one rank has from, and sends to, the owners of tables that send sums.

    Attributes:
        is_summed: [T], whether each table sends sums.
        ids: [W], in its bags, by owner.
        ids_bytes: [W], of the rows of these.
        bags_bytes: [W], of its bags, as they travel.
        vectors_bytes: [W], of the vectors of these, and of their gradients.
        held_bytes: [W], that the owner holds for them.
    """

    is_summed: np.ndarray
    ids: np.ndarray
    ids_bytes: np.ndarray
    bags_bytes: np.ndarray
    vectors_bytes: np.ndarray
    held_bytes: np.ndarray

    @staticmethod
    def of(plan: Plan, demand: Demand) -> _Sums:
        is_summed = np.array([table.send == "sums" for table in plan.tables], bool)
        whole = np.flatnonzero(is_summed)
        owner = np.array([plan.tables[table].ranges[0].rank for table in whole], np.int64)

        def by_owner(of_table: np.ndarray) -> np.ndarray:
            return np.bincount(owner, of_table[whole], plan.world_size)

        # Tables alike in vectors and states are taken as a group, which has a message of its own to each owner.
        shapes = [plan.tables[table].shape for table in whole]
        kinds = {(rank, s.value_bytes, s.gradient_bytes, s.state_bytes) for rank, s in zip(owner, shapes, strict=True)}
        heads = np.bincount(np.array([kind[0] for kind in kinds], np.int64), minlength=plan.world_size)
        bags, vectors = demand.bags_bytes, demand.bags * demand.gradient_bytes
        return _Sums(
            is_summed,
            by_owner(demand.ids),
            by_owner(demand.ids * demand.value_bytes),
            by_owner(bags) + MESSAGE_BYTES * heads,
            by_owner(vectors),
            by_owner(bags + vectors + INDEX_BYTES * demand.ids),
        )


def _gradients(owners: Owners, spread: Spread, of_rank: np.ndarray, of_node: np.ndarray) -> Pairs:
    """Gradients of rows that the owner was asked for, so that it knows the slots."""
    single, summed = owners.sum(of_rank), owners.sum(of_node)
    up = spread.direct(single[ONE_HOP]) + spread.within(single[TWO_HOP] + single[NODE]) + spread.across(summed[TWO_HOP])
    return up.reversed


def _copies(owners: Owners, spread: Spread, of_rank: np.ndarray, of_node: np.ndarray, of_world: np.ndarray) -> Pairs:
    """Gradients with their slots of rows that have copies: up to the owner, and the sum down to the other holders."""
    single, summed, union = owners.sum(of_rank), owners.sum(of_node), owners.sum(of_world)
    through = summed[NODE] + summed[REPLICATED_TWO_HOP]
    up = spread.direct(single[REPLICATED]) + spread.within(single[REPLICATED_TWO_HOP]) + spread.across(through)
    down = spread.direct(union[REPLICATED]) + spread.within(union[REPLICATED_TWO_HOP])
    return up.reversed + down + spread.across(union[NODE] + union[REPLICATED_TWO_HOP])


def _lookups(spread: Spread, of_rank: np.ndarray, of_node: np.ndarray) -> Pairs:
    """What rank j gathers for rank i: as holder, or as node leader for the others of its node."""
    leaders = spread.within(of_rank[TWO_HOP])
    own = of_rank[TWO_HOP] - leaders.diagonal
    everywhere = (of_rank[REPLICATED] + of_rank[REPLICATED_TWO_HOP]).sum()
    found = spread.direct(of_rank[ONE_HOP]) + leaders + spread.across(of_node[TWO_HOP]) + spread.within(of_rank[NODE])
    return replace(found, diagonal=found.diagonal + own + everywhere)


def _rounds(plan: Plan, training: bool) -> int:
    """Messages that wait for each other."""
    kinds = {_kind(part) for table in plan.tables for part in table.ranges}
    if plan.world_size == 1:
        return 0
    hops_of_fetch = 2 if TWO_HOP in kinds else int(bool({ONE_HOP, NODE} & kinds))
    up = 2 if {TWO_HOP, NODE, REPLICATED_TWO_HOP} & kinds else 1
    down = 2 if REPLICATED_TWO_HOP in kinds else int(bool({NODE, REPLICATED} & kinds))
    return 2 * hops_of_fetch + (up + down if training else 0)


def _kind(part: RowRange) -> int:
    if part.rule == "node":
        return NODE
    if part.rule == "replicated":
        return REPLICATED_TWO_HOP if part.two_hop else REPLICATED
    return TWO_HOP if part.two_hop else ONE_HOP


@dataclass(frozen=True, eq=False)
class Owners:
    """The owners of the rows of a plan: pieces of runs within ranges, cyclic from a first owner on or fixed to it."""

    num_ranks: int
    run: np.ndarray
    kind: np.ndarray
    first_owner: np.ndarray
    lengths: np.ndarray
    is_fixed: np.ndarray

    @staticmethod
    def of(plan: Plan, demand: Demand) -> Owners:
        """Cuts runs where ranges begin."""
        W = plan.world_size
        parts = [
            (first, part) for first, table in zip(demand.first_row, plan.tables, strict=False) for part in table.ranges
        ]
        starts = np.array([first + part.start for first, part in parts])
        kind, shift = (np.array([f(part) for _, part in parts]) for f in (_kind, lambda part: part.shift))
        rank = np.array([part.rank if part.rule == "fixed" else -1 for _, part in parts])
        bounds = np.union1d(demand.starts, starts)
        run = np.searchsorted(demand.starts, bounds[:-1], "right") - 1
        part = np.searchsorted(starts, bounds[:-1], "right") - 1
        lengths, is_fixed = np.diff(bounds), rank[part] >= 0
        first_owner = np.where(is_fixed, rank[part], (bounds[:-1] - starts[part] + shift[part]) % W)
        return Owners(W, run, kind[part], first_owner, lengths, is_fixed)

    def sum(self, of_row: np.ndarray) -> np.ndarray:
        """[5, W]: the sum of a number of each row, by how rows travel and by their owner."""
        W, x = self.num_ranks, of_row[self.run]
        cyclic = np.where(self.is_fixed, 0.0, x)
        everywhere = np.bincount(self.kind, cyclic * (self.lengths // W), 5)
        first, rest = self.kind * (2 * W) + self.first_owner, self.lengths % W
        edges = np.bincount(first, cyclic, 10 * W) - np.bincount(first + rest, cyclic, 10 * W)
        line = np.cumsum(edges.reshape(5, 2 * W), axis=1)
        fixed = np.bincount(self.kind * W + self.first_owner, (x - cyclic) * self.lengths, 5 * W)
        return everywhere[:, None] + line[:, :W] + line[:, W:] + fixed.reshape(5, W)
