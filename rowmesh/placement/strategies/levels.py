"""Levels: which rows get copies, chosen by one multiplier.

A row is *cold* (one copy), *warm* (one copy a node) or *hot* (one copy a rank). Each level of each row has a cost in
seconds a step and takes extra bytes over all ranks; the best levels within a budget of bytes are the linear program

    minimize Σ cost(row, level(row))   such that   Σ extra bytes(row, level(row)) ≤ budget

whose optimum is found by sorting: every step up a row's levels saves so many seconds a byte (its *density*), and steps
are taken while they save anything and fit. The density of the last step is the multiplier λ of the budget: a row rises
as long as that saves more than λ seconds a byte. With gradients and optimizer state, deduplication, widths that differ
and rows read several times a sample, only the numbers change.

For fetches over links that cost 1 within a node and c across, this is the rule: hot where x > λ, warm where
λ / κ < x ≤ λ, with x what a row costs a batch and κ = G·c − G + 1.

Source: none; OPER §4.3 solves the same problem partition by partition (Algorithm 1). See docs/oper.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rowmesh.placement.cost import NODE, ONE_HOP, REPLICATED, REPLICATED_TWO_HOP, SLOT_BYTES, TWO_HOP
from rowmesh.placement.demand import Demand
from rowmesh.placement.pairs import LinkKinds
from rowmesh.placement.request import Request
from rowmesh.placement.topology import Topology

COLD, WARM, HOT = range(3)


@dataclass(frozen=True)
class LinkCosts:
    """Seconds a byte, by where bytes go; means, since cyclic rows load all ranks equally.

    Attributes:
        intra: between ranks of one node.
        inter: between ranks of different nodes.
        leader: between ranks of different nodes that have the same place: node leaders and owners, for two hops.
    """

    intra: float
    inter: float
    leader: float

    @staticmethod
    def of(topology: Topology) -> LinkCosts:
        """Means over a topology's links."""
        W, G, H, costs = topology.world_size, topology.ranks_per_node, topology.num_nodes, topology.costs
        if isinstance(costs, LinkKinds):
            kinds = ((costs.intra, W * (G - 1)), (costs.inter, W * (W - G)), (costs.inter, W * (H - 1)))
            # Rounded as the mean of a matrix is, since rounding decides between equal shifts.
            return LinkCosts(*(float(np.broadcast_to(c, n).mean()) if n else 0.0 for c, n in kinds))
        ranks = np.arange(topology.world_size)
        node, place = ranks // G, ranks % G
        apart = node[:, None] != node
        kinds = (~apart & (place[:, None] != place), apart, apart & (place[:, None] == place))
        return LinkCosts(*(float(costs[kind].mean()) if kind.any() else 0.0 for kind in kinds))


@dataclass(frozen=True, eq=False)
class RowBytes:
    """Bytes that one row of each run moves in a step, over all links of a kind, [5, K]: by how rows travel."""

    intra: np.ndarray
    inter: np.ndarray
    leader: np.ndarray

    @staticmethod
    def of(demand: Demand, request: Request) -> RowBytes:
        """As `rowmesh.placement.cost` counts them, summed over owners."""
        W, G, H = demand.world_size, demand.ranks_per_node, demand.num_nodes
        training, u, n, U = float(request.training), demand.rank, demand.node, demand.world
        gradient = training * demand.sent_gradient_bytes[demand.table]
        fetch = request.fetch_weight * (demand.sent_value_bytes[demand.table] + SLOT_BYTES)
        up = training * (demand.sent_gradient_bytes[demand.table] + SLOT_BYTES)
        down = training * U * (demand.gradient_bytes[demand.table] + SLOT_BYTES)
        intra, inter, leader = (np.zeros((5, len(u))) for _ in range(3))
        intra[ONE_HOP], inter[ONE_HOP] = (G - 1) * u * (fetch + gradient), (W - G) * u * (fetch + gradient)
        intra[TWO_HOP], leader[TWO_HOP] = (W - H) * u * (fetch + gradient), (H - 1) * n * (fetch + gradient)
        intra[NODE], leader[NODE] = (W - H) * u * (fetch + gradient), (H - 1) * (n * up + down)
        intra[REPLICATED], inter[REPLICATED] = (G - 1) * (u * up + down), (W - G) * (u * up + down)
        intra[REPLICATED_TWO_HOP] = (W - H) * (u * up + down)
        leader[REPLICATED_TWO_HOP] = (H - 1) * (n * up + down)
        return RowBytes(intra, inter, leader)

    def seconds(self, costs: LinkCosts) -> np.ndarray:
        """[5, K], over all links."""
        return costs.intra * self.intra + costs.inter * self.inter + costs.leader * self.leader


