"""Which ids may be past their time to live: by step, the frames that were seen in it."""

from __future__ import annotations

from itertools import takewhile

import numpy as np

from rowmesh.ops.dynamic_index.cpu import SEEN
from rowmesh.tables.dynamic.event_clock import EventClock
from rowmesh.tables.dynamic.spec import Dynamic


class Expiry:
    """A log of seen frames; it is compacted to one entry a frame at most, so it is bounded.

    Args:
        rules: which say how long ids live.

    Attributes:
        clock: the time of steps.
        is_used: whether ids expire at all.
    """

    def __init__(self, rules: Dynamic) -> None:
        self._rules, self.clock, self.is_used = rules, EventClock(rules.ttl_seconds), rules.has_ttl
        self._seen: dict[int, np.ndarray] = {}
        self._size, self._is_stale = 0, False

    def past(self, step: int, time: int, clock: EventClock | None = None) -> int:
        """The last step whose ids are past their time to live in a step, −1 where none is; changes nothing.

        Args:
            step: in which.
            time: of its latest event.
            clock: by another one.
        """
        rules, past = self._rules, -1
        if rules.ttl_steps:
            past = max(past, step - rules.ttl_steps)
        if rules.ttl_seconds:
            past = max(past, (clock or self.clock).past(step, time))
        return past

    def due(self, past: int, records: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """Frames of ids that were not seen after a step, but for those that are seen now."""
        if not self.is_used:
            return np.empty(0, np.int64)
        if self._is_stale:
            self._rebuild(records)
        frames = [self._seen[s][records[self._seen[s], SEEN] == s + 1] for s in self._until(past)]
        due = np.concatenate([*frames, np.empty(0, np.int64)])
        return due[~np.isin(due, seen)] if len(due) else due

    def _until(self, past: int) -> list[int]:
        return list(takewhile(lambda step: step <= past, self._seen))

    def add(self, step: int, past: int, frames: np.ndarray, records: np.ndarray) -> None:
        """Forgets what was due, and notes what a step has seen."""
        if not self.is_used:
            return
        for due in self._until(past):
            self._size -= len(self._seen.pop(due))
        self._seen[step] = frames
        self._size += len(frames)
        if self._size > 2 * len(records) + 1024:
            self._seen = {s: f[records[f, SEEN] == s + 1] for s, f in self._seen.items()}
            self._size = sum(len(f) for f in self._seen.values())

    def begin_anew(self) -> None:
        """Records were replaced: the log is made of them when it is needed."""
        self._is_stale = True

    def _rebuild(self, records: np.ndarray) -> None:
        frames = np.flatnonzero(records[:, SEEN])
        steps = records[frames, SEEN] - 1
        self._seen = {int(s): frames[steps == s] for s in np.unique(steps)}
        self._size, self._is_stale = len(frames), False
