"""Pairs: numbers of all pairs of ranks, which come in kinds, without a matrix that is gigabytes on thousands of ranks.

A link is between any two ranks, between two of a node, or between two of one place in different nodes. To each kind a
rank adds a number as sender and as receiver; a pair has the sum of its kinds. Where costs of links come in kinds, too,
sums over links take time and memory by the rank, else by the link.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

_MOST_PAIRS = 1 << 20  # that are summed up at a time


@dataclass(frozen=True)
class LinkKinds:
    """A number of each pair of ranks that is the same for all pairs of a kind.

    Attributes:
        own: of a rank and itself.
        intra: of different ranks of a node; of `inter` where nodes have one rank.
        inter: of ranks of different nodes; of `intra` where there is one node.
    """

    own: float = 0.0
    intra: float = 0.0
    inter: float = 0.0

    @staticmethod
    def of(matrix: np.ndarray, ranks_per_node: int) -> LinkKinds | None:
        """The kinds of a matrix [W, W], None where pairs of a kind differ.

        Example:
            >>> LinkKinds.of(np.array([[0.0, 1.0], [1.0, 0.0]]), ranks_per_node=2)
            LinkKinds(own=0.0, intra=1.0, inter=1.0)
        """
        W, G = len(matrix), ranks_per_node
        own, intra, inter = (float(matrix[0, peer]) for peer in (0, 1 % G, G % W))
        intra, inter = intra if G > 1 else inter, inter if W > G else intra
        kinds = LinkKinds(own, intra, inter)
        return kinds if np.array_equal(matrix, kinds.matrix(W, G)) else None

    def matrix(self, num_ranks: int, ranks_per_node: int) -> np.ndarray:
        """[W, W]."""
        node = np.arange(num_ranks) // ranks_per_node
        values = np.where(node[:, None] == node[None, :], float(self.intra), float(self.inter))
        np.fill_diagonal(values, self.own)
        return values


@dataclass(frozen=True, eq=False)
class Pairs:
    """A number of each pair of ranks, [W, W], rank i from rank j: the sum of what both add to links of a kind.

    Attributes:
        ranks_per_node: G.
        every: [2, W], to all pairs: what j adds, then what i adds.
        within: [2, W], to those within a node.
        across: [2, W], to those of one place in different nodes.
        diagonal: [W], instead of the sums.
    """

    ranks_per_node: int
    every: np.ndarray
    within: np.ndarray
    across: np.ndarray
    diagonal: np.ndarray

    @property
    def num_ranks(self) -> int:
        """W."""
        return len(self.diagonal)

    @property
    def reversed(self) -> Pairs:
        """Rank j from rank i."""
        return replace(self, every=self.every[::-1], within=self.within[::-1], across=self.across[::-1])

    def __add__(self, other: Pairs) -> Pairs:
        return Pairs(
            self.ranks_per_node,
            self.every + other.every,
            self.within + other.within,
            self.across + other.across,
            self.diagonal + other.diagonal,
        )

    def times(self, factor: float) -> Pairs:
        """All numbers times a factor."""
        return Pairs(
            self.ranks_per_node,
            factor * self.every,
            factor * self.within,
            factor * self.across,
            factor * self.diagonal,
        )

    def without_own(self) -> Pairs:
        """The same between different ranks."""
        return replace(self, diagonal=np.zeros(self.num_ranks))

    def matrix(self) -> np.ndarray:
        """[W, W]."""
        return self.node_rows(0, self.num_ranks // self.ranks_per_node)

    def node_rows(self, first: int, last: int) -> np.ndarray:
        """The rows of the ranks of some nodes, [(last − first) · G, W]."""
        W, G = self.num_ranks, self.ranks_per_node
        own = slice(first * G, last * G)
        found = self.every[1, own, None] + self.every[0]
        nodes, by_node = np.arange(last - first), found.reshape(last - first, G, W // G, G)
        by_node[nodes, :, first + nodes] += self.within[1, own].reshape(-1, G, 1) + self.within[0, own].reshape(
            -1, 1, G
        )
        places, across = np.arange(G), self.across.reshape(2, -1, G)
        added = across[1, first:last, None] + across[0]  # [nodes, H, G]
        added[nodes, first + nodes] = 0.0
        by_node[:, places, :, places] += added.transpose(2, 0, 1)
        np.fill_diagonal(found[:, own], self.diagonal[own])
        return found


@dataclass(frozen=True, eq=False)
class Links:
    """What links come to: sums by rank, the least and the most of links between different ranks.

    Attributes:
        received: [W], of each rank from all, itself included.
        sent: [W].
        least: of a link between different ranks; 0 where there is none.
        most: of any link.
    """

    received: np.ndarray
    sent: np.ndarray
    least: float
    most: float

    @property
    def total(self) -> float:
        """The sum of all links."""
        return float(self.received.sum())

    @staticmethod
    def of(pairs: Pairs, cost: LinkKinds | np.ndarray = LinkKinds(1.0, 1.0, 1.0)) -> Links:
        """The sums of all pairs, each times its cost: by kind or [W, W]."""
        if isinstance(cost, np.ndarray):
            return Links._by_node(pairs, cost)
        H, G = pairs.num_ranks // pairs.ranks_per_node, pairs.ranks_per_node
        every, within, across = (each.reshape(2, H, G) for each in (pairs.every, pairs.within, pairs.across))
        kinds = (
            (cost.intra, every + within, (1,), G - 1),
            (cost.inter, every, (0, 1), (H - 1) * (G - 1)),
            (cost.inter, every + across, (0,), H - 1),
        )
        received, sent = np.zeros((2, H, G))
        own = cost.own * pairs.diagonal
        least, most = np.inf, float(own.max())
        for each, (by_sender, by_receiver), axes, count in kinds:
            if not count:
                continue
            received += each * (count * by_receiver + _of_others(np.add, by_sender, axes))
            sent += each * (count * by_sender + _of_others(np.add, by_receiver, axes))
            least = min(least, each * float((by_receiver + _of_others(np.minimum, by_sender, axes)).min()))
            most = max(most, each * float((by_receiver + _of_others(np.maximum, by_sender, axes)).max()))
        return Links(received.ravel() + own, sent.ravel() + own, least if pairs.num_ranks > 1 else 0.0, most)

    @staticmethod
    def _by_node(pairs: Pairs, cost: np.ndarray) -> Links:
        """Some nodes at a time, since a matrix of all pairs is large on many ranks."""
        W, G = pairs.num_ranks, pairs.ranks_per_node
        received, sent, least, most = np.zeros(W), np.zeros(W), np.inf, -np.inf
        step = max(_MOST_PAIRS // (W * G), 1)
        for first in range(0, W // G, step):
            last = min(first + step, W // G)
            own = slice(first * G, last * G)
            values = pairs.node_rows(first, last) * cost[own]
            received[own] = values.sum(axis=1)
            sent += values.sum(axis=0)
            most = max(most, float(values.max()))
            np.fill_diagonal(values[:, own], np.inf)
            least = min(least, float(values.min()))
        return Links(received, sent, least if W > 1 else 0.0, most)


@dataclass(frozen=True)
class Spread:
    """Spreads numbers of owners, [W], over the pairs of ranks that move them."""

    num_ranks: int
    ranks_per_node: int

    def direct(self, of_owner: np.ndarray) -> Pairs:
        """Every rank from every owner."""
        return replace(self._none, every=_by_sender(of_owner), diagonal=of_owner)

    def within(self, of_owner: np.ndarray) -> Pairs:
        """Every rank from its node leaders, for all owners at their place."""
        H = self.num_ranks // self.ranks_per_node
        of_place = np.tile(of_owner.reshape(H, self.ranks_per_node).sum(axis=0), H)
        return replace(self._none, within=_by_sender(of_place), diagonal=of_place)

    def across(self, of_owner: np.ndarray) -> Pairs:
        """Node leaders from owners: ranks of the same place in other nodes."""
        return replace(self._none, across=_by_sender(of_owner))

    @property
    def _none(self) -> Pairs:
        zeros = np.zeros((2, self.num_ranks))
        return Pairs(self.ranks_per_node, zeros, zeros, zeros, zeros[0])


_NOTHING = {np.add: 0.0, np.minimum: np.inf, np.maximum: -np.inf}


def _of_others(combine: np.ufunc, values: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """For each place of values [H, G] what those combine to that differ from it along all axes."""
    for axis in axes:
        lines = np.moveaxis(values, axis, 0)
        edge = np.full_like(lines[:1], _NOTHING[combine])
        before = np.concatenate([edge, combine.accumulate(lines[:-1])])
        after = np.concatenate([combine.accumulate(lines[:0:-1])[::-1], edge])
        values = np.moveaxis(combine(before, after), 0, axis)
    return values


def _by_sender(values: np.ndarray) -> np.ndarray:
    return np.stack([values, np.zeros_like(values)])
