"""SlotRecords: records in host memory or in a file, with the index of their slots in memory.

They end with the process: what outlives it is in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rowmesh.errors import NoRoomError
from rowmesh.ops.dynamic_index import Index
from rowmesh.ops.dynamic_index.cpu import ID
from rowmesh.tables.backing import BackingStore, MemoryStore
from rowmesh.tables.dynamic.stores.protocol import check_batch
from rowmesh.tables.file_store import FileStore

_PIECE_RECORDS = 1 << 16
_MOST_SLOTS = 2**32 - 1
_SEED = 0x2545F4914F6CDD1D  # another than any table's: its shards were chosen by that
_COLUMNS = 2  # of an index that keeps no statistics


class SlotRecords:
    """Records of one table in a store by slot; see `RecordStore`.

    New records never take the place of old ones before they are written, so a write that fails leaves the old ones.

    Args:
        table: its name.
        backing: where the records are; owned from here on.
        max_records: slots that it has; None: any number.
        record_bytes: of a record.

    Example:
        >>> store = memory_records("user", 10, 2)
        >>> store.put(np.array([0]), np.array([-7]), np.array([[1, 2]], np.uint8))
        >>> store.ids_in(0).tolist()
        [-7]
    """

    def __init__(self, table: str, backing: BackingStore, max_records: int | None, record_bytes: int) -> None:
        assert backing.stride == record_bytes, "records without gaps"
        self.record_bytes = record_bytes
        self._name = f"records of table {table!r} in {backing}"
        self._backing, self._max_records = backing, max_records
        self._slots = _SlotIndex(max_records)

    def get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """See `RecordStore.get`."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        slots = self._slots.find(shards, ids)
        found = slots >= 0
        records[found] = self._read(slots[found])
        return found

    def put(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> None:
        """See `RecordStore.put`."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        slots = self._take(len(ids))
        try:
            self._backing.write(slots.astype(np.uint32), np.ascontiguousarray(records))
        except BaseException:
            self._slots.free(slots)
            raise
        self.delete(shards, ids)
        self._slots.insert(shards, ids, slots)

    def delete(self, shards: np.ndarray, ids: np.ndarray) -> None:
        """See `RecordStore.delete`."""
        check_batch(self._name, shards, ids, None, 0)
        there = self._slots.find(shards, ids) >= 0
        self._slots.erase(shards[there], ids[there])

    def ids_in(self, shard: int) -> np.ndarray:
        """See `RecordStore.ids_in`."""
        return self._slots.ids_in(shard)

    def clear(self, shards: range) -> None:
        """See `RecordStore.clear`."""
        self._slots = _SlotIndex(self._max_records)

    def flush(self) -> None:
        """Waits for the disk, where there is one; the index is in memory alone."""
        self._backing.flush()

    def close(self) -> None:
        """See `RecordStore.close`."""
        self._backing.close()

    def _read(self, slots: np.ndarray) -> np.ndarray:
        records = np.empty((len(slots), self.record_bytes), np.uint8)
        if len(slots):
            self._backing.read(slots.astype(np.uint32), records)
        return records

    def _take(self, count: int) -> np.ndarray:
        room = self._slots.room
        if self._max_records is not None and count > room:
            raise NoRoomError(
                f"{self._name} have room for {self._max_records}, of which {room} are free, and {count} are to be "
                "written; give the store more"
            )
        return self._slots.take(count)


class _SlotIndex:
    """Which slot each id has, and which are free. A shard of the index is one of the table.

    Args:
        max_slots: that may be in use; None: any number below 2^32.
    """

    def __init__(self, max_slots: int | None) -> None:
        self._max_slots = _MOST_SLOTS if max_slots is None else max_slots
        num_slots = _PIECE_RECORDS if max_slots is None else max_slots
        self._index = Index(np.empty(0, np.int64), _SEED, 1, 0, num_slots, _COLUMNS)
        self._freed, self._num_freed = np.empty(_PIECE_RECORDS, np.int64), 0  # the last is taken first
        self._unused = 0  # slots from here on were never taken

    @property
    def room(self) -> int:
        """How many slots are free."""
        return self._num_freed + self._max_slots - self._unused

    def take(self, count: int) -> np.ndarray:
        """Takes free slots, of which there must be so many."""
        again = min(count, self._num_freed)
        self._num_freed -= again
        fresh = np.arange(self._unused, self._unused + count - again)
        self._unused += len(fresh)
        if self._unused > len(self._index.records):
            self._index.set_num_slots(min(self._max_slots, max(self._unused, 2 * len(self._index.records))))
        return np.concatenate([self._freed[self._num_freed : self._num_freed + again], fresh])

    def free(self, slots: np.ndarray) -> None:
        """Gives taken slots back."""
        needed = self._num_freed + len(slots)
        if needed > len(self._freed):
            freed = np.empty(max(needed, 2 * len(self._freed)), np.int64)
            freed[: self._num_freed] = self._freed[: self._num_freed]
            self._freed = freed
        self._freed[self._num_freed : needed] = slots
        self._num_freed = needed

    def find(self, shards: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """The slot of each id, −1 where it has none."""
        return self._index.find(*self._located(shards, ids))

    def insert(self, shards: np.ndarray, ids: np.ndarray, slots: np.ndarray) -> None:
        """Ids that have none get taken slots."""
        self._index.insert(*self._located(shards, ids), slots)

    def erase(self, shards: np.ndarray, ids: np.ndarray) -> None:
        """Ids that have slots lose them."""
        self.free(self._index.erase(*self._located(shards, ids)))

    def ids_in(self, shard: int) -> np.ndarray:
        """The ids of a shard that have slots, ascending."""
        if shard >= len(self._index.headers):
            return np.empty(0, np.int64)
        return np.sort(self._index.records[self._index.slots_in(shard), ID])

    def _located(self, shards: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        num_shards = int(shards.max(initial=-1)) + 1
        if num_shards > len(self._index.headers):
            self._index.add_shards(num_shards - len(self._index.headers))
        ids = np.ascontiguousarray(ids)
        return ids, self._index.locate(ids)[0], shards


class _GrowingMemory:
    """Host memory for any number of records, piece by piece."""

    def __init__(self, record_bytes: int) -> None:
        self.stride, self.num_bytes, self._pieces = record_bytes, 0, list[MemoryStore]()

    def read(self, slots: np.ndarray, records: np.ndarray) -> None:
        for piece, places, at in self._parts(slots):
            part = np.empty((len(at), self.stride), np.uint8)
            piece.read(places, part)
            records[at] = part

    def write(self, slots: np.ndarray, records: np.ndarray) -> None:
        while len(slots) and len(self._pieces) * _PIECE_RECORDS <= int(slots.max()):
            self._pieces.append(MemoryStore(_PIECE_RECORDS, self.stride))
            self.num_bytes += self._pieces[-1].num_bytes
        for piece, places, at in self._parts(slots):
            piece.write(places, np.ascontiguousarray(records[at]))

    def _parts(self, slots: np.ndarray) -> Iterator[tuple[MemoryStore, np.ndarray, np.ndarray]]:
        """The pieces that have some of the slots, with the places of these in the piece and in `slots`."""
        numbers, places = np.divmod(slots, np.uint32(_PIECE_RECORDS))
        for number in np.unique(numbers).tolist():
            at = np.flatnonzero(numbers == number)
            yield self._pieces[number], places[at], at

    def flush(self) -> None:
        """Memory does not outlive the process."""

    def close(self) -> None:
        for piece in self._pieces:
            piece.close()
        self._pieces, self.num_bytes = [], 0

    def __str__(self) -> str:
        return "host memory"


def memory_records(table: str, max_records: int | None, record_bytes: int) -> SlotRecords:
    """Records in host memory, which the system provides as they are written."""
    backing = _GrowingMemory(record_bytes) if max_records is None else MemoryStore(max_records, record_bytes)
    return SlotRecords(table, backing, max_records, record_bytes)


def file_records(table: str, path: Path, max_records: int, record_bytes: int) -> SlotRecords:
    """Records in a file, which grows as they are written and has no name; see `FileStore`."""
    return SlotRecords(table, FileStore(max_records, record_bytes, path=path), max_records, record_bytes)
