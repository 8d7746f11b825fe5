"""Which ids may be past their time to live: by step, the frames that were seen in it."""

from __future__ import annotations

import numpy as np

from rowmesh.ops.dynamic_index.cpu import SEEN


class Expiry:
    """A log of seen frames; it is compacted to one entry a frame at most, so it is bounded."""

    def __init__(self, ttl_steps: int) -> None:
        self._ttl_steps = ttl_steps
        self._seen: dict[int, np.ndarray] = {}
        self._size = 0

    def due(self, step: int, records: np.ndarray) -> np.ndarray:
        """Frames of ids that were not seen for the time to live before a step."""
        past = [s for s in self._seen if step - s >= self._ttl_steps]
        frames = [self._seen[s][records[self._seen[s], SEEN] == s + 1] for s in past]
        return np.concatenate([*frames, np.empty(0, np.int64)])

    def add(self, step: int, frames: np.ndarray, records: np.ndarray) -> None:
        """Forgets what was due, and notes what a step has seen."""
        for past in [s for s in self._seen if step - s >= self._ttl_steps]:
            self._size -= len(self._seen.pop(past))
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
