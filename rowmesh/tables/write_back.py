"""WriteBack: the thread that takes changed rows from fast memory to the backing store."""

from __future__ import annotations

import threading

import numpy as np

from rowmesh.errors import RowmeshError
from rowmesh.tables.fast_rows import CHUNK
from rowmesh.tables.tier import Tier

_CLEAN_SHARE = 4  # one frame of so many is kept free or clean, ahead of the leases that will take them


class WriteBack:
    """Writes rows that no lease holds, those first that were used longest ago, before their frames are needed.

    A row begins to be copied under the lock, so that the copy has all that was updated before and nothing later, and is
    written without it. Meanwhile a lease may find it in its frame and change it again, which makes it dirty again.
    There is one such thread, so that two writes of a row keep their order.

    Args:
        tier: what to write.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._frames = np.empty(CHUNK, np.uint32)
        self._shuttle = tier.make_shuttle(1)
        self._demand = 0  # the most frames that a lease needed at once
        self._flushing = self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rowmesh-write-back", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers."""
        return self._frames.nbytes + self._shuttle.num_bytes

    def demand(self, num_frames: int) -> None:
        """A lease needs so many frames; the lock is held."""
        self._demand = max(self._demand, num_frames)
        self._tier.changed.notify_all()

    def raise_failure(self) -> None:
        """Raises what went wrong since the last call; the lock is held. The rows in question are tried again."""
        if self._stopping:
            raise RowmeshError(f"group {self._tier.group.name}: the arena is closed")
        failure, self._failure = self._failure, None
        if failure is not None:
            self._tier.changed.notify_all()
            raise RowmeshError(f"group {self._tier.group.name}: writing rows back failed: {failure}") from failure

    def flush(self) -> None:
        """Writes all dirty rows, those of leases too; returns when they are written."""
        tier = self._tier
        with tier.changed:
            self.raise_failure()
            self._flushing = True
            tier.changed.notify_all()
            tier.changed.wait_for(lambda: not self._flushing or self._failure or self._stopping)
            self._flushing = False
            self.raise_failure()

    def stop(self) -> None:
        """Ends the thread, which finishes the rows it is writing; others are not written. May be called again."""
        with self._tier.changed:
            self._stopping = True
            self._tier.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        tier = self._tier
        while True:
            with tier.changed:
                tier.changed.wait_for(self._has_work)
                if self._stopping:
                    return
                count = tier.table.oldest_dirty(self._frames, self._flushing)
                if count == 0:
                    self._flushing = False
                    tier.changed.notify_all()
                    continue
                frames = self._frames[:count]
                slots = tier.table.slots[frames]
                self._shuttle.pack(frames)
            self._write(frames, slots)

    def _has_work(self) -> bool:
        if self._stopping:
            return True
        if self._failure is not None:  # until somebody has heard of it
            return False
        return self._flushing or (self._tier.table.num_dirty > 0 and self._is_short)

    @property
    def _is_short(self) -> bool:
        table = self._tier.table
        goal = max(table.num_frames // _CLEAN_SHARE, self._demand)
        return not self._tier.retain or table.num_available < goal

    def _write(self, frames: np.ndarray, slots: np.ndarray) -> None:
        tier, failure = self._tier, None
        try:
            tier.store.write(slots, self._shuttle.packed())
        except BaseException as error:
            failure = error
        with tier.changed:
            if failure is None:
                tier.written.add(slots)
                tier.counters.rows_written += len(slots)
                tier.counters.bytes_written += len(slots) * tier.store.stride
            self._failure = failure
            tier.freed(tier.table.written(frames, failure is None, tier.retain))