@dataclass(frozen=True, eq=False)
class Choices:
    """Seconds and bytes of a row of each run, at each level.

    Attributes:
        of_kind: [5, K], seconds by how rows travel (`rowmesh.placement.cost`).
        kind: [3, K], how rows of a level travel: with two hops where that is cheaper.
        seconds: [3, K].
        extra_bytes: [3, K], over all ranks.
        lengths: [K], rows of each run.
    """

    of_kind: np.ndarray
    kind: np.ndarray
    seconds: np.ndarray
    extra_bytes: np.ndarray
    lengths: np.ndarray

    @staticmethod
    def of(demand: Demand, seconds: np.ndarray, max_hops: int) -> Choices:
        """The cheaper way of each level; without different nodes or ranks in a node, warm is no level of its own."""
        W, G, H = demand.world_size, demand.ranks_per_node, demand.num_nodes
        allow_two = max_hops == 2 and G > 1 and H > 1
        cold = np.where(allow_two & (seconds[TWO_HOP] < seconds[ONE_HOP]), TWO_HOP, ONE_HOP)
        hot = np.where(allow_two & (seconds[REPLICATED_TWO_HOP] < seconds[REPLICATED]), REPLICATED_TWO_HOP, REPLICATED)
        warm = np.full_like(cold, NODE)
        kind = np.stack([cold, warm, hot])
        chosen = np.take_along_axis(seconds, kind, axis=0)
        if G == 1 or H == 1:
            chosen[WARM] = np.inf
        copies = np.array([0.0, H - 1, W - 1])
        return Choices(seconds, kind, chosen, copies[:, None] * demand.row_bytes[demand.table], demand.lengths)


@dataclass(frozen=True, eq=False)
class Levels:
    """How many of each run's rows, from its first on, have at least a level.

    Attributes:
        hot: int64 [K].
        copied: int64 [K], warm or hot.
        multiplier: λ, seconds a byte that the next step would save; 0 where all that pay were taken.
        bound_seconds: no levels within the budget cost less (the linear program's optimum).
    """

    hot: np.ndarray
    copied: np.ndarray
    multiplier: float
    bound_seconds: float


@dataclass(frozen=True, eq=False)
class Steps:
    """All steps that save something, best first: `rows` of run `run` rise to level `to` for `row_bytes` each."""

    run: np.ndarray
    to: np.ndarray
    skips_warm: np.ndarray
    density: np.ndarray
    row_bytes: np.ndarray
    rows: np.ndarray
    without_seconds: float

    @staticmethod
    def of(choices: Choices) -> Steps:
        """The lower convex hull of each run's levels, as steps in falling density."""
        cold, warm, hot = choices.seconds
        first, second = choices.extra_bytes[WARM], choices.extra_bytes[HOT] - choices.extra_bytes[WARM]
        with np.errstate(invalid="ignore", divide="ignore"):
            to_warm, to_hot = (cold - warm) / first, (warm - hot) / second
            direct = (cold - hot) / choices.extra_bytes[HOT]
        keeps_warm = np.isfinite(warm) & (to_warm > to_hot)
        every = np.arange(len(cold))
        run = np.concatenate([every, every])
        to = np.concatenate([np.where(keeps_warm, WARM, HOT), np.full(len(cold), HOT)])
        density = np.concatenate([np.where(keeps_warm, to_warm, direct), np.where(keeps_warm, to_hot, 0.0)])
        row_bytes = np.concatenate([np.where(keeps_warm, first, choices.extra_bytes[HOT]), second])
        skips = np.concatenate([~keeps_warm, np.zeros(len(cold), bool)])
        pays = np.flatnonzero(np.isfinite(density) & (density > 0))
        order = pays[np.argsort(-density[pays], kind="stable")]
        return Steps(
            run[order],
            to[order],
            skips[order],
            density[order],
            row_bytes[order],
            choices.lengths[run[order]],
            float(cold @ choices.lengths),
        )

    def take(self, budget_bytes: float, num_runs: int) -> Levels:
        """As many steps as fit; the first that does not is taken row by row."""
        spent = np.cumsum(self.rows * self.row_bytes)
        fitting = int(np.searchsorted(spent, budget_bytes, "right"))
        left = budget_bytes - (spent[fitting - 1] if fitting else 0.0)
        rows = self.rows[: fitting + 1].copy()
        saved = float((self.density * self.row_bytes * self.rows)[:fitting].sum())
        multiplier = 0.0
        if fitting < len(self.rows):
            rows[fitting] = int(left // self.row_bytes[fitting])
            multiplier = float(self.density[fitting])
            saved += multiplier * left
        hot, copied = (np.zeros(num_runs, np.int64) for _ in range(2))
        run, to = self.run[: fitting + 1], self.to[: fitting + 1]
        hot[run[to == HOT]] = rows[to == HOT]
        below = (to == WARM) | self.skips_warm[: fitting + 1]
        copied[run[below]] = rows[below]
        return Levels(hot, copied, multiplier, float(self.without_seconds - saved))
