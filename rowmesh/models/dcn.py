"""DCN-v2: crosses of features, learned layer by layer, beside or before an MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from rowmesh.errors import ConfigurationError
from rowmesh.models.layers import check_inputs, check_positive, mlp, per_label, side_by_side
from rowmesh.models.protocol import Vectors


class CrossLayer(nn.Module):
    """One layer of crosses.

    ::

        x' = x_0 ⊙ (W x + b) + x                  W = U Vᵀ where a rank is given

    Args:
        width: of x.
        rank: of W; 0: full.
    """

    def __init__(self, width: int, rank: int = 0) -> None:
        super().__init__()
        self.squeeze = nn.Linear(width, rank, bias=False) if rank else nn.Identity()
        self.expand = nn.Linear(rank or width, width)
        for linear in (self.squeeze, self.expand):
            if isinstance(linear, nn.Linear):
                nn.init.xavier_normal_(linear.weight)
        nn.init.zeros_(self.expand.bias)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        """`[B, width]` from x_0 and x, both `[B, width]`."""
        return first * self.expand(self.squeeze(x)) + x


class DCNv2(nn.Module):
    """Deep & Cross Network, version 2.

    ::

        x_0 = (dense, embeddings)                                  [B, N], N = num_dense + ΣD
        x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l                       for each cross layer
        stacked:   logit = w · deep(x_L)
        parallel:  logit = w · (x_L, deep(x_0))

    Tables may have different dims. Several labels share all layers but the last.

    Args:
        dims: D of the vector of every feature, by name.
        num_dense: number of dense features, 0 or more.
        labels: names of the labels, each of which gets a logit.
        num_cross: cross layers.
        rank: of their matrices, which then are U Vᵀ; 0: full.
        deep: widths of the hidden layers of the MLP.
        structure: whether the MLP comes after the crosses or beside them.

    Raises:
        ConfigurationError: a size is not positive, or the structure is unknown.

    Example:
        >>> from rowmesh.collection.outputs import Embeddings
        >>> model = DCNv2(dims={"user": 4, "item": 2}, num_dense=3, deep=[8])
        >>> model(torch.zeros(5, 3), Embeddings(torch.zeros(5, 6), ("user", "item"), (4, 2), {})).shape
        torch.Size([5])

    Source: Wang et al., "DCN V2: Improved Deep & Cross Network" (arXiv:2008.13535), equations 1 and 2, §3.4.
    Differs: no mixture of low-rank experts (its §3.5).
    """

    def __init__(
        self,
        *,
        dims: Mapping[str, int],
        num_dense: int,
        labels: Sequence[str] = ("label",),
        num_cross: int = 3,
        rank: int = 0,
        deep: Sequence[int] = (512, 256),
        structure: Literal["stacked", "parallel"] = "stacked",
    ) -> None:
        super().__init__()
        check_inputs("dcn_v2", dims, num_dense)
        check_positive("dcn_v2", num_cross=num_cross, deep=deep)
        if structure not in ("stacked", "parallel"):
            raise ConfigurationError(f"dcn_v2: structure must be 'stacked' or 'parallel', got {structure!r}")
        width = num_dense + sum(dims.values())
        if not 0 <= rank < width:
            raise ConfigurationError(
                f"dcn_v2: rank must be 0 (full) to {width - 1}, below the {width} inputs; got {rank}"
            )
        self.num_labels, self.is_stacked = len(labels), structure == "stacked"
        self.crosses = nn.ModuleList(CrossLayer(width, rank) for _ in range(num_cross))
        self.deep = mlp((width, *deep), relu_last=True)
        last = deep[-1] if deep else width
        self.head = nn.Linear(last if self.is_stacked else width + last, self.num_labels)

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        """Logits `[B]`, or `[B, L]` of several labels, from `dense` `[B, num_dense]` and the vectors."""
        first = x = side_by_side(dense, embeddings)
        for cross in self.crosses:
            x = cross(first, x)
        hidden = self.deep(x) if self.is_stacked else torch.cat([x, self.deep(first)], dim=1)
        return per_label(self.head(hidden), self.num_labels)
