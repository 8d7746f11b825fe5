"""Changes: which rows were updated since the last checkpoint, or publication, one byte a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rowmesh.checkpoint.snapshot import Changed, Source
from rowmesh.dynamic.records import Before

if TYPE_CHECKING:
    from rowmesh.tables import RowStore

HOOK = "changes"


class Changes:
    """Notes which slots are updated. A store calls it before every update in the host's memory.

    Of dynamic tables it keeps which ids they knew, 16 bytes an id: what they know now tells which of these are gone.

    Rows that change otherwise are not noted: those that are set (a checkpoint that is read, averages in the place of
    rows), and those that migrate to another plan. Where there are such, `take` gives None, and the next checkpoint is
    to be a full one. Not for rows on a device, and not for averaged replicas, whose rows change by messages.

    Args:
        embeddings: whose rows.
        hook: the name of this use, of which a store has one at a time.
    """

    def __init__(self, embeddings: Source, hook: str = HOOK) -> None:
        self._embeddings, self._hook = embeddings, hook
        self._stores: dict[int, RowStore] = {}
        self._marks: dict[int, npt.NDArray[np.uint8]] = {}
        self._known: dict[str, Before] = {}
        self._epoch: tuple[int, int] | None = None

    def take(self) -> Changed | None:
        """What was updated since the last call, and notes anew; to be called between two steps.

        Returns:
            What changed; None where that is not known: the first time, and where rows changed otherwise.
        """
        self._embeddings.synchronize()
        found = Changed(self._marks, self._known) if self._epoch == self._embeddings.row_epoch else None
        self._epoch, self._marks, self._known = self._embeddings.row_epoch, {}, {}
        stores: dict[int, RowStore] = {}
        for store, num_slots in self._find_stores():
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

    def _find_stores(self) -> Iterator[tuple[RowStore, int]]:
        """The stores of all tables, with a slot that is past theirs; notes what dynamic ones know."""
        for table in self._embeddings.tables:
            if table.storage == "dynamic":
                records = self._embeddings.records(table.name)
                if records is not None and records.is_first:
                    self._known[table.name] = records.note()
                    yield records.arena, records.arena.num_slots
            elif table.storage != "tensor_train":
                for store, piece in self._embeddings.stored_pieces(table.name):
                    yield store, piece.slots.stop

    def close(self) -> None:
        """Updates cost nothing more; may be called again."""
        for store in self._stores.values():
            store.watch(self._hook, None)
        self._stores, self._marks, self._known, self._epoch = {}, {}, {}, None


def _noting(marks: npt.NDArray[np.uint8]) -> Callable[[np.ndarray, np.ndarray], None]:
    def note(slots: np.ndarray, _: np.ndarray) -> None:
        marks[slots if not len(slots) or slots.max() < len(marks) else slots[slots < len(marks)]] = 1

    return note
