"""Bijection: which row each frequency rank of a table has, where rows were put in another order."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import DataError


def _no_rows() -> NDArray[np.int32]:
    return np.empty(0, np.int32)


@dataclass(frozen=True, eq=False)
class Bijection:
    """Ranks and rows of a table: equal but for the ranks of one span, which have its rows in another order.

    Attributes:
        first: where the span begins.
        row_of_rank: int32, the row of each rank of the span; may be memory-mapped.

    Raises:
        DataError: these are not the rows of the span, each once.

    Example:
        >>> bijection = Bijection(2, np.array([4, 2, 3], np.int32))
        >>> bijection.rows(np.array([0, 2, 3, 4, 5])).tolist(), bijection.ranks(np.array([4, 5])).tolist()
        ([0, 4, 2, 3, 5], [2, 5])
    """

    first: int = 0
    row_of_rank: NDArray[np.int32] = field(default_factory=_no_rows)

    def __post_init__(self) -> None:
        span = self.span
        rows = self.row_of_rank
        inside = rows.ndim == 1 and (not len(rows) or (rows.min() >= span.start and rows.max() < span.stop))
        if not inside or not np.bincount(rows - self.first, minlength=len(rows)).all():
            raise DataError(f"no bijection: rows {span.start} to {span.stop - 1} are not all there once")

    @property
    def span(self) -> range:
        """The ranks, and rows, that may differ."""
        return range(self.first, self.first + len(self.row_of_rank))

    @cached_property
    def rank_of_row(self) -> NDArray[np.int32]:
        """int32, the rank of each row of the span."""
        ranks = np.empty(len(self.row_of_rank), np.int32)
        ranks[self.row_of_rank - self.first] = np.arange(self.first, self.span.stop, dtype=np.int32)
        return ranks

    def rows(self, ranks: NDArray[Any]) -> NDArray[Any]:
        """The rows of some ranks."""
        return self._mapped(ranks, self.row_of_rank)

    def ranks(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The ranks of some rows."""
        return self._mapped(rows, self.rank_of_row)

    def _mapped(self, values: NDArray[Any], image: NDArray[np.int32]) -> NDArray[Any]:
        mapped = values.copy()
        inside = np.flatnonzero((values >= self.first) & (values < self.span.stop))
        mapped[inside] = image[values[inside] - self.first]
        return mapped

    def save(self, path: Path) -> None:
        """Writes the rows of the span."""
        np.save(path, self.row_of_rank)
