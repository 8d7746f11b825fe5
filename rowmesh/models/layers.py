"""Layers of the models: stacks of linear layers, projections to one width, inputs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from rowmesh.errors import ConfigurationError
from rowmesh.models.protocol import Vectors


def mlp(widths: Sequence[int], *, relu_last: bool) -> nn.Sequential:
    """Linear layers with a ReLU after each, the last one by choice.

    Weights start from N(0, 2 / (in + out)) and biases from N(0, 1 / out), as in DLRM's reference implementation.
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=(2 / (fan_in + fan_out)) ** 0.5)
        nn.init.normal_(linear.bias, std=fan_out**-0.5)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*(layers if relu_last else layers[:-1]))


def check_positive(model: str, **sizes: int | Sequence[int]) -> None:
    """Raises ConfigurationError where a size, or one of several, is no whole number or not positive; names it."""
    for name, given in sizes.items():
        values = list(given) if isinstance(given, Sequence) else [given]
        if not all(isinstance(size, int) for size in values):
            raise ConfigurationError(f"{model}: {name} must be whole numbers, got {given!r}")
        if any(size < 1 for size in values):
            raise ConfigurationError(f"{model}: {name} must be positive, got {given}")


def check_inputs(model: str, dims: Mapping[str, int], num_dense: int) -> None:
    """Raises ConfigurationError where there is no feature with a table, or fewer than no dense ones."""
    if not dims:
        raise ConfigurationError(f"{model}: there are no features with embeddings; it needs one or more")
    if num_dense < 0:
        raise ConfigurationError(f"{model}: num_dense must be 0 or more, got {num_dense}")


def one_label(model: str, labels: Sequence[str]) -> None:
    """Raises ConfigurationError where there are several labels."""
    if len(labels) > 1:
        raise ConfigurationError(
            f"{model} predicts one label, and the data have {len(labels)} ({', '.join(labels)}); take shared_bottom, "
            "mmoe, dcn_v2 or dlrm"
        )


def side_by_side(dense: Tensor, embeddings: Vectors) -> Tensor:
    """`[B, num_dense + ΣD]`: dense features, then the vectors of all features."""
    return torch.cat([dense, embeddings.values], dim=1) if dense.shape[1] else embeddings.values


def per_label(outputs: Tensor, num_labels: int) -> Tensor:
    """`[B]` of `[B, 1]` where there is one label, else as they are."""
    return outputs.squeeze(1) if num_labels == 1 else outputs


class Projection(nn.Module):
    """Brings vectors of different dims to one width, by a matrix without bias for each that has another.

    Weights start from N(0, 1 / D), so that lengths are kept on average.

    Args:
        dims: D of the vector of every feature.
        width: of what comes out; default: the largest D.

    Raises:
        ConfigurationError: there is no feature, or the width is not positive.

    Example:
        >>> from rowmesh.collection.outputs import Embeddings
        >>> vectors = Embeddings(torch.zeros(5, 6), ("user", "item"), (4, 2), {})
        >>> Projection({"user": 4, "item": 2})(vectors).shape
        torch.Size([5, 2, 4])

    Source: Ginart et al., "Mixed Dimension Embeddings with Application to Memory-Efficient Recommendation Systems"
    (arXiv:1909.11810), §3.
    """

    def __init__(self, dims: Mapping[str, int], width: int | None = None) -> None:
        super().__init__()
        check_inputs("projection", dims, 0)
        self.dims, self.width = tuple(dims.values()), max(dims.values()) if width is None else width
        check_positive("projection", width=self.width)
        self.matrices = nn.ModuleList(
            nn.Identity() if dim == self.width else nn.Linear(dim, self.width, bias=False) for dim in self.dims
        )
        for matrix, dim in zip(self.matrices, self.dims, strict=True):
            if isinstance(matrix, nn.Linear):
                nn.init.normal_(matrix.weight, std=dim**-0.5)

    def forward(self, embeddings: Vectors) -> Tensor:
        """`[B, F, width]` of the vectors of all features."""
        return self.project(embeddings.values)

    def project(self, values: Tensor) -> Tensor:
        """The same of `[B, ΣD]`."""
        parts = values.split(self.dims, dim=1)
        return torch.stack([matrix(part) for matrix, part in zip(self.matrices, parts, strict=True)], dim=1)
