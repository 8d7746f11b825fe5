"""DLRM in nothing but torch, as the peers have it: the parameters of `rowmesh.models.DLRM` from the same seed.

Imports neither rowmesh nor a peer: both environments read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class PlainDLRM(nn.Module):
    """Dense features and vectors to logits, by `nn.Linear`, `torch.bmm` and `index_select`.

    Args:
        num_dense: dense features, 1 or more.
        num_features: vectors of a sample.
        dim: of each.
    """

    def __init__(self, num_dense: int, num_features: int, dim: int) -> None:
        super().__init__()
        count = num_features + 1
        self.bottom = _mlp((num_dense, 512, 256, 64, dim), relu_last=True)
        self.top = _mlp((dim + count * (count - 1) // 2, 512, 256, 1), relu_last=False)
        rows, columns = torch.tril_indices(count, count, offset=-1)
        self.pairs: Tensor
        self.register_buffer("pairs", rows * count + columns, persistent=False)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        """`[B, num_dense]` and `[B, F, D]` to `[B]`."""
        base = self.bottom(dense)
        together = torch.cat([base.unsqueeze(1), vectors], dim=1)
        products = torch.bmm(together, together.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        return self.top(torch.cat([base, products], dim=1)).squeeze(1)


def _mlp(widths: Sequence[int], *, relu_last: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=(2 / (fan_in + fan_out)) ** 0.5)
        nn.init.normal_(linear.bias, std=fan_out**-0.5)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if relu_last else layers[:-1]))
