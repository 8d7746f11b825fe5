"""What `rowmesh train` asks of a model, its own or a user's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Vectors(Protocol):
    """The vectors of a batch, as `rowmesh.collection.outputs.Embeddings` has them.

    Attributes:
        features: their names, in the order of their columns.
        dims: D of each of them.
    """

    features: tuple[str, ...]
    dims: tuple[int, ...]

    @property
    def values(self) -> Tensor:
        """`[B, ΣD]`, the vectors of all features side by side."""
        ...

    def __getitem__(self, feature: str) -> Tensor:
        """`[B, D]` of one feature."""
        ...

    def stacked(self) -> Tensor:
        """`[B, F, D]`; all features must have the same dim."""
        ...


class Model(Protocol):
    """A user's model, `model.name = "package.module:Class"` in a configuration.

    The class is a `torch.nn.Module` with these two methods. It is made once on every rank, then gets the parameters of
    rank 0. It has at least one parameter; tables are not among them. A batch that gives a rank no samples is not shown
    to it.

    For data with several labels it gives a logit for each, `[B, L]`, and is made with `labels`, their names, too. For a
    label of kind "value" it gives the value itself.

    It may have a loss of its own: `loss(logits, labels)`, a method or an attribute such as `nn.BCEWithLogitsLoss()`.
    `labels` are `[B]`, or `[B, L]`, of the dtype of the logits; it returns the losses of the samples `[B]`, or their
    mean. Where samples have weights it must be `[B]`, and rowmesh takes the weighted mean. Without one the loss is that
    of `train.loss`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Wide(nn.Module):
        ...     def __init__(self, *, dims, num_dense, width=8):
        ...         super().__init__()
        ...         inputs = num_dense + sum(dims.values())
        ...         self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))
        ...
        ...     def forward(self, dense, embeddings):
        ...         return self.layers(torch.cat([dense, embeddings.values], dim=1)).squeeze(1)
        >>> from rowmesh.collection.outputs import Embeddings
        >>> vectors = Embeddings(torch.zeros(5, 6), ("user", "item"), (4, 2), {})
        >>> Wide(dims={"user": 4, "item": 2}, num_dense=13)(torch.zeros(5, 13), vectors).shape
        torch.Size([5])
    """

    def __init__(self, *, dims: Mapping[str, int], num_dense: int, **options: object) -> None:
        """Makes the model.

        Args:
            dims: D of the vector of every categorical feature, by its name, in the order of the data; those that
                share a table stand together.
            num_dense: number of dense features, 0 or more.
            **options: the keys of `model.options`; and `labels`, a tuple of names, where there are several.
        """
        ...

    def __call__(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        """Logits `[B]`, or `[B, L]` of several labels; as in every `nn.Module`, what is written is `forward`.

        Args:
            dense: `[B, num_dense]`.
            embeddings: `embeddings["user"]` is `[B, D]`, `.values` are all of them side by side `[B, ΣD]`, and
                `.stacked()` is `[B, F, D]` where all D are equal.
        """
        ...
