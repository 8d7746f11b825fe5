"""Models of a user's, right ones and wrong ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rowmesh.models import DLRM, Vectors


class OwnDLRM(DLRM):
    """rowmesh's own, as a user's."""

    def __init__(self, *, dims: Mapping[str, int], num_dense: int, bottom: list[int], top: list[int]) -> None:
        dim = next(iter(dims.values()))
        super().__init__(num_dense=num_dense, num_features=len(dims), dim=dim, bottom=bottom, top=top)

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(dense, embeddings.stacked())


class SampleLoss(OwnDLRM):
    """With the loss that there is without one, sample by sample."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


class MeanLoss(OwnDLRM):
    """With it as a mean, and as an attribute."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # pyright: ignore[reportArgumentType]
        self.loss = nn.BCEWithLogitsLoss()


class Wide(nn.Module):
    """Takes tables of any dims; its running means differ by rank, and its batches must not be empty."""

    def __init__(self, *, dims: Mapping[str, int], num_dense: int, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(num_dense, affine=False) if num_dense else nn.Identity()
        self.layers = nn.Sequential(nn.LazyLinear(width), nn.ReLU(), nn.Linear(width, 1))
        self.last = f"{list(dims)[-1]}"

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        assert len(dense)
        own = embeddings[self.last].sum(1)
        dense = self.norm(dense) if len(dense) > 1 else dense
        return self.layers(torch.cat([dense, embeddings.values], dim=1)).squeeze(1) + own


class Dropping(Wide):
    """Leaves out some of its inputs at random."""

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        kept = F.dropout(embeddings.values, 0.5, self.training)
        return self.layers(torch.cat([dense, kept], dim=1)).squeeze(1)


class Shared(nn.Module):
    """One layer for all labels, and a head for each."""

    def __init__(self, *, dims: Mapping[str, int], num_dense: int, labels: tuple[str, ...], width: int = 8) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(num_dense + sum(dims.values()), width), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in labels)

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        shared = self.shared(torch.cat([dense, embeddings.values], dim=1))
        return torch.cat([head(shared) for head in self.heads], dim=1)


class SharedLoss(Shared):
    """With the loss of labels of 0 and 1 as its own, sample by sample."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").sum(1)


class NoForward(Wide):
    def forward(self, dense: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return dense


class Column(Wide):
    """Logits `[B, 1]`."""

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        return super().forward(dense, embeddings).unsqueeze(1)


class Fails(Wide):
    """Multiplies what does not fit."""

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        return dense @ embeddings.values


class WrongLoss(Wide):
    """A loss of another shape."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return torch.stack([logits, labels])


class NoParameters(nn.Module):
    def __init__(self, *, dims: Mapping[str, int], num_dense: int) -> None:
        super().__init__()

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        return embeddings.values.sum(1)


class Detached(Wide):
    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        return super().forward(dense, embeddings).detach()


class Refuses(Wide):
    """Cannot be made."""

    def __init__(self, **arguments: object) -> None:
        raise ValueError("no such luck")


def function() -> None:
    """No class."""
