"""EventClock: the time of steps by their data, from which a time to live in seconds follows."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from rowmesh.errors import DataError

NO_TIME = -(2**63)
"""Of a batch that has none."""


class Advanced(NamedTuple):
    """What a step changed of a clock.

    Attributes:
        now: as it was.
        is_later: whether the step got a time of its own.
        steps, times: that were forgotten.
    """

    now: int
    is_later: bool
    steps: list[int]
    times: list[int]


class EventClock:
    """Maps time to steps: a step is at the latest event so far, so it never runs backwards.

    Of an id it needs no more than the step in which it was last seen, as all ids of a step have one time. What is older
    than the time to live is forgotten.

    Args:
        ttl_seconds: time to live; 0: there is no clock.

    Example:
        >>> clock = EventClock(60)
        >>> for step, time in ((1, 1000), (2, 990), (3, 1060)):
        ...     past = clock.past(step, time)  # up to here steps are 60 seconds old, or more
        ...     clock.advance(step, time)
        >>> past, clock.now
        (2, 1060)
    """

    def __init__(self, ttl_seconds: int) -> None:
        self._ttl, self.now = ttl_seconds, NO_TIME
        self._steps: list[int] = []  # from which each of the times was that of steps
        self._times: list[int] = []

    def past(self, step: int, time: int) -> int:
        """The last step whose ids are past their time to live in a step at a time; changes nothing."""
        until = max(time, self.now) - self._ttl
        later = bisect_right(self._times, until)
        return self._steps[later] - 1 if later < len(self._steps) else step - 1

    def advance(self, step: int, time: int) -> Advanced:
        """A step was opened; `undo` takes back what is returned."""
        now, is_later = self.now, time > self.now
        if is_later:
            self.now = time
            self._steps.append(step)
            self._times.append(time)
        kept = bisect_right(self._times, self.now - self._ttl)
        advanced = Advanced(now, is_later, self._steps[:kept], self._times[:kept])
        del self._steps[:kept], self._times[:kept]
        return advanced

    def undo(self, advanced: Advanced) -> None:
        """The last step was not opened."""
        self._steps, self._times = advanced.steps + self._steps, advanced.times + self._times
        self.now = advanced.now
        if advanced.is_later:
            del self._steps[-1], self._times[-1]

    def check(self, table: str, time: int) -> None:
        """Raises DataError where a step needs a time and has none."""
        if self._ttl and time == NO_TIME:
            raise DataError(
                f"dynamic table {table!r} has ttl_seconds, and the batch has no time; give SparseBatch(…, time=…), "
                "that of its latest event in seconds, or name the column of times in the schema of raw data"
            )

    # What is saved

    def times_of(self, steps: np.ndarray) -> np.ndarray:
        """The times of steps that are not past their time to live: int64 like `steps`; none where there is no clock."""
        steps = steps if self._ttl else steps[:0]
        places = np.searchsorted(self._steps, steps, side="right") - 1
        return np.take(np.array(self._times, np.int64), places) if len(steps) else np.zeros(0, np.int64)

    def load(self, steps: np.ndarray, times: np.ndarray, step: int, now: int) -> None:
        """Adds what is known of more ids: the steps in which they were last seen, and the times of these.

        Without a time (`NO_TIME`) the clock begins anew.

        Args:
            steps, times: int64 `[n]`.
            step: the last one that was opened, whose ids may all be gone.
            now: its time.
        """
        if now == NO_TIME:
            self.now, self._steps, self._times = now, [], []
            return
        known = zip([*self._steps, *steps.tolist(), step], [*self._times, *times.tolist(), now], strict=True)
        self.now, self._steps, self._times = now, [], []
        for step, time in sorted(set(known)):
            if not self._times or time > self._times[-1]:
                self._steps.append(step)
                self._times.append(time)
