"""Rows of a batch: its ids numbered by the distinct rows that they stand for, over all tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import DataError
from rowmesh.ops.segment_unique.cpu import SegmentHash
from rowmesh.sparse import SparseBatch
from rowmesh.tables import TableSpec


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
