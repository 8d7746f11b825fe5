"""What a collection hands out: the vectors of a look-up, and views of the rows that a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rowmesh.errors import ConfigurationError


@dataclass(frozen=True)
class JaggedRows:
    """What a feature with pooling "none" returns: one vector an id.

    Attributes:
        values: `[N_f, D]`.
        offsets: int64 `[B + 1]`; sample s has `values[offsets[s]:offsets[s + 1]]`.
    """

    values: Tensor
    offsets: Tensor


@dataclass(frozen=True)
class LocalRows:
    """Some rows of a table that are in this rank's memory.

    Attributes:
        rows: which rows of the table they are.
        values: `[n, D]`, a view of the arena.
        state: optimizer state by name, `[n, D]` or `[n]`, views.
    """

    rows: range
    values: Tensor
    state: dict[str, Tensor]


class Embeddings:
    """What a look-up returns.

    Attributes:
        values: `[B, ΣD]`, the vectors of all pooled features side by side.
        features: the pooled features, in the order of their columns.
        dims: D of each of them.
    """

    def __init__(
        self, values: Tensor, features: tuple[str, ...], dims: tuple[int, ...], sequences: dict[str, JaggedRows]
    ) -> None:  # fmt: skip
        self.values = values
        self.features = features
        self.dims = dims
        self._sequences = sequences
        self._parts: dict[str, Tensor] | None = None

    def __getitem__(self, feature: str) -> Any:
        """`[B, D]` of one feature; JaggedRows where its table does not pool."""
        if feature in self._sequences:
            return self._sequences[feature]
        if self._parts is None:  # split once: its backward assembles one gradient instead of one a feature
            self._parts = dict(zip(self.features, self.values.split(self.dims, dim=1), strict=True))
        try:
            return self._parts[feature]
        except KeyError:
            raise KeyError(f"no feature {feature!r}; there are {[*self.features, *self._sequences]}") from None

    def __iter__(self) -> Iterator[str]:
        return iter((*self.features, *self._sequences))

    def stacked(self) -> Tensor:
        """`[B, F, D]`, a view; all pooled features must have the same dim."""
        if len(set(self.dims)) != 1:
            dims = dict(zip(self.features, self.dims, strict=True))
            raise ConfigurationError(f"features of different dims cannot be stacked: {dims}")
        return self.values.view(self.values.shape[0], len(self.dims), self.dims[0])
