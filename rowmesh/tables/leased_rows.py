"""Leased rows: a bounded number of a group's rows in fast memory, all of them in a backing store.

What is here is the host's part, whatever memory is the fast one: which rows are there, and when they are brought,
written back and given up. `rowmesh.tables.tiered` has the arena for a CPU, `rowmesh.tables.device_tiered` that for a
device.

[Note: leases]
A batch leases its rows before it reads or updates them, and releases them after its update. Several leases are alive at
once: those of the K batches that are looked ahead, and that of the one being trained. A row has one frame, whichever
leases hold it, so what the update of batch t leaves is what batches t + 1 … t + K find. That forwards rows without
copying any, and without an intersection of keys. K = 1 is NestPipe's dual buffer, a larger K EL-Rec's queue of
prefetched batches with its embedding cache; K = 0 is the loop without look-ahead.

A row that no lease holds stays where it is until its frame is needed, those that were used longest ago first, so that
the arena is a cache too; one that was changed is written back before. `retain=False` gives rows up as soon as they are
written back, as both papers do.

Source: NestPipe §IV-B (dual-buffer synchronization); EL-Rec (SC'22) §V (prefetch queue, embedding cache).
Differs: buffers and cache are one arena; rows are shared instead of copied between buffers or merged after the fact.

[Note: what may overlap]
    bring, read_rows, write_rows, flush    take turns; any thread
    release, look                          at any time; any thread
    updates of leased rows                 beside bring, release and look; not beside read_rows, write_rows, flush or
                                           check, and not beside another update of the same rows
    reading leased rows                    where updates may run; not beside one of the same rows
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Self

import numpy as np
from torch import Tensor

from rowmesh.errors import NoRoomError, RowmeshError
from rowmesh.ops.frames import MISSING
from rowmesh.tables.arena import Piece
from rowmesh.tables.backing import BackingStore, MakeStore
from rowmesh.tables.columns import Columns, InitialRows
from rowmesh.tables.fast_rows import CHUNK, MakeFast
from rowmesh.tables.group import TableGroup
from rowmesh.tables.tier import Tier, TierCounters
from rowmesh.tables.versions import Versions
from rowmesh.tables.write_back import WriteBack

_LOOK_S = 0.1  # how often a lease that waits for others looks whether it still may
_PARTS = 8  # of a lease that may be on their way to fast memory at once


class Lease:
    """Rows of a batch that are in frames, and stay there until they are released.

    Attributes:
        slots: uint32 `[n]`, as they were asked for.
        frames: uint32 `[n]`, where their rows are, in the same order.
        num_found: how many were in fast memory already.
        is_live: whether it is still to be released.
    """

    def __init__(self, slots: np.ndarray) -> None:
        self.slots, self.frames = slots, np.empty(len(slots), np.uint32)
        self.num_found, self.is_live = 0, True

    @property
    def address(self) -> int:
        """Where `frames` begin."""
        return self.frames.ctypes.data


class LeasedRows:
    """Rows in slots 0 … num_slots − 1 of a backing store, of which at most `num_frames` are in fast memory.

    See the notes in `rowmesh.tables.leased_rows` on leases and on what may overlap. `close` stops the thread that
    writes back; so does garbage collection.

    Args:
        group: the tables.
        num_slots: rows of this rank, of all tables together.
        num_frames: how many of them fit into fast memory. Batches in sight must fit together; with a quarter more the
            leases do not wait for rows to be written back.
        make_store: makes the backing store: `MemoryStore`, or `partial(FileStore, path=…)`.
        make_fast: makes the fast memory.
        retain: whether rows that no lease holds stay in fast memory until their frames are needed.
        verify: whether to keep a version of each row and to check it; costs 8 bytes a row.
        poison: whether NaN is left in frames that are given up, at once (`retain` counts as false); for tests.
        timeout_s: how long a lease waits for frames.

    Raises:
        ConfigurationError: `num_frames` is out of range, or the store cannot be made.
    """

    def __init__(
        self,
        group: TableGroup,
        num_slots: int,
        num_frames: int,
        make_store: MakeStore,
        make_fast: MakeFast,
        *,
        retain: bool = True,
        verify: bool = False,
        poison: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        self.group, self.num_slots, self.num_frames = group, num_slots, num_frames
        self._tier = Tier(group, num_slots, num_frames, make_store, make_fast, retain, verify, poison)
        self._timeout_s = timeout_s
        self._shuttle = self._tier.make_shuttle(_PARTS)
        self._leasing = threading.Lock()
        self._is_taken = False  # the turn of those that read rows outside fast memory, under the lock of the tier
        self._num_leases = 0
        self._initial: InitialRows | None = None
        self._versions: Versions | None = None
        self._writer = WriteBack(self._tier)
        self._finalizer = weakref.finalize(self, _close, self._writer, self._tier)

    @property
    def rows(self) -> Tensor:
        """The fast rows, `[num_frames, D]`."""
        return self._tier.fast.arena.rows

    @property
    def state(self) -> dict[str, Tensor]:
        """The state of the fast rows, by name."""
        return self._tier.fast.arena.state

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Fast memory of the rows, and of the optimizer state."""
        return self._tier.fast.arena.num_bytes

    @property
    def bookkeeping_bytes(self) -> int:
        """Other memory: the books of frames, one bit a slot, buffers of records, versions where they are kept."""
        versions = 0 if self._versions is None else self._versions.num_bytes
        books = self._tier.table.num_bytes + self._tier.written.num_bytes
        return books + self._shuttle.num_bytes + self._writer.num_bytes + versions

    @property
    def counters(self) -> TierCounters:
        """What was done so far."""
        return self._tier.counters

    @property
    def store(self) -> BackingStore:
        """The backing store."""
        return self._tier.store

    def initialize(self, seed: int, held: Iterable[Iterable[Piece]]) -> None:
        """Says what rows start from, before the first lease; `held` has the pieces of each table, in consecutive slots.

        Nothing is written: a row is computed when it is first read.
        """
        self._initial = InitialRows(self.group, seed, held)
        if self._tier.fast.versions is not None:
            self._versions = Versions(self.num_slots, self._tier.fast.versions, self._initial)

    def bring(self, slots: np.ndarray, may_wait: Callable[[], bool] = lambda: True) -> Lease:
        """Brings rows into fast memory and keeps them there.

        Blocks until they are there (on a device: on their way), and until other leases are released where their frames
        are needed.

        Args:
            slots: uint32 `[n]`, distinct; kept as they are.
            may_wait: whether other leases may be released meanwhile; asked again while it waits for that.

        Raises:
            NoRoomError: the frames do not suffice, and others are not released, or not within the timeout.
            RowmeshError: rows cannot be read, or earlier ones not be written, naming the file; under `verify`, a row is
                not what its last update left.
        """
        lease = Lease(slots)
        assert len(slots) == 0 or int(slots.max()) < self.num_slots, "slots that the arena does not have"
        with self._leasing:
            taken, is_written = self._take(lease, may_wait)
            try:
                self._load(lease, taken, is_written)
            except BaseException:
                self._abandon(lease, taken)
                raise
            finally:
                self._end_turn()
        return lease

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """While a lease reads rows nobody else may look for them, and the other way round.

        A lease that waits for frames has no turn: others need not wait for what only they may bring about.
        """
        with self._tier.changed:
            self._tier.changed.wait_for(lambda: not self._is_taken)
            self._is_taken = True
        try:
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        with self._tier.changed:
            self._is_taken = False
            self._tier.changed.notify_all()

    def _take(self, lease: Lease, may_wait: Callable[[], bool]) -> tuple[np.ndarray, np.ndarray]:
        """Finds or gives a frame for every slot, and takes the turn.

        Returns:
            The positions to read, and for each whether there is a record.
        """
        tier, table = self._tier, self._tier.table
        with tier.changed:
            self._writer.raise_failure()
            num_pinned = table.num_pinned
            missing = table.find(lease.slots, lease.frames)
            lease.num_found = len(lease.slots) - missing
            num_forwarded = lease.num_found - (table.num_pinned - num_pinned)
            try:
                self._wait_for_frames(missing, lease, may_wait)
            except BaseException:
                tier.freed(table.release(lease.frames[lease.frames != MISSING], False, tier.retain))
                raise
            self._is_taken = True
            taken = table.take(lease.slots, lease.frames).copy()
            self._num_leases += 1
            tier.counters.leases += 1
            tier.counters.rows_found += lease.num_found
            tier.counters.rows_forwarded += num_forwarded
            tier.counters.peak_frames = max(tier.counters.peak_frames, table.num_pinned)
            return taken, tier.written.contains(lease.slots[taken])

    def _wait_for_frames(self, missing: int, lease: Lease, may_wait: Callable[[], bool]) -> None:
        """Returns when so many frames can be taken, and the turn; the lock is held."""
        tier, table = self._tier, self._tier.table
        self._writer.demand(missing)
        began = time.monotonic()
        while (is_short := table.num_available < missing) or self._is_taken:
            self._writer.raise_failure()
            waited_s = time.monotonic() - began
            if is_short:
                needs_others = table.num_pinned + missing > self.num_frames
                is_hopeless = len(lease.slots) > self.num_frames or (needs_others and not may_wait())
                if is_hopeless or waited_s >= self._timeout_s:
                    raise NoRoomError(self._describe_shortage(missing, lease, waited_s))
            tier.changed.wait(min(_LOOK_S, self._timeout_s - waited_s) if is_short else None)
        tier.counters.waited_s += time.monotonic() - began

    def _describe_shortage(self, missing: int, lease: Lease, waited_s: float) -> str:
        pinned = self._tier.table.num_pinned
        return (
            f"group {self.group.name}: a batch of {len(lease.slots):,} rows needs {missing:,} more frames of the fast "
            f"arena, which has {self.num_frames:,}; {pinned:,} are held, by this batch and {self._num_leases} other(s) "
            f"in sight (waited {waited_s:.1f} s). Let {pinned + missing:,} rows or more fit (fast_rows or "
            "fast_share of Tiers, or of the section tiers), look ahead over fewer batches, or make batches smaller"
        )

    def _load(self, lease: Lease, taken: np.ndarray, is_written: np.ndarray) -> None:
        """Fills the frames of the positions that were taken."""
        frames, slots = lease.frames[taken], lease.slots[taken]
        began = time.monotonic()
        for part, columns, places in self._shuttle.fill(frames):
            self._fetch(columns, places, slots[part], is_written[part])
        if self._versions is not None:
            self._versions.check(frames, slots, f"what was read from {self.store}")
        read = int(is_written.sum())
        with self._tier.changed:
            counters = self._tier.counters
            counters.read_s += time.monotonic() - began
            counters.rows_read += read
            counters.bytes_read += read * self.store.stride
            counters.rows_initialized += len(taken) - read

    def _fetch(self, columns: Columns, places: np.ndarray, slots: np.ndarray, is_written: np.ndarray) -> None:
        """Writes rows that are not in the fast arena to places, from the store or as they were initially."""
        assert self._initial is not None, "initialize was not called"
        self._initial.fill(columns, places[~is_written], slots[~is_written])
        places, slots = places[is_written], slots[is_written]
        for first in range(0, len(slots), CHUNK):
            part = slice(first, first + CHUNK)
            records = self._shuttle.records[: len(slots[part])]
            self._tier.store.read(slots[part], records)
            columns.unpack(places[part], records)

    def _abandon(self, lease: Lease, taken: np.ndarray) -> None:
        """Undoes a lease whose rows could not be read."""
        tier, lease.is_live = self._tier, False
        with tier.changed:
            self._num_leases -= 1
            tier.freed(tier.table.release(np.delete(lease.frames, taken), False, tier.retain))
            tier.table.forget(lease.frames[taken])
            tier.freed(lease.frames[taken])

    def release(self, lease: Lease, changed: bool = True) -> None:
        """Ends a lease; rows that no other holds may leave the fast arena.

        Args:
            lease: of which nothing is used afterwards.
            changed: whether its rows were updated, all or some; they are written back behind the caller.

        Raises:
            RowmeshError: it was released before.
        """
        tier = self._tier
        with tier.changed:
            if not lease.is_live:
                raise RowmeshError(f"group {self.group.name}: a lease of {len(lease.slots)} rows is released twice")
            lease.is_live = False
            self._num_leases -= 1
            tier.freed(tier.table.release(lease.frames, changed, tier.retain))

    def check(self, lease: Lease) -> None:
        """Under `verify`: checks that the rows of a lease are what their last updates left; call it before their use.

        Raises:
            RowmeshError: one is not; names its table and row, and the versions.
        """
        if self._versions is not None:
            self._check(lease.frames, lease.slots)

    def _check(self, frames: np.ndarray, slots: np.ndarray) -> None:
        assert self._versions is not None
        lost = np.flatnonzero(self._tier.table.slots[frames] != slots)
        if len(lost):
            raise RowmeshError(f"{self._name(int(slots[lost[0]]))} is used, but its frame was given to another row")
        self._versions.check(frames, slots, "what the fast arena holds")

    def read_rows(self, slots: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of rows `[n, D]` and of their state, wherever they are, with every update so far.

        Args:
            slots: `[n]` integers.

        Raises:
            RowmeshError: they cannot be read; names the file.
        """
        slots = np.ascontiguousarray(slots, np.uint32)
        out = Columns.empty(self.group, len(slots), self._versions is not None)
        with self._turn():
            for first in range(0, len(slots), CHUNK):
                part = slots[first : first + CHUNK]
                self._read_part(out, np.arange(first, first + len(part), dtype=np.uint32), part)
        return out.rows, out.state

    def _read_part(self, out: Columns, places: np.ndarray, slots: np.ndarray) -> None:
        tier, frames = self._tier, np.empty(len(slots), np.uint32)
        with tier.changed:
            tier.table.look(slots, frames)
            is_fast = frames != MISSING
            self._shuttle.pack(frames[is_fast])
            is_written = tier.written.contains(slots[~is_fast])
        out.unpack(places[is_fast], self._shuttle.packed())
        self._fetch(out, places[~is_fast], slots[~is_fast], is_written)

    def write_rows(self, slots: np.ndarray, rows: Tensor, state: Mapping[str, Tensor]) -> None:
        """Sets rows and their state, wherever they are.

        Args:
            slots: `[n]` distinct integers.
            rows: `[n, D]` of the group's dtype.
            state: as in `state`, `[n, …]`.

        Raises:
            RowmeshError: they cannot be written; names the file.
        """
        slots = np.ascontiguousarray(slots, np.uint32)
        with self._turn():
            versions = None if self._versions is None else self._versions.overwrite(slots)
            ordered = {name: state[name].contiguous() for name in self.state}
            source = Columns(rows.contiguous(), ordered, versions)
            for first in range(0, len(slots), CHUNK):
                part = slots[first : first + CHUNK]
                self._write_part(source, np.arange(first, first + len(part), dtype=np.uint32), part)
            self._tier.fast.settle()  # whoever reads leased rows from now on finds what was set

    def _write_part(self, source: Columns, places: np.ndarray, slots: np.ndarray) -> None:
        tier, frames = self._tier, np.empty(len(slots), np.uint32)
        with tier.changed:
            tier.table.find(slots, frames)
            is_fast = frames != MISSING
            records = self._shuttle.records[: int(is_fast.sum())]
            source.pack(places[is_fast], records)
            for part, columns, own in self._shuttle.fill(frames[is_fast]):
                columns.unpack(own, records[part])
            tier.freed(tier.table.release(frames[is_fast], True, tier.retain))
        places, slots = places[~is_fast], slots[~is_fast]
        records = self._shuttle.records[: len(slots)]
        source.pack(places, records)
        tier.store.write(slots, records)
        with tier.changed:
            tier.written.add(slots)

    def flush(self) -> None:
        """Writes all changed rows of released leases; the store then has every row as its last update left it.

        Rows that were never changed have no record.

        Raises:
            RowmeshError: they cannot be written; names the file. Rows that were not written are still in fast memory,
                where `read_rows` finds them, and are tried again.
        """
        with self._turn():
            self._writer.flush()
            self.store.flush()

    def close(self) -> None:
        """Stops the thread and closes the store, without writing what is left; may be called again.

        Whoever waits for frames gets a RowmeshError.
        """
        self._writer.stop()
        with self._turn():
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _name(self, slot: int) -> str:
        assert self._initial is not None, "initialize was not called"
        return self._initial.name(slot)


def _close(writer: WriteBack, tier: Tier) -> None:
    writer.stop()
    try:
        tier.fast.settle()  # its memory is somebody else's soon
    finally:
        tier.store.close()
