"""DLRM: the deep learning recommendation model, given its embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rowmesh.errors import ConfigurationError
from rowmesh.models.layers import Projection, check_positive, mlp
from rowmesh.models.protocol import Vectors
from rowmesh.ops.interaction import interact


class DotInteraction(nn.Module):
    """A base vector, and the dot products of all pairs of it and the embeddings.

    ::

        T = (base, embeddings)                                  [B, F + 1, D]
        y = (base, ⟨T_1, T_0⟩, ⟨T_2, T_0⟩, ⟨T_2, T_1⟩, …)         [B, D + F(F + 1)/2]

    It has no parameters. One kernel computes a sample, five times as fast as `torch.bmm` and what follows it, forward
    and backward; the results agree to rounding. In a compiled or exported model it is plain torch.

    Example:
        >>> import torch
        >>> DotInteraction()(torch.ones(2, 4), torch.ones(2, 3, 4)).shape
        torch.Size([2, 10])

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
    (arXiv:1906.00091).
    """

    def forward(self, base: Tensor, embeddings: Tensor) -> Tensor:
        """`[B, D]` and `[B, F, D]` to `[B, D + F(F + 1)/2]`, in the dtype of the embeddings."""
        return interact(base, embeddings)


class DLRM(nn.Module):
    """Bottom MLP, pairwise dot products, top MLP.

    ::

        b = bottom(dense)                               [B, D]
        T = (b, embeddings)                             [B, F + 1, D]
        logit = top(b, ⟨T_i, T_j⟩ for all j < i)        [B], or [B, L]

    Weights start from N(0, 2 / (in + out)) and biases from N(0, 1 / out), as in the reference
    implementation. Without dense features a learned vector stands in for the bottom output, so that
    every embedding still has a first-order term. Several labels share all layers but the last one, which has a head of
    its own for each.

    Attributes:
        bottom_widths: of all layers, from the dense features to D; only D without dense features.
        top_widths: of all layers, from what the interactions give to the logit.

    Args:
        num_dense: number of dense features, 0 or more.
        num_features: F, the number of embeddings a sample has.
        dim: D, the length of every embedding.
        bottom: widths of the hidden layers of the bottom MLP; a last layer of width D is added.
        top: widths of the hidden layers of the top MLP; a last layer of width L is added.
        num_labels: L, the number of labels, each of which gets a logit.

    Raises:
        ConfigurationError: a size is not positive, or there is nothing to interact.

    Example:
        >>> model = DLRM(num_dense=13, num_features=26, dim=16, bottom=[64, 32], top=[64])
        >>> model(torch.zeros(5, 13), torch.zeros(5, 26, 16)).shape
        torch.Size([5])

    Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems" (arXiv:1906.00091), and its reference implementation (`dlrm_s_pytorch.py`).
    """

    def __init__(
        self,
        *,
        num_dense: int,
        num_features: int,
        dim: int,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
        num_labels: int = 1,
    ) -> None:
        super().__init__()
        _check_sizes(num_dense, num_features, dim, bottom, top, num_labels)
        self.num_dense, self.num_features, self.dim = num_dense, num_features, dim
        self.interact = DotInteraction()
        self.bottom_widths = (num_dense, *bottom, dim) if num_dense else (dim,)
        self.top_widths = (dim + num_features * (num_features + 1) // 2, *top, num_labels)
        self.bottom = mlp(self.bottom_widths, relu_last=True) if num_dense else None
        self.stand_in = None if num_dense else nn.Parameter(torch.randn(dim) * dim**-0.5)
        self.top = mlp(self.top_widths, relu_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits `[B]`, or `[B, L]` of several labels, from `dense` `[B, num_dense]` and `embeddings` `[B, F, D]`."""
        logits = self.top(self.interact(self._base(dense, embeddings), embeddings))
        return logits.squeeze(1) if self.top_widths[-1] == 1 else logits

    def _base(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        if self.bottom is not None:
            return self.bottom(dense)
        assert self.stand_in is not None
        return self.stand_in.expand(embeddings.shape[0], -1)


def _check_sizes(
    num_dense: int, num_features: int, dim: int, bottom: Sequence[int], top: Sequence[int], num_labels: int
) -> None:
    check_positive("dlrm", num_features=num_features, dim=dim, bottom=bottom, top=top, num_labels=num_labels)
    if num_dense < 0:
        raise ConfigurationError(f"dlrm: num_dense must be 0 or more, got {num_dense}")


class ProjectedDLRM(nn.Module):
    """DLRM over tables of different dims: each vector is projected to one width first.

    Args:
        dims: D of the vector of every feature, by name.
        num_dense: number of dense features, 0 or more.
        labels: names of the labels, each of which gets a logit.
        width: of the projected vectors; default: the largest D.
        bottom: as for `DLRM`.
        top: as for `DLRM`.

    Raises:
        ConfigurationError: a size is not positive, or there is no feature.

    Example:
        >>> from rowmesh.collection.outputs import Embeddings
        >>> model = ProjectedDLRM(dims={"user": 4, "item": 2}, num_dense=3, bottom=[8], top=[8])
        >>> model(torch.zeros(5, 3), Embeddings(torch.zeros(5, 6), ("user", "item"), (4, 2), {})).shape
        torch.Size([5])
    """

    def __init__(
        self,
        *,
        dims: Mapping[str, int],
        num_dense: int,
        labels: Sequence[str] = ("label",),
        width: int | None = None,
        bottom: Sequence[int] = (512, 256, 64),
        top: Sequence[int] = (512, 256),
    ) -> None:
        super().__init__()
        self.projection = Projection(dims, width)
        self.dlrm = DLRM(
            num_dense=num_dense,
            num_features=len(dims),
            dim=self.projection.width,
            bottom=bottom,
            top=top,
            num_labels=len(labels),
        )

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        """Logits `[B]`, or `[B, L]` of several labels, from `dense` `[B, num_dense]` and the vectors."""
        return self.dlrm(dense, self.projection(embeddings))
