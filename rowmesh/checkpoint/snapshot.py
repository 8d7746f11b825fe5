"""Snapshot: the rows of a collection as they are between two steps, read while later steps change them.

Arenas are memory that ranks share, so that a fork is no copy. In place of one, the rows that a step is about to update,
which its merge knows, are saved before (their pre-images), as far as they have not been read by then: what is read is
the rows of the moment, with pre-images over those that changed since. A step then pays for the rows of its batch,
however large the table is; and for a short time, where there is memory to read them ahead of the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.checkpoint.ahead import ReadAhead
from rowmesh.checkpoint.room import SLABS_AHEAD, Room
from rowmesh.checkpoint.store_snapshot import VALUES, StoreSnapshot
from rowmesh.tables.dynamic.demoted_records import DemotedRecords, DemotedRows
from rowmesh.tables.dynamic.records import KnownBefore, KnownCopy, Records

if TYPE_CHECKING:
    from rowmesh.tables import RowStore, TableSpec
    from rowmesh.tables.row_store import Piece

SHARD_ROWS = 1 << 16
"""Rows that are read at once, 16 MiB of 64 numbers: from then on their updates cost nothing more.

Between two the writing thread needs the interpreter, which a step then waits for: on a busy machine for milliseconds.
"""
AHEAD_BYTES_PER_S = 2e9
"""What copies from memory to memory reach on any machine of today."""


class Source(Protocol):
    """What a snapshot can be taken of: an `EmbeddingCollection`."""

    @property
    def tables(self) -> Sequence[TableSpec]: ...
    def synchronize(self) -> None: ...
    @property
    def row_epoch(self) -> tuple[int, int]: ...
    def stored_pieces(self, table: str) -> Sequence[tuple[RowStore, Piece]]: ...
    def cores(self, table: str) -> Any: ...
    def records(self, table: str) -> Records | None: ...


class Changed(NamedTuple):
    """What changed since a checkpoint.

    Attributes:
        marks: by `id` of a store, a byte for each slot: 0 where its row was not updated.
        known: by name, what dynamic tables knew then, of those that this rank saves.
    """

    marks: Mapping[int, npt.NDArray[np.uint8]]
    known: Mapping[str, KnownBefore] = MappingProxyType({})


class FrozenCores:
    """Copies of the cores of a table and their state, by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


