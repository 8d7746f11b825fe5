"""Exposure: how long the stream that computes on a device waited for rows, by the device's own clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rowmesh.tables.streams import Mark

KEPT = 10_000
"""Micro-batches that nobody asked about, the last ones."""


class Exposure:
    """Marks before and after every wait for rows, and after what is then computed.

    The stream comes to the first mark when it has nothing else to do, and to the second one when rows are there. Where
    the host is late with asking, nothing is exposed: the first mark is late, too.

    Args:
        now: a mark with a time in the stream that computes, which is the current one.
    """

    def __init__(self, now: Callable[[], Mark]) -> None:
        self._now = now
        self._begun: tuple[Mark, Mark] | None = None
        self._parts: deque[tuple[Mark, Mark, Mark]] = deque(maxlen=KEPT)

    def begin(self, wait: Callable[[], None]) -> None:
        """A micro-batch is about to be computed, once the stream has waited."""
        before = self._now()
        wait()
        self._begun = before, self._now()

    def end(self) -> None:
        """It was asked for."""
        assert self._begun is not None
        self._parts.append((*self._begun, self._now()))

    def take_share(self) -> float:
        """The share of its time that the stream waited, over the micro-batches that are done since this was asked last;
        0 where there is none.
        """
        waited_s = total_s = 0.0
        while self._parts and self._parts[0][2].has_passed:
            before, after, done = self._parts.popleft()
            waited_s += before.seconds_until(after)
            total_s += before.seconds_until(done)
        return waited_s / max(total_s, 1e-9)
