"""What a collection hands out: the vectors of a look-up, and views of the rows that a rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.placement import Piece
from rowmesh.tables import TieredArena

STORED_ROWS = 65_536
"""Rows of a tiered table that are copied at a time."""


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

    def commit(self) -> None:
        """Puts values and state that were changed where rows are kept: these are there already."""

    def forget(self) -> None:
        """Frees what was copied: nothing was."""


class StoredRows(LocalRows):
    """Some rows of a tiered table: copies, read when they are asked for, which only `commit` writes back.

    Attributes:
        rows: which rows of the table they are.
    """

    def __init__(self, arena: TieredArena, rows: range, slots: range) -> None:
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "_source", (arena, np.array(slots, np.uint32)))

    @classmethod
    def of(cls, arena: TieredArena, piece: Piece) -> list[LocalRows]:
        """A piece of a table, in parts small enough to be read one by one."""
        cuts = [slice(first, first + STORED_ROWS) for first in range(0, len(piece.rows), STORED_ROWS)]
        return [cls(arena, piece.rows[cut], piece.slots[cut]) for cut in cuts]

    def __getattr__(self, name: str) -> Any:
        """Reads values and state at first sight."""
        if name not in ("values", "state"):
            raise AttributeError(name)
        arena, slots = self._source
        values, state = arena.read_rows(slots)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "state", state)
        return values if name == "values" else state

    def commit(self) -> None:
        """Writes values and state, and forgets them."""
        arena, slots = self._source
        arena.write_rows(slots, self.values, self.state)
        self.forget()

    def forget(self) -> None:
        """Frees the copies; they are read again when they are asked for."""
        for name in ("values", "state"):
            self.__dict__.pop(name, None)


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
