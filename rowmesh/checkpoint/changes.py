"""Changes: which rows were updated since the last checkpoint, or publication, one byte a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rowmesh.checkpoint.snapshot import Source

if TYPE_CHECKING:
    from rowmesh.tables import RowStore, TableSpec

HOOK = "changes"


class Changes:
    """Notes which slots are updated. A store calls it before every update in the host's memory.

    Rows that change otherwise are not noted: those that are set (a checkpoint that is read, averages in the place of
    rows), and those that migrate to another plan. Where there are such, `take` gives None, and the next checkpoint is
    to be a full one. Not for rows on a device, and not for averaged replicas, whose rows change by messages.

    A new id of a dynamic table is noted too; what is gone is not.

    Args:
        embeddings: whose rows.
        hook: the name of this use, of which a store has one at a time.
    """

    def __init__(self, embeddings: Source, hook: str = HOOK) -> None:
        self._embeddings, self._hook = embeddings, hook
        self._stores: dict[int, RowStore] = {}
        self._marks: dict[int, npt.NDArray[np.uint8]] = {}
        self._epoch: tuple[int, int] | None = None

    def take(self) -> Mapping[int, npt.NDArray[np.uint8]] | None:
        """What was updated since the last call, and notes anew; to be called between two steps.

        Returns:
            By `id` of a store, a byte for each slot: 0 where it was not updated. None where that is not known: the
            first time, and where rows changed otherwise.
        """
        self._embeddings.synchronize()
        found = self._marks if self._epoch == self._embeddings.row_epoch else None
        self._epoch, self._marks, stores = self._embeddings.row_epoch, {}, {}
        for table in self._embeddings.tables:
            if table.storage == "tensor_train":
                continue
            for store, num_slots in self._stores_of(table):
                stores[id(store)] = store
                before = self._marks.get(id(store))
                if before is None or len(before) < num_slots:
                    # The system gives zeros without touching their pages.
                    self._marks[id(store)] = np.zeros(num_slots, np.uint8)
        for number, store in self._stores.items():
            if number not in stores:
                store.watch(self._hook, None)
        for number, store in stores.items():
            store.watch(self._hook, _noting(self._marks[number]))
        self._stores = stores
        return found

    def _stores_of(self, table: TableSpec) -> Iterator[tuple[RowStore, int]]:
        """Where rows of a table are on this rank, and how many slots are to be noted there."""
        if table.storage == "dynamic":
            records = self._embeddings.records(table.name)
            if records is not None:
                yield records.arena, records.arena.num_slots
            return
        for store, piece in self._embeddings.stored_pieces(table.name):
            yield store, piece.slots.stop

    def close(self) -> None:
        """Updates cost nothing more; may be called again."""
        for store in self._stores.values():
            store.watch(self._hook, None)
        self._stores, self._marks, self._epoch = {}, {}, None


def _noting(marks: npt.NDArray[np.uint8]) -> Callable[[np.ndarray, np.ndarray], None]:
    def note(slots: np.ndarray, _: np.ndarray) -> None:
        marks[slots if not len(slots) or slots.max() < len(marks) else slots[slots < len(marks)]] = 1

    return note
