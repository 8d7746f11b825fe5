"""RankingMetrics: HR@K, NDCG@K and MRR from where targets stand, with intervals and the share of ties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from rowmesh.mesh import Mesh
from rowmesh.run.sequence.exchange import total
from rowmesh.run.sequence.ranking import Standings

Ties = Literal["worst", "middle", "best"]
CUTOFFS = (1, 5, 10, 20, 50, 100, 200)
_LOWERING = {"worst": 1.0, "middle": 0.5, "best": 0.0}
_NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Mean:
    """A mean over users.

    Attributes:
        value: the mean.
        error: its standard error over users; 0 for one user.
    """

    value: float
    error: float

    @property
    def interval(self) -> tuple[float, float]:
        """95 % of such intervals hold the mean over all users there could be, to a normal approximation."""
        return self.value - _NORMAL_95 * self.error, self.value + _NORMAL_95 * self.error


class RankingMetrics:
    """Adds up what users' targets score.

    `rank = 1 + higher + tied · t`, with t = 1 ("worst": tied items stand before the target, so that a model that gives
    all items one score gets nothing for it), ½ ("middle") or 0 ("best"). HR@K is the share of ranks of K or less,
    NDCG@K the mean of `1 / log₂(1 + rank)` of these, and 0 of others; MRR the mean of `1 / rank`.

    Args:
        ties: how tied items count.
        cutoffs: the Ks.

    Example:
        >>> metrics = RankingMetrics()
        >>> metrics.add(Standings(higher=torch.tensor([0, 2]), tied=torch.tensor([0, 0])))
        >>> found = metrics.compute(Mesh())
        >>> found["hr@1"].value, round(found["mrr"].value, 4)
        (0.5, 0.6667)
    """

    def __init__(self, ties: Ties = "worst", cutoffs: tuple[int, ...] = CUTOFFS) -> None:
        self.ties: Ties = ties
        self.names = (*(f"{name}@{k}" for k in cutoffs for name in ("hr", "ndcg")), "mrr", "tied")
        self._cutoffs = cutoffs
        self._sums = torch.zeros(2, len(self.names), dtype=torch.float64)  # of values, and of their squares
        self._num_users = 0

    def add(self, standings: Standings) -> None:
        """Takes some users."""
        ranks = 1 + standings.higher.double() + _LOWERING[self.ties] * standings.tied.double()
        gains = 1 / (1 + ranks).log2()
        values = []
        for k in self._cutoffs:
            hits = ranks <= k
            values += [hits.double(), gains * hits]
        values += [1 / ranks, (standings.tied > 0).double()]
        stacked = torch.stack(values)
        self._sums += torch.stack([stacked.sum(1), stacked.square().sum(1)])
        self._num_users += len(ranks)

    def compute(self, mesh: Mesh) -> dict[str, Mean]:
        """The means over the users of all ranks: `hr@K`, `ndcg@K`, `mrr`, and `tied`, the share of targets with ties.

        Collective and blocking; NaN where there are no users.
        """
        counted = torch.cat([self._sums.flatten(), torch.tensor([self._num_users], dtype=torch.float64)])
        counted = total(mesh, counted)
        count = float(counted[-1])
        if not count:
            return dict.fromkeys(self.names, Mean(math.nan, math.nan))
        means, squares = (counted[:-1] / count).view(2, -1).tolist()
        return {
            name: Mean(mean, math.sqrt(max(square - mean * mean, 0.0) / max(count - 1, 1.0)))
            for name, mean, square in zip(self.names, means, squares, strict=True)
        }
