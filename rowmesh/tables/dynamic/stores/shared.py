"""SharedStore: a store of records that changes while another thread reads what it had at one moment.

Records that a change is about to write over, or remove, are read and kept first, in memory. So the store pays for what
changes meanwhile, however much it has.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np

from rowmesh.errors import RowmeshError
from rowmesh.tables.dynamic.stores.protocol import RecordStore

_AT_ONCE = 1024  # records that one thread reads while the other waits


class SharedStore:
    """A `RecordStore` over another one, for two threads: one that changes it, and one that reads what was frozen.

    Args:
        store: owned from here on.

    Example:
        >>> from rowmesh.tables.dynamic.stores.slots import memory_records
        >>> store = SharedStore(memory_records("user", 10, 2))
        >>> frozen = store.freeze()
        >>> store.put(np.array([0]), np.array([7]), np.array([[1, 2]], np.uint8))
        >>> store.ids_in(0).tolist(), frozen.ids_in(0).tolist()
        ([7], [])
    """

    def __init__(self, store: RecordStore) -> None:
        self.record_bytes, self.store, self.lock = store.record_bytes, store, threading.Lock()
        self.frozen: FrozenStore | None = None

    def freeze(self, wanted: np.ndarray | None = None) -> FrozenStore:
        """The records that it has now, to be read until the frozen store is closed; one at a time.

        Args:
            wanted: int64 `[N]`, ids that are read, and no others, one by one; None: all are.
        """
        with self.lock:
            assert self.frozen is None, "one at a time"
            self.frozen = FrozenStore(self, wanted)
            return self.frozen

    def get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """See `RecordStore.get`."""
        with self.lock:
            return self.store.get(shards, ids, records)

    def put(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> None:
        """See `RecordStore.put`."""
        with self.lock:
            if self.frozen is not None:
                self.frozen.keep(shards, ids)
            self.store.put(shards, ids, records)

    def delete(self, shards: np.ndarray, ids: np.ndarray) -> None:
        """See `RecordStore.delete`."""
        with self.lock:
            if self.frozen is not None:
                self.frozen.keep(shards, ids)
            self.store.delete(shards, ids)

    def ids_in(self, shard: int) -> np.ndarray:
        """See `RecordStore.ids_in`."""
        with self.lock:
            return self.store.ids_in(shard)

    def clear(self, shards: range) -> None:
        """See `RecordStore.clear`; what was frozen cannot be read any more."""
        with self.lock:
            self.frozen = None
            self.store.clear(shards)

    def flush(self) -> None:
        """See `RecordStore.flush`."""
        with self.lock:
            self.store.flush()

    def close(self) -> None:
        """See `RecordStore.close`."""
        with self.lock:
            self.frozen = None
            self.store.close()


class FrozenStore:
    """The records that a `SharedStore` had when this was made; for another thread than the one that changes it."""

    def __init__(self, shared: SharedStore, wanted: np.ndarray | None) -> None:
        self._shared, self._wanted = shared, None if wanted is None else np.sort(wanted)
        # By shard, of the ids that were changed since: their records, None where there was none.
        self._kept: defaultdict[int, dict[int, np.ndarray | None]] = defaultdict(dict)

    def keep(self, shards: np.ndarray, ids: np.ndarray) -> None:
        """Keeps what there is of ids that are about to be changed; the store's lock is held."""
        if self._wanted is not None:
            places = np.searchsorted(self._wanted, ids)
            is_wanted = self._wanted.take(places, mode="clip") == ids if len(self._wanted) else np.zeros(len(ids), bool)
            shards, ids = shards[is_wanted], ids[is_wanted]
        pairs = zip(shards.tolist(), ids.tolist(), strict=True)
        new = np.array([i not in self._kept[shard] for shard, i in pairs], bool)
        shards, ids = shards[new], ids[new]
        if not len(ids):
            return
        records = np.empty((len(ids), self._shared.record_bytes), np.uint8)
        found = self._shared.store.get(shards, ids, records)
        for shard, i, is_there, record in zip(shards.tolist(), ids.tolist(), found.tolist(), records, strict=True):
            self._kept[shard][i] = record if is_there else None

    def ids_in(self, shard: int) -> np.ndarray:
        """See `RecordStore.ids_in`; where all are wanted.

        Raises:
            RowmeshError: it was closed meanwhile.
        """
        assert self._wanted is None
        with self._shared.lock:
            self._check()
            now, kept = self._shared.store.ids_in(shard), self._kept[shard]
        gone = np.array([i for i, record in kept.items() if record is None], np.int64)
        there = np.array([i for i, record in kept.items() if record is not None], np.int64)
        return np.union1d(np.setdiff1d(now, gone), there)

    def get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """See `RecordStore.get`.

        Raises:
            RowmeshError: it was closed meanwhile.
        """
        found = np.empty(len(ids), bool)
        for first in range(0, len(ids), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            found[some] = self._get(shards[some], ids[some], records[some])
        return found

    def _get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        with self._shared.lock:
            self._check()
            found = self._shared.store.get(shards, ids, records)
            pairs = enumerate(zip(shards.tolist(), ids.tolist(), strict=True))
            changed = [(place, self._kept[shard][i]) for place, (shard, i) in pairs if i in self._kept[shard]]
        for place, record in changed:
            found[place] = record is not None
            if record is not None:
                records[place] = record
        return found

    def close(self) -> None:
        """Changes cost nothing more; may be called again."""
        with self._shared.lock:
            if self._shared.frozen is self:
                self._shared.frozen = None
            self._kept.clear()

    def _check(self) -> None:
        if self._shared.frozen is not self:
            raise RowmeshError("the store was cleared or closed while what it had was being saved")
