"""StoredRecords: the records that a store has of some shards, by id: as they are now, or as they were at one moment."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from rowmesh.errors import StoreError
from rowmesh.tables.dynamic.record_layout import RecordLayout
from rowmesh.tables.dynamic.shards import DynamicShards


class Readable(Protocol):
    """The reading part of a `RecordStore`."""

    def get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray: ...
    def ids_in(self, shard: int) -> np.ndarray: ...


class StoredRecords:
    """The stored records of one table on one rank.

    Args:
        store: has them.
        shards: of this rank.
        layout: of a record.
        order: by shard, the ids in the order of their demotion, where that is known.

    Attributes:
        shards: whose records these are.
    """

    def __init__(
        self, store: Readable, shards: DynamicShards, layout: RecordLayout, order: list[np.ndarray] | None
    ) -> None:
        self.shards = shards.shards
        self._store, self._shards, self._layout, self._order = store, shards, layout, order

    def ids_by_shard(self) -> list[np.ndarray]:
        """The ids of all records, of each shard: in the order of their demotion where that is known, else ascending.

        Raises:
            StoreError: the store does not answer; names it.
        """
        if self._order is not None:
            return self._order
        return [self._store.ids_in(shard) for shard in self.shards]

    def read(self, ids: np.ndarray) -> tuple[Tensor, dict[str, Tensor], np.ndarray]:
        """Rows, states and facts of ids that are in the store.

        Raises:
            StoreError: it does not answer, or has lost one of them; names it.
        """
        records = np.empty((len(ids), self._layout.width), np.uint8)
        found = self._store.get(self._shards.shards_of(ids) + self.shards.start, ids, records)
        if not found.all():
            raise StoreError(
                f"the store of table {self._shards.table!r} has lost {int((~found).sum())} of {len(ids)} records, the "
                f"first of id {ids[~found][0]}; resume from a checkpoint"
            )
        return *self._layout.unpack(records), self._layout.facts(records)
