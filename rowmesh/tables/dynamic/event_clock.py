"""EventClock: the time of steps by their data, from which a time to live in seconds follows."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from rowmesh.errors import DataError

NO_TIME = -(2**63)
"""The time of a batch that has none."""


class Advanced(NamedTuple):
    """The changes of a step to a clock.

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

    For an id it needs no more than the step in which the id was last seen, as all ids of a step have one time. It
    forgets steps past the time to live.

    Args:
        ttl_seconds: time to live; 0: there is no clock.

    Example:
        >>> clock = EventClock(60)
        >>> for step, time in ((1, 1000), (2, 990), (3, 1060)):
        ...     past = clock.past(step, time)  # up to here steps are 60 seconds old, or more
        ...     _ = clock.advance(step, time)
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
        return Advanced(now, is_later, *self._forget())

    def _forget(self) -> tuple[list[int], list[int]]:
        """Drops steps past their time to live; they and their times are returned."""
        kept = bisect_right(self._times, self.now - self._ttl)
        forgotten = self._steps[:kept], self._times[:kept]
        del self._steps[:kept], self._times[:kept]
        return forgotten

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

    # Saving and loading

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
        self._set(list(known))

    def _set(self, known: list[tuple[int, int]]) -> None:
        """A step is at the latest of the times of all steps up to it."""
        self.now, self._steps, self._times = NO_TIME, [], []
        for step, time in sorted(known):
            if time > self.now:
                if self._steps and self._steps[-1] == step:
                    del self._steps[-1], self._times[-1]
                self.now = time
                self._steps.append(step)
                self._times.append(time)

    # Clocks of several replica groups, see `rowmesh.exchange.resolve.merging`

    def since(self, step: int) -> np.ndarray:
        """Later steps at which the time has changed, and to what: int64 `[n, 2]`."""
        first = bisect_right(self._steps, step)
        return np.stack([np.array(each[first:], np.int64) for each in (self._steps, self._times)], axis=1)

    def joined(self, since: np.ndarray) -> EventClock:
        """The clock by which each step is at the latest event of several clocks, which were one up to some step.

        So steps are as a clock has them that was told of all events in time.

        Args:
            since: int64 `[n, 2]`, what the method of this name gives of the others.

        Example:
            >>> first, second = EventClock(60), EventClock(60)
            >>> for step, time, other in ((1, 1000, 990), (2, 1010, 1030)):
            ...     _ = first.advance(step, time)
            ...     _ = second.advance(step, other)
            >>> first.joined(second.since(0)).times_of(np.array([1, 2]))
            array([1000, 1030])
        """
        clock = EventClock(self._ttl)
        known = [*zip(self._steps, self._times, strict=True), *map(tuple, since.tolist())]
        clock._set(known)
        clock._forget()
        return clock
