"""Tower: a DLRM whose computation can be set without making its parameters many.

Every feature's vector goes through one MLP that all features share, before the dot interactions. Its hidden width is
what a step computes; the gradients that ranks average stay small, so that communication is that of rows.

Imports neither rowmesh nor a peer: both environments read it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Tower(nn.Module):
    """Dense features and vectors to logits.

    Args:
        num_dense: dense features.
        num_features: vectors of a sample.
        dim: of each.
        hidden: width of the shared MLP.
    """

    def __init__(self, num_dense: int, num_features: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(num_dense, 64), nn.ReLU(), nn.Linear(64, dim), nn.ReLU())
        self.shared = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        count = num_features + 1
        self.top = nn.Sequential(nn.Linear(dim + count * (count - 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        rows, columns = torch.tril_indices(count, count, offset=-1)
        self.pairs: Tensor
        self.register_buffer("pairs", rows * count + columns)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """`[B, num_dense]` and `[B, F, D]` to `[B]`."""
        bottom = self.bottom(dense)
        together = torch.cat([bottom[:, None], vectors + self.shared(vectors)], 1)
        products = torch.bmm(together, together.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([bottom, products], 1)).squeeze(1)
