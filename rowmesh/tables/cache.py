"""Cache: which of a group's rows are in fast memory, and the thread that writes changed ones back to the store."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from rowmesh._support.faults import reach
from rowmesh._support.worker import Worker
from rowmesh.errors import RowmeshError
from rowmesh.ops.cache_table import CacheTable
from rowmesh.ops.slot_set import SlotSet
from rowmesh.tables.backing import BackingStore
from rowmesh.tables.cache_memory import CHUNK, CacheMemory, Copier

_CLEAN_SHARE = 4  # one cache slot of so many is kept free or clean, ahead of the batches that will need it


@dataclass
class TierCounters:
    """Counters of a cache since it was made.

    Attributes:
        pins: how often a batch pinned its rows.
        rows_found: of pinned rows, those that were in the cache.
        rows_forwarded: of these, rows that other batches in sight had pinned; the others were retained.
        rows_read, bytes_read: from the backing store.
        rows_initialized: of pinned rows, those that were never written: computed instead of read.
        rows_written, bytes_written: to the backing store.
        peak_frames: the most cache slots that batches in sight pinned at once.
        waited_s: how long batches waited for cache slots.
        read_s: how long batches read.
    """

    pins: int = 0
    rows_found: int = 0
    rows_forwarded: int = 0
    rows_read: int = 0
    bytes_read: int = 0
    rows_initialized: int = 0
    rows_written: int = 0
    bytes_written: int = 0
    peak_frames: int = 0
    waited_s: float = 0.0
    read_s: float = 0.0

    def add_pin(self, num_found: int, num_forwarded: int, num_pinned: int | None = None) -> None:
        """Counts a pin.

        Args:
            num_found, num_forwarded: rows of it, as above.
            num_pinned: by all batches in sight then; None where no batch has pinned these rows.
        """
        self.pins += 1
        self.rows_found += num_found
        self.rows_forwarded += num_forwarded
        self.peak_frames = max(self.peak_frames, num_pinned or 0)


class Cache:
    """The cache of a `CachedArena`, as its threads share it, and the thread that writes back.

    The thread writes rows without a pin before their cache slots are needed, least recently used first. It begins to
    copy rows under the lock, so that a copy has all earlier updates and no later one, and writes them without it.
    Meanwhile a batch may pin such a row and change it, which makes it dirty again. There is one such thread, so that
    two writes of a row keep their order.

    Args:
        name: of the group, for messages.
        memory: the rows.
        store: the backing store.
        num_slots: of the store.
        retain, poison: see `CachedArena`.

    Attributes:
        changed: the lock over `table`, `written` and `counters`; notified when cache slots become available.
        table: which slot is in which cache slot.
        written: slots that the store has a record of.
    """

    def __init__(
        self, name: str, memory: CacheMemory, store: BackingStore, num_slots: int, *, retain: bool, poison: bool
    ) -> None:
        self.name, self.memory, self.store = name, memory, store
        self.retain, self._poison = retain and not poison, poison
        self.changed = threading.Condition()
        self.table = CacheTable(memory.arena.num_slots)
        self.written = SlotSet(num_slots)
        self.counters = TierCounters()
        self._dirty = np.empty(CHUNK, np.uint32)
        self._copier = Copier(memory, store.stride, 1)
        self._demand = 0  # the most cache slots that a batch needed at once
        self._flushing = self._stopping = False
        self._failure: BaseException | None = None
        self._thread = Worker(target=self._run, name="rowmesh-write-back", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Host memory beside rows, state and versions."""
        table = self.table.num_bytes + self.written.num_bytes + self.memory.num_bytes
        return table + self._dirty.nbytes + self._copier.num_bytes

    def notify_freed(self, cache_slots: np.ndarray) -> None:
        """Cache slots became free, or clean ones may have; the lock is held."""
        if self._poison:
            self.memory.poison(cache_slots)
        self.changed.notify_all()

    def unpin(self, cache_slots: np.ndarray, changed: bool) -> None:
        """Takes a pin from each; with `changed` they are dirty. The lock is held."""
        self.notify_freed(self.table.unpin(cache_slots, changed, self.retain))

    def demand(self, num_cache_slots: int) -> None:
        """A batch needs so many cache slots; the lock is held."""
        self._demand = max(self._demand, num_cache_slots)
        self.changed.notify_all()

    def raise_failure(self) -> None:
        """Raises what failed since the last call; the lock is held. The rows in question are tried again."""
        if self._stopping:
            raise RowmeshError(f"group {self.name}: the arena is closed")
        failure, self._failure = self._failure, None
        if failure is not None:
            self.changed.notify_all()
            raise RowmeshError(f"group {self.name}: writing rows back failed: {failure}") from failure

    def flush(self) -> None:
        """Writes all dirty rows, pinned ones too; returns when they are written."""
        with self.changed:
            self.raise_failure()
            self._flushing = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._flushing or self._failure or self._stopping)
            self._flushing = False
            self.raise_failure()

    def stop(self) -> None:
        """Ends the thread, which finishes the rows it is writing; others are not written. May be called again."""
        with self.changed:
            self._stopping = True
            self.changed.notify_all()
        self._thread.join()

    def close(self) -> None:
        """Stops the thread, waits for copies and closes the store; may be called again."""
        self.stop()
        try:
            self.memory.wait()  # its memory is freed next
        finally:
            self.store.close()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(self._has_work)
                if self._stopping:
                    return
                count = self.table.oldest_dirty(self._dirty, self._flushing)
                if count == 0:
                    self._flushing = False
                    self.changed.notify_all()
                    continue
                cache_slots = self._dirty[:count]
                try:
                    reach("cache.pack")
                    slots = self.table.slots[cache_slots]
                    self._copier.pack(cache_slots)
                except BaseException as error:  # the thread goes on, or batches would wait for it in vain
                    self._end_write(cache_slots, error)
                    continue
            self._write(cache_slots, slots)

    def _has_work(self) -> bool:
        if self._stopping:
            return True
        if self._failure is not None:  # until it was raised
            return False
        if self._flushing:
            return True
        is_short = self.table.num_available < max(self.table.num_cache_slots // _CLEAN_SHARE, self._demand)
        return self.table.num_dirty > 0 and (is_short or not self.retain)

    def _write(self, cache_slots: np.ndarray, slots: np.ndarray) -> None:
        failure = None
        try:
            self.store.write(slots, self._copier.packed())
        except BaseException as error:
            failure = error
        with self.changed:
            if failure is None:
                self.written.add(slots)
                self.counters.rows_written += len(slots)
                self.counters.bytes_written += len(slots) * self.store.stride
            self._end_write(cache_slots, failure)

    def _end_write(self, cache_slots: np.ndarray, failure: BaseException | None) -> None:
        """Cache slots were written, or are to be tried again when the failure was raised; the lock is held."""
        self._failure = failure
        self.notify_freed(self.table.written(cache_slots, failure is None, self.retain))