class Snapshot:
    """The rows that this rank owns, and their state, as they were when this was made; what `checkpoint.save` writes.

    On several ranks making it is collective, between two steps, with nothing under way. Each value and state is read
    once. Pre-images take memory until the snapshot is closed: at most that of the rows that were updated meanwhile.

    Args:
        embeddings: whose rows.
        rank: of this process; the first alone writes cores, and copies them at once.
        changed: what is wanted, as `Changes.take` gives it; None: all.
        room: for pre-images and copies, which no other snapshot uses meanwhile; default: of its own.

    Attributes:
        tables: of the collection.
    """

    def __init__(
        self,
        embeddings: Source,
        rank: int = 0,
        changed: Changed | None = None,
        room: Room | None = None,
    ) -> None:
        embeddings.synchronize()
        room = room or Room()
        room.reset()
        self._room = room
        self._ahead: ReadAhead | None = None
        self.tables = tuple(embeddings.tables)
        self._stores: dict[int, StoreSnapshot] = {}
        self._rows: dict[str, list[FrozenRows]] = {}
        self._changed: dict[str, list[ChangedRows]] = {}
        self._cores: dict[str, FrozenCores] = {}
        self._records: dict[str, FrozenRecords] = {}
        try:
            for table in self.tables:
                self._freeze(table, embeddings, rank, changed)
            for each in self._stores.values():
                each.open()
        except BaseException:
            self.close()
            raise
        reach("snapshot.taken")

    def _freeze(self, table: TableSpec, embeddings: Source, rank: int, changed: Changed | None) -> None:
        if table.storage == "dynamic":
            self._freeze_records(table.name, embeddings.records(table.name), changed)
            return
        if table.storage == "tensor_train":
            self._cores[table.name] = FrozenCores(embeddings.cores(table.name).tensors if rank == 0 else {})
            return
        rows, some = self._rows.setdefault(table.name, []), self._changed.setdefault(table.name, [])
        for store, piece in embeddings.stored_pieces(table.name):
            of_store = self._stores.setdefault(id(store), StoreSnapshot(store, self._room))
            if changed is None:
                rows += [FrozenRows(of_store, piece.rows[cut], piece.slots[cut]) for cut in _cuts(len(piece.rows))]
                continue
            slots = piece.slots
            picked = np.flatnonzero(changed.marks[id(store)][slots.start : slots.stop : slots.step])
            for cut in _cuts(len(picked)):
                numbers = piece.rows.start + picked[cut] * piece.rows.step
                at = (slots.start + picked[cut] * slots.step).astype(np.uint32)
                some.append(ChangedRows(of_store, numbers, at))

    def _freeze_records(self, table: str, records: Records | None, changed: Changed | None) -> None:
        if records is None or not records.is_first:
            return
        if changed is None:
            before, known = None, records.known()
        else:
            before = changed.known[table]
            known = records.changed(before, changed.marks[id(records.arena)])
        demoted = records.freeze_demoted(before)
        store = self._stores.setdefault(id(records.arena), StoreSnapshot(records.arena, self._room))
        self._records[table] = FrozenRecords(store, records, known, demoted)

    def read_ahead(self) -> None:
        """Has a thread copy rows in the order in which they are written, as far as the room's copies may have them.

        Rows of tiers are left out: a step that needs some waits while such are read.
        """
        self._ahead = ReadAhead((piece for piece in self._pieces() if piece.may_be_ahead), self._room.copies)

    def wait_ahead(self) -> None:
        """Waits until the rows that there is memory for are read ahead, for no longer than that is likely to take.

        Fresh pages may take the system as long as the disk.
        """
        if self._ahead is not None:
            self._ahead.wait(sum(each.num_bytes for each in self._stores.values()) / AHEAD_BYTES_PER_S)

    def prepare_next(self) -> None:
        """Has memory ready for pre-images of the next snapshot: for some more than there were of this one."""
        self._room.prepare(sum(each.num_bytes for each in self._stores.values()), SLABS_AHEAD)

    def _pieces(self) -> Iterator[_Frozen]:
        """In the order in which they are written."""
        for table in self.tables:
            yield from self._rows.get(table.name, ())
            yield from self._changed.get(table.name, ())
            if (records := self._records.get(table.name)) is not None:
                yield from records.rows

    @property
    def num_saved(self) -> int:
        """Rows whose pre-images were saved so far."""
        return sum(each.num_saved for each in self._stores.values())

    @property
    def num_behind(self) -> int:
        """Bytes of rows and states for whose copies there was no memory at once."""
        num_bytes = sum(each.num_bytes for each in self._stores.values() if each.may_be_ahead)
        is_ended = self._ahead is None or self._ahead.failure is not None
        return num_bytes if is_ended else max(num_bytes - self._room.copies.limit_bytes, 0)

    def local_rows(self, table: str) -> Sequence[FrozenRows]:
        """The rows of a table that this rank owns, shard by shard."""
        return self._rows[table]

    def held_rows(self, table: str) -> Sequence[FrozenRows]:
        """As `local_rows`: copies of other ranks' rows are not part of it."""
        return self._rows[table]

    def changed_rows(self, table: str) -> Sequence[ChangedRows]:
        """The wanted rows of a table that this rank owns, shard by shard."""
        return self._changed[table]

    def cores(self, table: str) -> FrozenCores:
        """The cores of a tensor-train table."""
        return self._cores[table]

    def records(self, table: str) -> FrozenRecords | None:
        """What is wanted of a dynamic table; None where another rank saves it."""
        return self._records.get(table)

    def go_on_after(self, table: str, step: int) -> None:
        """Not for what is only read."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """No-op: all replicas were equal when it was taken."""

    def forget_differences(self) -> None:
        """No-op: nothing can be set."""

    def close(self) -> None:
        """Updates cost nothing more, and what is read from now on is a RowmeshError; may be called again."""
        for each in (*self._stores.values(), *self._records.values()):
            each.close()
        reach("snapshot.closed")
        if self._ahead is not None:
            self._ahead.close()


class _Frozen:
    """One shard: values and states of some rows."""

    def __init__(self, store: StoreSnapshot, slots: range | npt.NDArray[np.uint32]) -> None:
        self._store, self._shard = store, store.add(slots)
        self._lock = threading.Lock()
        self._read: Mapping[str, Tensor] | None = None
        self._is_forgotten = False
        self._release: Callable[[], None] = lambda: None
        self.num_bytes, self.may_be_ahead = store.bytes_of(len(slots)), store.may_be_ahead

    @property
    def values(self) -> Tensor:
        """`[n, D]`, of the moment of the snapshot; read with the state, once, and valid until the next shard is."""
        return self.tensor(VALUES)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state by name, read as `values` are."""
        return _FrozenState(self, self._store.states)

    def tensor(self, kind: str) -> Tensor:
        """Values or a state."""
        with self._lock:  # waits where it is being read ahead
            self._store.check_open()
            if self._read is None:
                self._read = self._store.read(self._shard)
            return self._read[kind]

    def read_ahead(self, buffer: Tensor, release: Callable[[Tensor], None]) -> bool:
        """Reads it to a buffer; see `Shard`."""
        with self._lock:
            if self._is_forgotten or self._read is not None:
                return False
            self._read = self._store.read(self._shard, buffer)
            self._release = lambda: release(buffer)
            return True

    def commit(self) -> None:
        """Not for what is only read."""
        raise NotImplementedError

    def forget(self) -> None:
        """What was read is not needed any more."""
        with self._lock:
            release, self._release = self._release, lambda: None
            self._read, self._is_forgotten = None, True
        release()


