"""SlotRecords: records in host memory or in a file, with the index of their slots in memory.

They end with the process: what outlives it is in checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rowmesh.dynamic.stores.protocol import check_batch
from rowmesh.errors import NoRoomError
from rowmesh.tables.backing import BackingStore, MemoryStore
from rowmesh.tables.file_store import FileStore

_PIECE_RECORDS = 1 << 16


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
        self._slots: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._free: list[int] = []
        self._unused = 0  # slots from here on were never taken

    def get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """See `RecordStore.get`."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        slots = self._find(shards, ids)
        found = slots >= 0
        records[found] = self._read(slots[found])
        return found

    def put(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> None:
        """See `RecordStore.put`."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        slots = self._take(len(ids))
        try:
            self._backing.write(slots, np.ascontiguousarray(records))
        except BaseException:
            self._free += slots.tolist()
            raise
        for shard, i, slot in zip(shards.tolist(), ids.tolist(), slots.tolist(), strict=True):
            old = self._slots[shard].pop(i, None)
            self._slots[shard][i] = slot
            if old is not None:
                self._free.append(old)

    def delete(self, shards: np.ndarray, ids: np.ndarray) -> None:
        """See `RecordStore.delete`."""
        check_batch(self._name, shards, ids, None, 0)
        for shard, i in zip(shards.tolist(), ids.tolist(), strict=True):
            slot = self._slots[shard].pop(i, None)
            if slot is not None:
                self._free.append(slot)

    def ids_in(self, shard: int) -> np.ndarray:
        """See `RecordStore.ids_in`."""
        return np.array(sorted(self._slots[shard]), np.int64)

    def clear(self, shards: range) -> None:
        """See `RecordStore.clear`."""
        self._slots.clear()
        self._free, self._unused = [], 0

    def flush(self) -> None:
        """Waits for the disk, where there is one; the index is in memory alone."""
        self._backing.flush()

    def close(self) -> None:
        """See `RecordStore.close`."""
        self._backing.close()

    def _find(self, shards: np.ndarray, ids: np.ndarray) -> np.ndarray:
        pairs = zip(shards.tolist(), ids.tolist(), strict=True)
        return np.array([self._slots[shard].get(i, -1) for shard, i in pairs], np.int64)

    def _read(self, slots: np.ndarray) -> np.ndarray:
        records = np.empty((len(slots), self.record_bytes), np.uint8)
        if len(slots):
            self._backing.read(slots.astype(np.uint32), records)
        return records

    def _take(self, count: int) -> np.ndarray:
        if self._max_records is not None and count > (room := len(self._free) + self._max_records - self._unused):
            raise NoRoomError(
                f"{self._name} have room for {self._max_records}, of which {room} are free, and {count} are to be "
                "written; give the store more"
            )
        again = min(count, len(self._free))
        kept = len(self._free) - again
        slots = self._free[kept:] + list(range(self._unused, self._unused + count - again))
        self._free, self._unused = self._free[:kept], self._unused + count - again
        return np.array(slots, np.uint32)


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
        """Of each piece that has some, their places in it, and in `slots`."""
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
