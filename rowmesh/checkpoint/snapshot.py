"""Snapshot: the rows of a collection as they are between two steps, read while later steps change them.

Arenas are memory that ranks share, so that a fork is no copy. In place of one, the rows that a step is about to update,
which its merge knows, are saved before (their pre-images), as far as they have not been read by then: what is read is
the rows of the moment, with pre-images over those that changed since. A step then pays for the rows of its batch,
however large the table is; and for a short time, where there is memory to read them ahead of the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.checkpoint.ahead import ReadAhead
from rowmesh.checkpoint.room import SLABS_AHEAD, Room
from rowmesh.checkpoint.store_snapshot import VALUES, ShardSlots, StoreSnapshot
from rowmesh.tables.shard import Changed, Form, RowHolder, RowPiece, ShardMoment, TableShard, Which

SHARD_ROWS = 1 << 16
"""Rows that are read at once, 16 MiB of 64 numbers: from then on their updates cost nothing more.

Between two the writing thread needs the interpreter, which a step then waits for: on a busy machine for milliseconds.
"""
AHEAD_BYTES_PER_S = 2e9
"""A rate that copies from memory to memory reach on any machine of today."""


class Snapshot:
    """The rows that this rank owns, and their state, as they were when this was made; what `checkpoint.save` writes.

    On several ranks making it is collective, between two steps, with nothing under way. Each value and state is read
    once. Pre-images take memory until the snapshot is closed: at most that of the rows that were updated meanwhile.

    Args:
        embeddings: whose rows.
        rank: of this process; the first alone writes cores, and copies them at once.
        changed: what is wanted, as `ChangedSlots.take` gives it; None: all.
        room: for pre-images and copies, which no other snapshot uses meanwhile; default: of its own.

    """

    def __init__(
        self,
        embeddings: RowHolder,
        rank: int = 0,
        changed: Changed | None = None,
        room: Room | None = None,
    ) -> None:
        embeddings.synchronize()
        room = room or Room()
        room.reset()
        self._room = room
        self._ahead: ReadAhead | None = None
        self._stores: dict[int, StoreSnapshot] = {}
        self._shards: list[FrozenShard] = []
        try:
            for shard in embeddings.shards("owned"):
                self._freeze(shard, rank, changed)
            for each in self._stores.values():
                each.open()
        except BaseException:
            self.close()
            raise
        reach("snapshot.taken")

    def _freeze(self, shard: TableShard, rank: int, changed: Changed | None) -> None:
        store, snapshot = shard.store, None
        if store is not None and (snapshot := self._stores.get(id(store))) is None:
            snapshot = self._stores[id(store)] = StoreSnapshot(store, self._room)
        moment = ShardMoment() if rank and shard.is_common else shard.freeze(changed)
        self._shards.append(FrozenShard(shard, moment, snapshot))

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

    def _pieces(self) -> Iterator[FrozenRows]:
        """In the order in which they are written."""
        for shard in self._shards:
            yield from shard.rows

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

    def shards(self, which: Which = "owned", /) -> Sequence[FrozenShard]:
        """The tables, as they were."""
        return self._shards

    def synchronize(self) -> None:
        """No-op: all replicas were equal when it was taken."""

    def close(self) -> None:
        """Updates cost nothing more, and what is read from now on is a RowmeshError; may be called again."""
        for each in (*self._stores.values(), *self._shards):
            each.close()
        reach("snapshot.closed")
        if self._ahead is not None:
            self._ahead.close()


class FrozenRows:
    """Values and states of some rows of a table.

    Attributes:
        rows: which; or ids of a dynamic table, shard by shard.
    """

    def __init__(self, store: StoreSnapshot, rows: range | npt.NDArray[np.int64], slots: ShardSlots) -> None:
        self.rows, self._store, self._shard = rows, store, store.add(slots)
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

    def forget(self) -> None:
        """Forgets the rows that were read, and releases their buffer."""
        with self._lock:
            release, self._release = self._release, lambda: None
            self._read, self._is_forgotten = None, True
        release()


class FrozenShard:
    """The shard of a table that a rank had, or what of it changed; see `Rows`.

    Args:
        shard: the table.
        moment: of it.
        store: has its rows; None where there are none.

    Attributes:
        spec, form, is_common, logical: see `Rows`.
    """

    def __init__(self, shard: TableShard, moment: ShardMoment, store: StoreSnapshot | None) -> None:
        self.spec, self.is_common, self.logical = shard.spec, shard.is_common, shard.logical
        self.form: Form = shard.form
        self._moment, self._store = moment, store
        self._rows: list[FrozenRows] | None = None
        self._lock = threading.Lock()
        if store is not None and moment.expected is not None:
            store.expect(moment.expected)
        else:
            _ = self.rows

    @property
    def rows(self) -> list[FrozenRows]:
        """The rows, in the order in which they are written, each to be read once."""
        with self._lock:
            if self._rows is None:
                self._rows = []
                if self._store is not None:
                    for rows, slots in self._moment.places:
                        cuts = _cuts(len(rows)) or [slice(0)]
                        self._rows += [FrozenRows(self._store, rows[cut], _shard(slots[cut])) for cut in cuts]
            return self._rows

    @property
    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """The arrays beside the rows."""
        _ = self.rows  # which puts ids in order: once, whichever thread comes first
        yield from self._moment.arrays

    @property
    def pieces(self) -> Mapping[str, Sequence[RowPiece]]:
        """The rows."""
        return {"": self.rows, **self._moment.apart}

    def close(self) -> None:
        """Steps cost nothing more."""
        self._moment.close()


def _shard(slots: range | npt.NDArray[np.uint32]) -> ShardSlots:
    return slots if not isinstance(slots, range) or slots.step == 1 else np.array(slots, np.uint32)


class _FrozenState(Mapping[str, Tensor]):
    def __init__(self, rows: FrozenRows, names: Sequence[str]) -> None:
        self._rows, self._names = rows, names

    def __getitem__(self, name: str) -> Tensor:
        return self._rows.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _cuts(count: int) -> list[slice]:
    return [slice(first, min(first + SHARD_ROWS, count)) for first in range(0, count, SHARD_ROWS)]