class FrozenRows(_Frozen):
    """One shard of all rows.

    Attributes:
        rows: which rows of the table.
    """

    def __init__(self, store: StoreSnapshot, rows: range, slots: range) -> None:
        super().__init__(store, slots if slots.step == 1 else np.array(slots, np.uint32))
        self.rows = rows


class ChangedRows(_Frozen):
    """One shard of an increment.

    Attributes:
        rows: which rows of the table, ascending; or ids of a dynamic one, shard by shard.
    """

    def __init__(self, store: StoreSnapshot, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.uint32]) -> None:
        super().__init__(store, slots)
        self.rows = rows


class FrozenRecords:
    """What a dynamic table knew on this rank, or what of it changed: `Records` that are only written.

    Attributes:
        shards: which ones.
        step: how many batches were opened for training.
    """

    def __init__(
        self, store: StoreSnapshot, records: Records, known: KnownCopy, demoted: DemotedRecords | None = None
    ) -> None:
        self._store, self._known, self._slots, self._demoted = store, known, records.slots, demoted
        self.shards, self.step, self.is_first = records.shards, records.step, True
        self.seed = records.seed
        self._pieces: list[ChangedRows] | None = None
        self._lock = threading.Lock()
        store.expect(self._slots(known.frames).astype(np.uint32))

    @property
    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """All but rows and their states."""
        _ = self.rows  # which puts ids in order: once, whichever thread comes first
        yield from self._known.arrays
        if self._demoted is not None:
            yield from self._demoted.arrays

    @property
    def rows(self) -> list[ChangedRows]:
        """The rows in the order of the ids, each to be read once."""
        with self._lock:
            if self._pieces is None:
                ids, frames = self._known.placed
                slots = self._slots(frames).astype(np.uint32)
                self._pieces = [ChangedRows(self._store, ids[cut], slots[cut]) for cut in _cuts(len(ids)) or [slice(0)]]
            return self._pieces

    @property
    def demoted_rows(self) -> Sequence[DemotedRows]:
        """The records of demoted ids, read from the store as they were."""
        return [] if self._demoted is None else self._demoted.rows

    def close(self) -> None:
        """Steps cost nothing more."""
        if self._demoted is not None:
            self._demoted.close()

    def load(self, parts: object, states: object) -> None:
        """Not for what is only read."""
        raise NotImplementedError


class _FrozenState(Mapping[str, Tensor]):
    def __init__(self, rows: _Frozen, names: Sequence[str]) -> None:
        self._rows, self._names = rows, names

    def __getitem__(self, name: str) -> Tensor:
        return self._rows.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _cuts(count: int) -> list[slice]:
    return [slice(first, min(first + SHARD_ROWS, count)) for first in range(0, count, SHARD_ROWS)]
