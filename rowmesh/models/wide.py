"""DeepFM, and Wide & Deep: a weight for every id beside a deep network.

[Note: first-order weights]
Both models have one weight for every id beside its vector. Here it is the first component of the vector that the
table holds, so that a table of dim D gives one weight and a vector of D − 1, and both are looked up, trained and placed
as one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from rowmesh.errors import ConfigurationError
from rowmesh.models.layers import Projection, check_inputs, check_positive, mlp, one_label
from rowmesh.models.protocol import Vectors


class DeepFM(nn.Module):
    """A factorization machine and an MLP over the same vectors.

    ::

        first = w_0 + Σ_f w_f + u · dense                           w_f: the first component of feature f's vector
        second = ½ Σ_d ((Σ_f v_fd)² − Σ_f v_fd²) = Σ_{f<g} ⟨v_f, v_g⟩    v_f: the other components
        logit = first + second + deep(dense, v)

    Vectors of different lengths are projected to the longest.

    Args:
        dims: D of the vector of every feature, by name; 2 or more.
        num_dense: number of dense features, 0 or more.
        labels: names of the labels; one.
        deep: widths of the hidden layers of the MLP.

    Raises:
        ConfigurationError: a size is too small, or there are several labels.

    Example:
        >>> from rowmesh.collection.outputs import Embeddings
        >>> model = DeepFM(dims={"user": 4, "item": 4}, num_dense=3, deep=[8])
        >>> model(torch.zeros(5, 3), Embeddings(torch.zeros(5, 8), ("user", "item"), (4, 4), {})).shape
        torch.Size([5])

    Source: Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction" (arXiv:1703.04247),
    equations 1 to 4. Differs: dense features have weights u and enter the MLP; in the paper they are a field each.
    """

    def __init__(
        self,
        *,
        dims: Mapping[str, int],
        num_dense: int,
        labels: Sequence[str] = ("label",),
        deep: Sequence[int] = (400, 400, 400),
    ) -> None:
        super().__init__()
        _check("deep_fm", dims, num_dense, labels, deep)
        self.dims = tuple(dims.values())
        lengths = {name: dim - 1 for name, dim in dims.items()}
        self.projection = Projection(lengths)
        self.bias = nn.Parameter(torch.zeros(()))
        self.dense = _weights(num_dense)
        self.deep = mlp((num_dense + len(dims) * self.projection.width, *deep, 1), relu_last=False)

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        """Logits `[B]` from `dense` `[B, num_dense]` and the vectors."""
        weights, vectors = first_and_others(embeddings.values, self.dims)
        v = self.projection.project(vectors)
        first = self.bias + weights.sum(1) + dense @ self.dense
        second = (v.sum(1).square() - v.square().sum(1)).sum(1) / 2
        return first + second + self.deep(torch.cat([dense, v.flatten(1)], dim=1)).squeeze(1)


class WideAndDeep(nn.Module):
    """A linear model over ids and an MLP over their vectors, trained together.

    ::

        logit = b + Σ_f w_f + u · dense + deep(dense, v)            w_f, v: as of `DeepFM`

    Crosses of features, which the paper's wide part has, are features of the data. Tables may have different dims.

    Args:
        dims: D of the vector of every feature, by name; 2 or more.
        num_dense: number of dense features, 0 or more.
        labels: names of the labels; one.
        deep: widths of the hidden layers of the MLP.

    Raises:
        ConfigurationError: a size is too small, or there are several labels.

    Example:
        >>> from rowmesh.collection.outputs import Embeddings
        >>> model = WideAndDeep(dims={"user": 4, "item": 2}, num_dense=3, deep=[8])
        >>> model(torch.zeros(5, 3), Embeddings(torch.zeros(5, 6), ("user", "item"), (4, 2), {})).shape
        torch.Size([5])

    Source: Cheng et al., "Wide & Deep Learning for Recommender Systems" (arXiv:1606.07792), equation 3. Differs: both
    parts have the update rule of the tables, where the paper takes FTRL for the wide one.
    """

    def __init__(
        self,
        *,
        dims: Mapping[str, int],
        num_dense: int,
        labels: Sequence[str] = ("label",),
        deep: Sequence[int] = (1024, 512, 256),
    ) -> None:
        super().__init__()
        _check("wide_and_deep", dims, num_dense, labels, deep)
        self.dims = tuple(dims.values())
        self.bias = nn.Parameter(torch.zeros(()))
        self.dense = _weights(num_dense)
        self.deep = mlp((num_dense + sum(self.dims) - len(self.dims), *deep, 1), relu_last=False)

    def forward(self, dense: Tensor, embeddings: Vectors) -> Tensor:
        """Logits `[B]` from `dense` `[B, num_dense]` and the vectors."""
        weights, vectors = first_and_others(embeddings.values, self.dims)
        wide = self.bias + weights.sum(1) + dense @ self.dense
        return wide + self.deep(torch.cat([dense, vectors], dim=1)).squeeze(1)


def first_and_others(values: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The first component of every feature's vector `[B, F]`, and all others side by side `[B, ΣD − F]`."""
    parts = values.split(tuple(dims), dim=1)
    return torch.cat([part[:, :1] for part in parts], dim=1), torch.cat([part[:, 1:] for part in parts], dim=1)


def _weights(num_dense: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(num_dense) * max(num_dense, 1) ** -0.5)


def _check(model: str, dims: Mapping[str, int], num_dense: int, labels: Sequence[str], deep: Sequence[int]) -> None:
    check_inputs(model, dims, num_dense)
    check_positive(model, deep=deep)
    one_label(model, labels)
    if short := [name for name, dim in dims.items() if dim < 2]:
        raise ConfigurationError(
            f"{model}: the vector of {short[0]!r} has dim {dims[short[0]]}; it needs 2 or more, since the first "
            "component is the id's own weight"
        )
