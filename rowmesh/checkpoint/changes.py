"""Changes: which rows were updated since the last checkpoint, or publication, one byte a slot."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.errors import StoreError
from rowmesh.tables.dynamic.records import KnownBefore
from rowmesh.tables.shard import Changed, RowHolder

if TYPE_CHECKING:
    from rowmesh.tables import RowStore
    from rowmesh.tables.row_store import Watcher

HOOK = "changes"


class ChangedSlots:
    """Notes which slots are updated, in the memory where they are. A store calls it before every update.

    It keeps the ids that dynamic tables knew, 16 bytes an id: what they know now tells which of these are gone. It
    notes the demoted ids that change.

    Rows that change otherwise are not noted: those that are set (a checkpoint that is read, moving averages in the
    place of rows), and those that migrate to another plan. Where there are such, `take` gives None, and the next
    checkpoint is to be a full one.

    Args:
        embeddings: whose rows.
        hook: the name of this use, of which a store has one at a time.
    """

    def __init__(self, embeddings: RowHolder, hook: str = HOOK) -> None:
        self._embeddings, self._hook = embeddings, hook
        self._stores: dict[int, RowStore] = {}
        self._marks: dict[int, npt.NDArray[np.uint8] | Tensor] = {}
        self._known: dict[str, KnownBefore] = {}
        self._epoch: tuple[int, int] | None = None

    def take(self) -> Changed | None:
        """Takes the updates since the last call, and notes anew; to be called between two steps.

        Returns:
            The changes; None where they are not known: the first time, where rows changed otherwise, where a store of
            demoted ids does not answer, and where there is no memory for it.
        """
        self._embeddings.synchronize()
        found, known_before = None, self._known
        stores: dict[int, RowStore] = {}
        try:
            if self._epoch == self._embeddings.row_epoch:
                found = Changed({number: _on_host(marks) for number, marks in self._marks.items()}, known_before)
            self._epoch, self._marks, self._known = self._embeddings.row_epoch, {}, {}
            for store, num_slots in self._find_stores():
                stores[id(store)] = store
                before = self._marks.get(id(store))
                if before is None or len(before) < num_slots:
                    self._marks[id(store)] = _no_marks(store, num_slots)
        except (StoreError, MemoryError, torch.OutOfMemoryError):
            # Other ranks go on: the code that needs the store, or the memory, says it on all of them.
            self.close()
            return None
        finally:
            for each in known_before.values():
                each.close()
        for number, store in self._stores.items():
            if number not in stores:
                store.watch(self._hook, None)
        for number, store in stores.items():
            store.watch(self._hook, _noting(self._marks[number]))
        self._stores = stores
        return found

    def _find_stores(self) -> Iterator[tuple[RowStore, int]]:
        """The stores of all tables, with a slot that is past theirs; notes what dynamic ones know."""
        for shard in self._embeddings.shards("owned"):
            if (known := shard.note()) is not None:
                self._known[shard.spec.name] = known
            if shard.store is not None and shard.num_slots:
                yield shard.store, shard.num_slots

    def close(self) -> None:
        """Updates cost nothing more; may be called again."""
        for store in self._stores.values():
            store.watch(self._hook, None)
        for each in self._known.values():
            each.close()
        self._stores, self._marks, self._known, self._epoch = {}, {}, {}, None


def _no_marks(store: RowStore, num_slots: int) -> npt.NDArray[np.uint8] | Tensor:
    """Where all rows are on a device a tensor, with one more for slots past the end."""
    if store.is_whole and not store.has_views:
        return torch.zeros(num_slots + 1, dtype=torch.uint8, device=store.device)
    return np.zeros(num_slots, np.uint8)  # the system gives zeros without touching their pages


def _on_host(marks: npt.NDArray[np.uint8] | Tensor) -> npt.NDArray[np.uint8]:
    if not isinstance(marks, Tensor):
        return marks
    if marks.device.type == "cuda":
        torch.cuda.synchronize(marks.device)  # whichever stream updates rows
    return marks[:-1].cpu().numpy()


def _noting(marks: npt.NDArray[np.uint8] | Tensor) -> Watcher:
    def note(slots: np.ndarray, _: np.ndarray) -> None:
        marks[slots if not len(slots) or slots.max() < len(marks) else slots[slots < len(marks)]] = 1

    def note_on_device(slots: Tensor, _: Tensor) -> None:
        marks[slots.clamp(max=len(marks) - 1)] = 1

    return note_on_device if isinstance(marks, Tensor) else note
