"""Which ids may be past their time to live: by step, the frames that were seen in it."""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from rowmesh.ops.dynamic_index.cpu import SEEN


class Expiry:
    """A log of seen frames; it is compacted to one entry a frame at most, so it is bounded."""

    def __init__(self) -> None:
        self._seen: dict[int, np.ndarray] = {}
        self._size = 0

    def due(self, past: int, records: np.ndarray) -> np.ndarray:
        """Frames of ids that were not seen after a step."""
        frames = [self._seen[s][records[self._seen[s], SEEN] == s + 1] for s in self._until(past)]
        return np.concatenate([*frames, np.empty(0, np.int64)])

    def _until(self, past: int) -> list[int]:
        return list(takewhile(lambda step: step <= past, self._seen))

    def add(self, step: int, past: int, frames: np.ndarray, records: np.ndarray) -> None:
        """Forgets what was due, and notes what a step has seen."""
        for due in self._until(past):
            self._size -= len(self._seen.pop(due))
        self._seen[step] = frames
        self._size += len(frames)
        if self._size > 2 * len(records) + 1024:
            self._seen = {s: f[records[f, SEEN] == s + 1] for s, f in self._seen.items()}
            self._size = sum(len(f) for f in self._seen.values())

    def rebuild(self, records: np.ndarray) -> None:
        """Begins anew from the records, after some were loaded."""
        frames = np.flatnonzero(records[:, SEEN])
        steps = records[frames, SEEN] - 1
        self._seen = {int(s): frames[steps == s] for s in np.unique(steps)}
        self._size = len(frames)
