"""Cutter: which samples of a batch are in which of its micro-batches, by the rows that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError, DataError
from rowmesh.ops.cluster import cluster
from rowmesh.ops.segment_unique.cpu import SegmentHash
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


@dataclass(frozen=True, eq=False)
class BatchRows:
    """Which rows a batch asks for.

    Attributes:
        keys: int32 `[N]`: for each id of the batch, in its order, a number below U; equal where table and id are.
        counts: int32 `[U]`: how many ids ask for each row.
        bags: the bags that keys fall into: int64 offsets `[F·B + 1]`, or how many ids each holds.
        batch_size: B.
    """

    keys: Tensor
    counts: Tensor
    bags: Tensor | int
    batch_size: int

    @property
    def num_rows(self) -> int:
        """U."""
        return self.counts.numel()


class RowNumbering:
    """Numbers the rows of batches; keeps its hash table from batch to batch.

    Args:
        tables: those whose rows count. A feature of the batch that belongs to none of them is an error.

    Example:
        >>> number = RowNumbering([TableSpec(name="item", num_rows=9, dim=4, features=["seen", "liked"])])
        >>> rows = number(SparseBatch.from_bags({"seen": [[7], [3]], "liked": [[3], [3]]}))
        >>> rows.keys.tolist(), rows.counts.tolist()
        ([0, 1, 1, 1], [1, 3])
    """

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        self._table_of = {feature: number for number, table in enumerate(tables) for feature in table.features}
        self._hash = SegmentHash([table.num_rows for table in tables])
        self._unique_offsets = np.zeros(len(tables) + 1, np.int64)

    def __call__(self, batch: SparseBatch) -> BatchRows:
        """The rows of a batch.

        Raises:
            DataError: a feature belongs to no table.
        """
        if missing := [name for name in batch.features if name not in self._table_of]:
            raise DataError(f"features {missing} belong to no table; the tables have {list(self._table_of)}")
        places = sorted(range(batch.num_features), key=lambda place: self._table_of[batch.features[place]])
        ranges = np.array([batch.feature_range(place) for place in places], np.int64).reshape(-1, 2)
        tables = np.array([self._table_of[batch.features[place]] for place in places], np.int64)
        num_ids = batch.ids.numel()
        unique, keys = np.empty(num_ids, np.int64), np.empty(num_ids, np.int32)
        counts = np.empty(num_ids, np.int32)
        self._hash(
            batch.ids.data_ptr(),
            ranges.ctypes.data,
            ranges.strides[0],
            tables.ctypes.data,
            len(tables),
            unique.ctypes.data,
            counts.ctypes.data,
            keys.ctypes.data,
            self._unique_offsets.ctypes.data,
        )
        return BatchRows(
            keys=torch.from_numpy(keys),
            counts=torch.from_numpy(counts[: int(self._unique_offsets[-1])]),
            bags=batch.offsets if batch.bag_size is None else batch.bag_size,
            batch_size=batch.batch_size,
        )
