"""Cached arena: a bounded number of a group's rows in fast memory, all of them in a backing store.

Fast memory is the host's or a device's (`rowmesh.tables.cache_memory`); everything else is the same for both.

[Note: pins]
A batch pins its rows before it reads or updates them, and unpins them after its update. Several batches have pins at
once: the K that are looked ahead, and the one being trained. A row has one cache slot, however many batches pin it, so
what the update of batch t leaves is what batches t + 1 … t + K find. That forwards rows without copying any, and
without an intersection of keys. K = 1 is NestPipe's dual buffer, a larger K EL-Rec's queue of prefetched batches with
its embedding cache; K = 0 is the loop without look-ahead.

A row without a pin stays until its cache slot is needed, least recently used first; one that was changed is written
back before. `retain=False` evicts rows as soon as they are written back, as both papers do.

Source: NestPipe §IV-B (dual-buffer synchronization); EL-Rec (SC'22) §V (prefetch queue, embedding cache).
Differs: buffers and cache are one arena; rows are shared instead of copied between buffers or merged after the fact.

[Note: rows that no batch here asked for]
Other replicas and the owners of copied rows change rows that no batch of this rank has pinned. `pin_some` pins them a
few at a time, in `spare` cache slots that batches leave free: it waits for no batch, so that the thread whose update
makes room for batches may call it. Where all rows are in the cache already, pinned by a window that will change them,
it takes no turn either.

[Note: what may overlap]
    pin, read_rows, write_rows, flush      take turns; any thread
    pin_some                               takes turns where a row is not in the cache; any thread
    unpin                                  at any time; any thread
    updates of pinned rows                 beside pin and unpin; not beside read_rows, write_rows, flush or check, and
                                           not beside another update of the same rows
    reading pinned rows                    where updates may run; not beside one of the same rows
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.errors import ConfigurationError, NoRoomError, RowmeshError
from rowmesh.ops.cache_table import MAX_CACHE_SLOTS, MISSING
from rowmesh.ops.merge_update import HostMerged, Merged
from rowmesh.ops.streams import Mark, Stream
from rowmesh.tables.backing import BackingStore, MakeStore, MemoryStore
from rowmesh.tables.cache import Cache, TierCounters
from rowmesh.tables.cache_memory import CHUNK, CacheMemory, Copier
from rowmesh.tables.group import TableGroup
from rowmesh.tables.row_arrays import InitialRows, RowArrays
from rowmesh.tables.row_store import Piece, Watcher
from rowmesh.tables.versions import Versions

_LOOK_S = 0.1  # how often a batch that waits for others checks whether it still may
_STAGES = 8  # chunks of a batch that may be on their way to a device at once


class PinnedRows:
    """Rows of a batch that are in the cache, or on their way to it, and stay until they are unpinned.

    Made by `CachedArena.pin`.

    Attributes:
        slots: uint32 `[n]`, as they were asked for.
        cache_slots: uint32 `[n]`, where their rows are, in the same order.
        num_found: how many were in the cache already.
        is_pinned: whether they are still to be unpinned.
    """

    def __init__(self, arena: CachedArena, slots: np.ndarray) -> None:
        self.slots, self.cache_slots = slots, np.empty(len(slots), np.uint32)
        self.num_found, self.is_pinned = 0, True
        self.copies: Sequence[Mark] = ()  # that bring the rows, and those of cache slots that were taken out before
        self._arena, self._is_counted = arena, False
        self._stream: Stream | None = None  # whose kernels use the rows

    def note_found(self, count: int) -> None:
        """Takes how many rows were in the cache already."""
        self.num_found = count

    def take_found(self) -> np.ndarray:
        """The cache slots of those that are in the cache, which are to be unpinned; none is known then."""
        found, self.cache_slots = self.cache_slots, np.full(len(self.slots), MISSING, np.uint32)
        return found[found != MISSING]

    def ready(self) -> None:
        """Makes the current stream wait for the rows: kernels launched from now on find them. The host goes on.

        Raises:
            RowmeshError: see `check`.
        """
        self.note_use()
        if self._stream is not None:
            self._stream.wait_for(self.copies)
        self.check()

    def note_use(self) -> None:
        """The current stream uses the rows."""
        self._stream = self._arena.current_stream()

    def check(self) -> None:
        """Under `verify`, checks that rows are what their last updates left; to be called before their use.

        Raises:
            RowmeshError: one is not; names its table and row, and the versions.
        """
        self._arena.check(self.cache_slots, self.slots)

    def apply(
        self, merged: HostMerged, lr: float, scaling: float, step: int, part: tuple[int, int] | None = None
    ) -> None:
        """Updates rows in the host's memory in place; see `RowStore.apply`.

        Args:
            merged: the pinned slots, in their order, and the gradients for each.
            lr, scaling, step, part: as there.

        Raises:
            RowmeshError: see `check`.
        """
        self._count_update(slice(*(part or (0, len(self.slots)))))
        self._arena.apply(merged.at(self.cache_slots), lr, scaling, step, part)

    def announce(self) -> None:
        """Tells watchers of the rows, which are to change otherwise than by `apply`."""
        self._arena.memory.arena.announce(self.cache_slots)

    def _count_update(self, rows: slice) -> None:
        """Under `verify`, checks rows and counts their update."""
        self._is_counted = True
        self._arena.count_update(self.cache_slots[rows], self.slots[rows])

    def unpin(self, changed: bool = False) -> None:
        """The rows may leave the cache, when what was launched so far has run. May be called again.

        Args:
            changed: whether rows were updated, all or some; they are written back behind the caller.

        Raises:
            RowmeshError: under `verify`, a changed row was not what its last update left.
        """
        if not self.is_pinned:
            return
        if changed and not self._is_counted:
            self._count_update(slice(None))
        self._arena.unpin(self, changed, None if self._stream is None else self._stream.mark())


class CachedArena:
    """Rows in slots 0 … num_slots − 1 of a backing store, at most `num_cached` of them in fast memory; a `RowStore`.

    Rows and state of the cache are laid out as in a `DenseArena` of `num_cached` slots, so that kernels work on them
    with cache slots for slots. See the notes in `rowmesh.tables.cached` on pins and on what may overlap. `close` stops
    the thread that writes back; so does garbage collection.

    Args:
        group: the tables.
        num_slots: rows of this rank, of all tables together.
        num_cached: how many of them fit into fast memory. Batches in sight must fit together; with a quarter more they
            do not wait for rows to be written back.
        spare: how many more fit, for rows that no batch here asked for.
        kept: uint32 `[n]`, slots of rows that are put into fast memory at first and stay there, beside the others.
        make_store: makes the backing store: `MemoryStore`, or `partial(FileStore, path=…)`.
        device: whose memory is fast memory; None: the host's.
        streams: makes streams of the device.
        retain: whether rows without a pin stay in the cache until their cache slots are needed.
        verify: whether to keep a version of each row and to check it; costs 8 bytes a row.
        poison: whether NaN is left in cache slots when rows leave, at once (`retain` counts as false); for tests.
        timeout_s: how long a batch waits for cache slots.

    Attributes:
        kept: as given.
        kept_places: uint32 `[n]`, their cache slots.

    Raises:
        ConfigurationError: `num_cached` is out of range, or the store cannot be made.
        MemoryError: the device has no room.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from rowmesh.tables import TableSpec, fuse
        >>> (group,) = fuse([TableSpec(name="item", num_rows=1000, dim=4)])
        >>> arena = CachedArena(group, 1000, num_cached=10)
        >>> piece = SimpleNamespace(rows=range(1000), slots=range(1000))
        >>> arena.initialize(0, [[piece]])
        >>> pinned = arena.pin(np.array([7, 999], np.uint32))
        >>> rows = arena.rows[torch.from_numpy(pinned.cache_slots.astype(np.int64))]
        >>> pinned.unpin()
        >>> bool((rows == arena.read_rows(pinned.slots)[0]).all())
        True
        >>> arena.close()
    """

    is_whole = has_views = False

    def __init__(
        self,
        group: TableGroup,
        num_slots: int,
        num_cached: int,
        make_store: MakeStore = MemoryStore,
        *,
        spare: int = 0,
        kept: np.ndarray | None = None,
        device: torch.device | None = None,
        streams: type[Stream] = Stream,
        retain: bool = True,
        verify: bool = False,
        poison: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        if not 1 <= num_cached <= MAX_CACHE_SLOTS:
            raise ConfigurationError(f"group {group.name}: num_cached must be 1 to {MAX_CACHE_SLOTS}, got {num_cached}")
        self.kept = self.kept_places = np.empty(0, np.uint32) if kept is None else kept
        num_cached += len(self.kept)
        self.group, self.num_slots, self.num_cached, self._spare = group, num_slots, num_cached, spare
        self.memory = CacheMemory(group, num_cached + spare, verify, device, streams)
        self.device, self.address = self.memory.arena.device, self.memory.arena.address
        self.rows, self.state = self.memory.arena.rows, self.memory.arena.state
        self.store: BackingStore = make_store(num_slots, self.memory.record_bytes)
        self._timeout_s = timeout_s
        self._copier = Copier(self.memory, self.store.stride, _STAGES)
        self._pinning = threading.Lock()
        self._is_taken = False  # the turn of those that read rows outside the cache, under the lock of the cache
        self._num_pins = 0
        self._num_lent = 0  # spare cache slots that are taken, under the lock of the cache
        self._initial: InitialRows | None = None
        self._versions: Versions | None = None
        self._cache = Cache(group.name, self.memory, self.store, num_slots, retain=retain, poison=poison)
        self._finalizer = weakref.finalize(self, self._cache.close)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Fast memory of the rows, and of the optimizer state."""
        return self.memory.arena.num_bytes

    @property
    def bookkeeping_bytes(self) -> int:
        """Other memory of the host: the cache's tables, one bit a slot, buffers of records, versions where kept."""
        versions = 0 if self._versions is None else self._versions.num_bytes
        return self._cache.num_bytes + self._copier.num_bytes + versions

    @property
    def counters(self) -> TierCounters:
        """Counters of the cache since it was made."""
        return self._cache.counters

    def initialize(self, seed: int, held: Iterable[Iterable[Piece]]) -> None:
        """Notes what rows start from, before the first pin; see `RowStore`.

        Nothing is written: a row is computed when it is first read.
        """
        self._initial = InitialRows(self.group, seed, held)
        if self.memory.versions is not None:
            self._versions = Versions(self.num_slots, self.memory.versions, self._initial)
        if len(self.kept):
            self.kept_places = self.pin(self.kept).cache_slots  # for good
            self._num_pins = 0

    def pin(self, slots: np.ndarray, may_wait: Callable[[], bool] = lambda: True) -> PinnedRows:
        """Brings rows into the cache, and keeps them there.

        Blocks until they are there (on a device: on their way), and, where their cache slots are needed, until other
        rows are unpinned or written back.

        Args:
            slots: uint32 `[n]`, distinct; kept as they are.
            may_wait: whether other batches may unpin rows meanwhile; asked again while this one waits for that.

        Raises:
            NoRoomError: there are too few cache slots, and others are not unpinned, or not within the timeout.
            RowmeshError: rows cannot be read, or earlier ones not be written, naming the file; under `verify`, a row is
                not what its last update left. Or another batch was reading rows for the timeout.
        """
        pinned = PinnedRows(self, slots)
        assert len(slots) == 0 or int(slots.max()) < self.num_slots, "slots that the arena does not have"
        with self._pinning:
            assigned, is_written = self._assign(pinned, may_wait)
            try:
                reach("cached.load")
                self._load(pinned, assigned, is_written)
            except BaseException:
                self._discard(pinned, assigned)
                raise
            finally:
                self._end_turn()
        pinned.copies = self.memory.marks()
        return pinned

    def pin_some(self, slots: np.ndarray) -> Iterator[tuple[slice, PinnedRows]]:
        """Pins rows that no batch here asked for, some at a time, and unpins them as changed when the next are due.

        Waits for no batch: see [Note: rows that no batch here asked for] in `rowmesh.tables.cached`.

        Args:
            slots: uint32 `[n]`, distinct.

        Yields:
            Which of the slots, and their rows.

        Raises:
            RowmeshError: as `pin`.
        """
        if (found := self._pin_found(slots)) is not None:
            yield slice(0, len(slots)), found
            found.unpin(changed=True)
            return
        assert self._spare, "rows that are not in the cache, and no room is kept for them"
        for first in range(0, len(slots), self._spare):
            part = slice(first, min(first + self._spare, len(slots)))
            pinned = self._pin_spare(slots[part])
            yield part, pinned
            with self._cache.changed:
                self._num_lent = 0
            pinned.unpin(changed=True)

    def _pin_found(self, slots: np.ndarray) -> PinnedRows | None:
        """Pins rows where all are in the cache, without a turn."""
        cache, pinned = self._cache, PinnedRows(self, slots)
        with cache.changed:
            if cache.table.find(slots, pinned.cache_slots):
                return None
            cache.table.pin(slots, pinned.cache_slots)
            self._count_pin(pinned, len(slots))
        return pinned

    def _pin_spare(self, slots: np.ndarray) -> PinnedRows:
        """Pins at most as many rows as there are spare cache slots."""
        cache, table, pinned = self._cache, self._cache.table, PinnedRows(self, slots)
        with self._turn():
            with cache.changed:
                cache.raise_failure()
                missing = table.pin(slots, pinned.cache_slots)
                try:
                    self._wait_for_writes(missing)
                except BaseException:
                    cache.unpin(pinned.take_found(), changed=False)
                    raise
                assigned = table.assign(slots, pinned.cache_slots).copy()
                is_written = cache.written.contains(slots[assigned])
                self._num_lent = len(slots)
                self._count_pin(pinned, len(slots) - missing)
            try:
                self._load(pinned, assigned, is_written)
            except BaseException:
                self._discard(pinned, assigned)
                raise
        return pinned

    def _wait_for_writes(self, missing: int) -> None:
        """Returns when so many cache slots, which no batch may pin, are written back; the lock is held."""
        cache, ends = self._cache, time.monotonic() + self._timeout_s
        cache.demand(missing)
        while cache.table.num_available < missing:
            cache.raise_failure()
            if (left_s := ends - time.monotonic()) <= 0:
                raise self._not_ended(self._timeout_s)
            cache.changed.wait(left_s)

    def _count_pin(self, pinned: PinnedRows, num_found: int) -> None:
        """Counts pinned rows; the lock is held."""
        pinned.note_found(num_found)
        self._num_pins += 1
        self._cache.counters.add_pin(num_found, 0)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """While one thread reads rows of the store, no other looks for them.

        A batch that waits for cache slots has no turn: others may go on, and end its waiting.
        """
        with self._cache.changed:
            if not self._cache.changed.wait_for(lambda: not self._is_taken, self._timeout_s):
                raise self._not_ended(self._timeout_s)
            self._is_taken = True
        try:
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        with self._cache.changed:
            self._is_taken = False
            self._cache.changed.notify_all()

    def _assign(self, pinned: PinnedRows, may_wait: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        """Finds or assigns a cache slot for every slot, and takes the turn.

        Returns:
            The positions to read, and for each whether there is a record.
        """
        cache, table, slots = self._cache, self._cache.table, pinned.slots
        with cache.changed:
            cache.raise_failure()
            num_pinned = table.num_pinned
            missing = table.pin(slots, pinned.cache_slots)
            try:
                num_forwarded = len(slots) - missing - (table.num_pinned - num_pinned)
                missing = self._wait_for_room(pinned, missing, may_wait)
                pinned.note_found(len(slots) - missing)
                room = np.empty(missing, np.intp)
                positions = table.assign(slots, pinned.cache_slots)
            except BaseException:
                cache.unpin(pinned.take_found(), changed=False)
                raise
            self._num_pins += 1
            assigned = room[: len(positions)]
            assigned[:] = positions
            try:
                reach("cached.assigned")
                is_written = cache.written.contains(slots[assigned])
            except BaseException:
                self._discard(pinned, assigned)
                raise
            self._is_taken = True  # last: what fails before has no turn that nobody would end
            cache.counters.add_pin(pinned.num_found, num_forwarded, table.num_pinned)
            return assigned, is_written

    def _wait_for_room(self, pinned: PinnedRows, missing: int, may_wait: Callable[[], bool]) -> int:
        """Returns when cache slots for all that is missing can be assigned, and the turn taken; the lock is held.

        Rows that were found are unpinned while batches have as many pins as they may: they may stand in the way of
        `pin_some`, which waits for no batch.

        Args:
            pinned: the rows, of which those that were found are pinned.
            missing: how many were not.
            may_wait: as for `pin`.

        Returns:
            How many are missing then.
        """
        cache, table, num_rows = self._cache, self._cache.table, len(pinned.slots)
        cache.demand(missing)
        began = time.monotonic()
        while True:
            has_most = table.num_pinned + missing > self.num_cached
            is_short = has_most or table.num_available < missing
            if not is_short and not self._is_taken:
                break
            cache.raise_failure()
            waited_s = time.monotonic() - began
            if is_short:
                needs_others = table.num_pinned - self._num_lent + missing > self.num_cached
                is_hopeless = num_rows > self.num_cached or (needs_others and not may_wait())
                if is_hopeless or waited_s >= self._timeout_s:
                    raise NoRoomError(self._describe_shortage(missing, num_rows, waited_s))
            elif waited_s >= self._timeout_s:
                raise self._not_ended(waited_s)
            left_s = self._timeout_s - waited_s
            if has_most and self._spare:
                cache.unpin(pinned.take_found(), changed=False)
            cache.changed.wait(min(_LOOK_S, left_s) if is_short else left_s)
            if has_most and self._spare:
                missing = table.pin(pinned.slots, pinned.cache_slots)
        cache.counters.waited_s += time.monotonic() - began
        return missing

    def _not_ended(self, waited_s: float) -> RowmeshError:
        return RowmeshError(
            f"group {self.group.name}: another thread has read or written rows of {self.store} for {waited_s:.1f} s "
            "and has not ended; where the disk is slow, raise timeout_s of Tiers"
        )

    def _describe_shortage(self, missing: int, num_rows: int, waited_s: float) -> str:
        num_pinned = self._cache.table.num_pinned
        return (
            f"group {self.group.name}: a batch of {num_rows:,} rows needs {missing:,} more slots of the cache, which "
            f"has {self.num_cached:,}; {num_pinned:,} are pinned, by this batch and {self._num_pins} other(s) in sight "
            f"(waited {waited_s:.1f} s). Let {num_pinned + missing:,} rows or more fit (fast_rows or fast_share of "
            "Tiers, or of the section tiers), look ahead over fewer batches, or make batches smaller"
        )

    def _load(self, pinned: PinnedRows, assigned: np.ndarray, is_written: np.ndarray) -> None:
        """Fills the cache slots of the positions that they were assigned to."""
        cache_slots, slots = pinned.cache_slots[assigned], pinned.slots[assigned]
        began = time.monotonic()
        for part, arrays, places in self._copier.fill(cache_slots):
            self._read(arrays, places, slots[part], is_written[part])
        if self._versions is not None:
            self._versions.check(cache_slots, slots, f"what was read from {self.store}")
        num_read = int(is_written.sum())
        with self._cache.changed:
            counters = self._cache.counters
            counters.read_s += time.monotonic() - began
            counters.rows_read += num_read
            counters.bytes_read += num_read * self.store.stride
            counters.rows_initialized += len(assigned) - num_read

    def _read(self, arrays: RowArrays, places: np.ndarray, slots: np.ndarray, is_written: np.ndarray) -> None:
        """Writes rows that are not in the cache to places, from the store or as they were initially."""
        assert self._initial is not None, "initialize was not called"
        self._initial.fill(arrays, places[~is_written], slots[~is_written])
        places, slots = places[is_written], slots[is_written]
        for first in range(0, len(slots), CHUNK):
            part = slice(first, first + CHUNK)
            records = self._copier.records[: len(slots[part])]
            self.store.read(slots[part], records)
            arrays.unpack(places[part], records)

    def _discard(self, pinned: PinnedRows, assigned: np.ndarray) -> None:
        """Undoes a pin whose rows could not be read."""
        pinned.is_pinned = False
        with self._cache.changed:
            self._num_pins -= 1
            self._cache.unpin(np.delete(pinned.cache_slots, assigned), changed=False)
            self._cache.table.discard(pinned.cache_slots[assigned])
            self._cache.notify_freed(pinned.cache_slots[assigned])

    def unpin(self, pinned: PinnedRows, changed: bool, last_use: Mark | None) -> None:
        """Does what `PinnedRows.unpin` says, which calls this; `last_use`: of kernels that may still run."""
        if self.memory.uses is not None and last_use is not None:
            self.memory.uses.note(pinned.cache_slots, last_use)
        with self._cache.changed:
            pinned.is_pinned = False
            self._num_pins -= 1
            self._cache.unpin(pinned.cache_slots, changed)

    def current_stream(self) -> Stream | None:
        """The stream of the computation; None where kernels have run when they return."""
        return None if self.memory.uses is None else self.memory.current()

    def check(self, cache_slots: np.ndarray, slots: np.ndarray) -> None:
        """Under `verify`, checks that rows are what their last updates left; see `PinnedRows.check`."""
        if self._versions is None:
            return
        lost = np.flatnonzero(self._cache.table.slots[cache_slots] != slots)
        if len(lost):
            assert self._initial is not None
            row = self._initial.name(int(slots[lost[0]]))
            raise RowmeshError(f"{row} is used, but its cache slot was given to another row")
        self._versions.check(cache_slots, slots, "what the cache holds")

    def count_update(self, cache_slots: np.ndarray, slots: np.ndarray) -> None:
        """Under `verify`, checks pinned rows and counts an update of them."""
        if self._versions is not None:
            self.check(cache_slots, slots)
            self._versions.advance(cache_slots, slots)

    def apply(self, merged: Merged, lr: float, scaling: float, step: int, part: tuple[int, int] | None = None) -> None:
        """Updates pinned rows in place; see `RowStore`. In the host's memory, `PinnedRows.apply` does it by slot.

        Args:
            merged: cache slots and the gradients for each.
            lr, scaling, step, part: as there.
        """
        self.memory.arena.apply(merged, lr, scaling, step, part)

    def read_rows(self, slots: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of rows and of their state, wherever they are; see `RowStore`."""
        slots = np.ascontiguousarray(slots, np.uint32)
        out = RowArrays.empty(self.group, len(slots), self._versions is not None)
        with self._turn():
            for first in range(0, len(slots), CHUNK):
                part = slots[first : first + CHUNK]
                self._read_part(out, np.arange(first, first + len(part), dtype=np.uint32), part)
        return out.rows, out.state

    def _read_part(self, out: RowArrays, places: np.ndarray, slots: np.ndarray) -> None:
        cache, cache_slots = self._cache, np.empty(len(slots), np.uint32)
        with cache.changed:
            cache.table.find(slots, cache_slots)
            is_cached = cache_slots != MISSING
            self._copier.pack(cache_slots[is_cached])
            is_written = cache.written.contains(slots[~is_cached])
        out.unpack(places[is_cached], self._copier.packed())
        self._read(out, places[~is_cached], slots[~is_cached], is_written)

    def write_rows(self, slots: np.ndarray, rows: Tensor, state: Mapping[str, Tensor]) -> None:
        """Sets rows and their state, wherever they are; see `RowStore`."""
        slots = np.ascontiguousarray(slots, np.uint32)
        with self._turn():
            versions = None if self._versions is None else self._versions.overwrite(slots)
            ordered = {name: state[name].contiguous() for name in self.state}
            source = RowArrays(rows.contiguous(), ordered, versions)
            for first in range(0, len(slots), CHUNK):
                part = slots[first : first + CHUNK]
                self._write_part(source, np.arange(first, first + len(part), dtype=np.uint32), part)
            self.memory.wait()  # later reads of pinned rows find what was set

    def _write_part(self, source: RowArrays, places: np.ndarray, slots: np.ndarray) -> None:
        cache, cache_slots = self._cache, np.empty(len(slots), np.uint32)
        with cache.changed:
            cache.table.pin(slots, cache_slots)
            is_cached = cache_slots != MISSING
            records = self._copier.records[: int(is_cached.sum())]
            source.pack(places[is_cached], records)
            for part, arrays, own in self._copier.fill(cache_slots[is_cached]):
                arrays.unpack(own, records[part])
            cache.unpin(cache_slots[is_cached], changed=True)
        places, slots = places[~is_cached], slots[~is_cached]
        records = self._copier.records[: len(slots)]
        source.pack(places, records)
        self.store.write(slots, records)
        with cache.changed:
            cache.written.add(slots)

    def flush(self) -> None:
        """Writes all changed rows without a pin; the store then has every row as its last update left it.

        Rows that were never changed have no record.

        Raises:
            RowmeshError: they cannot be written; names the file. Rows that were not written are still in the cache,
                where `read_rows` finds them, and are tried again.
        """
        with self._turn():
            self._cache.flush()
            self.store.flush()

    def watch(self, name: str, watcher: Watcher | None) -> None:
        """Has a function called before every update of pinned rows; see `RowStore`."""
        table = self._cache.table

        def tell(places: np.ndarray | Tensor, _: object) -> None:
            assert watcher is not None
            if isinstance(places, Tensor):
                places = places[places < len(self.rows)].cpu().numpy().astype(np.uint32)
            watcher(table.slots[places], places)

        self.memory.arena.watch(name, None if watcher is None else tell)

    def close(self) -> None:
        """Stops the thread and closes the store, without writing what is left; may be called again.

        A batch that waits for cache slots gets a RowmeshError.
        """
        self._cache.stop()
        with self._turn():
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
