"""What the threads of leased rows share: the fast memory, its books, the backing store, and one lock."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from rowmesh.errors import ConfigurationError
from rowmesh.ops.frames import FrameTable
from rowmesh.ops.frames.cpu import MAX_FRAMES
from rowmesh.ops.slot_set import SlotSet
from rowmesh.tables.backing import MakeStore
from rowmesh.tables.fast_rows import MakeFast, Shuttle
from rowmesh.tables.group import TableGroup


@dataclass
class TierCounters:
    """What was done with leased rows so far.

    Attributes:
        leases: made.
        rows_found: of leases, rows that were in the fast arena.
        rows_forwarded: of these, rows that other batches in sight held; the others were retained.
        rows_read, bytes_read: from the backing store.
        rows_initialized: of leases, rows that were never written, computed instead of read.
        rows_written, bytes_written: to the backing store.
        peak_frames: the most frames that batches in sight held at once.
        waited_s: how long leases waited for frames to become free.
        read_s: how long leases read.
    """

    leases: int = 0
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


class Tier:
    """See the module; arguments are those of `LeasedRows`.

    Attributes:
        changed: the lock over `table`, `written` and `counters`, notified whenever frames change hands.
        table: which slot is in which frame.
        fast: the fast memory.
        store: the backing store.
        written: slots that the store has a record of.
        poison, retain: see `LeasedRows`.
    """

    def __init__(
        self, group: TableGroup, num_slots: int, num_frames: int, make_store: MakeStore,
        make_fast: MakeFast, retain: bool, verify: bool, poison: bool,
    ) -> None:  # fmt: skip
        if not 1 <= num_frames <= MAX_FRAMES:
            raise ConfigurationError(f"group {group.name}: num_frames must be 1 to {MAX_FRAMES}, got {num_frames}")
        self.group, self.num_slots = group, num_slots
        self.retain, self.poison = retain and not poison, poison
        self.changed = threading.Condition()
        self.table = FrameTable(num_frames)
        self.fast = make_fast(group, num_frames, verify)
        self.store = make_store(num_slots, self.fast.record_bytes)
        self.written = SlotSet(num_slots)
        self.counters = TierCounters()

    def make_shuttle(self, num_parts: int) -> Shuttle:
        """Carries rows between the fast memory and the store, so many parts at once."""
        return self.fast.make_shuttle(self.store.stride, num_parts)

    def freed(self, frames: np.ndarray) -> None:
        """Frames were given up; the lock is held."""
        if self.poison:
            self.fast.poison(frames)
        self.changed.notify_all()
