"""Cutter: which samples of a batch are in which of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.cluster import cluster
from rowmesh.pipeline.rows import RowNumbering
from rowmesh.pipeline.sizes import WindowWork, choose_sizes
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec

Sizes = Literal["even", "light_ends"]
Clustering = Literal["off", "greedy", "light_ends"]

TYPICAL = WindowWork.of_share(0.4)


class Cutter:
    """Cuts batches into micro-batches.

    Args:
        tables: whose rows samples share.
        count: N.
        sizes: "even", or small at both ends, where nothing hides the exchange.
        clustering: "off": samples keep their order; "greedy": samples that share rows meet; "light_ends": and those
            whose rows most others have too are in the first and the last micro-batch.
        work: what a window has to do, for uneven sizes.

    Example:
        >>> cutter = Cutter([TableSpec(name="item", num_rows=9, dim=4)], 2, clustering="greedy")
        >>> order, sizes = cutter(SparseBatch.from_bags({"item": [[7], [3], [7], [3]]}))
        >>> order.tolist(), sizes
        ([0, 2, 1, 3], (2, 2))
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        count: int,
        *,
        sizes: Sizes = "even",
        clustering: Clustering = "off",
        work: WindowWork = TYPICAL,
    ) -> None:
        for name, value, known in (("sizes", sizes, Sizes), ("clustering", clustering, Clustering)):
            if value not in known.__args__:
                raise ConfigurationError(f"{name} must be one of {list(known.__args__)}, got {value!r}")
        self._sizes: Sizes = sizes
        self._count, self._clustering, self._work = count, clustering, work
        self._number = RowNumbering(tables)
        self._known: dict[int, tuple[int, ...]] = {}

    def __call__(self, batch: SparseBatch) -> tuple[Tensor | None, tuple[int, ...]]:
        """The order of the samples (None: their own), and the size of each micro-batch."""
        sizes = self._sizes_of(batch.batch_size)
        if self._clustering == "off" or self._count == 1 or batch.batch_size == 0:
            return None, sizes
        rows, light_ends = self._number(batch), self._clustering == "light_ends"
        return cluster(rows.keys, rows.bags, rows.counts, sizes, light_ends=light_ends), sizes

    def _sizes_of(self, batch_size: int) -> tuple[int, ...]:
        if batch_size not in self._known:
            self._known[batch_size] = sizes_of(batch_size, self._count, self._sizes, self._work)
        return self._known[batch_size]


def sizes_of(batch_size: int, count: int, sizes: Sizes, work: WindowWork) -> tuple[int, ...]:
    """The size of each micro-batch."""
    if sizes == "light_ends" and batch_size >= count:
        return choose_sizes(batch_size, count, work)
    return even_sizes(batch_size, count)


def even_sizes(batch_size: int, count: int) -> tuple[int, ...]:
    """Sizes that differ by one at most; some are 0 where there are fewer samples.

    >>> even_sizes(8, 3)
    (2, 3, 3)
    """
    return tuple(batch_size * (m + 1) // count - batch_size * m // count for m in range(count))
