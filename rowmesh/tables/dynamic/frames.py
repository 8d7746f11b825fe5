"""Which frames of a rank are free, taken by ids, or pinned by batches under way."""

from __future__ import annotations

import numpy as np

from rowmesh.errors import DataError, NoRoomError
from rowmesh.ops.dynamic_index import cpu

_FREE, _TAKEN, _PINNED = 0, 1, 2


class FrameList:
    """The frames of one table on one rank, for all its shards."""

    def __init__(self, table: str, num_frames: int) -> None:
        self._table = table
        self._state = np.zeros(num_frames, np.uint8)
        self._stack = np.empty(0, np.int64)  # free ones below `_unused`; the last is taken first
        self._unused = 0  # from here on all are free
        self._stale = False

    @property
    def num_used(self) -> int:
        """Frames from here on were never taken."""
        return self._unused

    @property
    def taken(self) -> np.ndarray:
        """The frames of ids, ascending."""
        return np.flatnonzero(self._state == _TAKEN)

    @property
    def num_free(self) -> int:
        """Frames that can be taken."""
        self._refresh()
        return len(self._stack) + len(self._state) - self._unused

    def check(self, count: int) -> None:
        """Raises where fewer frames are free."""
        free = self.num_free
        if count > free:
            pinned = int((self._state == _PINNED).sum())
            raise NoRoomError(
                f"dynamic table {self._table!r} needs {count} frames, and {free} of {len(self._state)} are free: "
                f"pins of batches under way hold {pinned}; give it more frames, or look fewer batches ahead"
            )

    def take(self, count: int) -> np.ndarray:
        """Takes free frames, which `check` found."""
        again = min(count, len(self._stack))
        fresh = np.arange(self._unused, self._unused + count - again)
        frames = np.concatenate([self._stack[len(self._stack) - again :], fresh])
        self._stack = self._stack[: len(self._stack) - again]
        self._unused += count - again
        self._state[frames] = _TAKEN
        return frames

    def pin(self, frames: np.ndarray) -> None:
        """Pins frames that no id has any more; they are free after `release`."""
        self._state[frames] = _PINNED

    def release(self, frames: np.ndarray) -> None:
        """Frees pinned frames."""
        self._refresh()
        if not cpu.exchange(self._state, frames, _PINNED, _FREE):
            raise DataError(f"frames to release of dynamic table {self._table!r} must be pinned ones, each once")
        self._stack = np.concatenate([self._stack, frames])

    def take_back(self, frames: np.ndarray) -> None:
        """Takes pinned frames again, for the ids that were in them."""
        assert (self._state[frames] == _PINNED).all()
        self._state[frames] = _TAKEN

    def exchange(self, old: np.ndarray, new: np.ndarray) -> None:
        """Frees a shard's frames, and takes given ones for it."""
        self._state[old] = _FREE
        if not cpu.exchange(self._state, new, _FREE, _TAKEN):
            self._state[old] = _TAKEN
            raise DataError(f"frames for a shard of dynamic table {self._table!r} must be free ones, each once")
        self._stale = True

    def _refresh(self) -> None:
        if self._stale:
            taken = np.flatnonzero(self._state)
            self._unused = int(taken[-1]) + 1 if len(taken) else 0
            self._stack = np.flatnonzero(self._state[: self._unused] == _FREE)[::-1].copy()
            self._stale = False
