"""Where the time of steps goes, by the host's clock."""

from __future__ import annotations

import time
from collections.abc import Callable

STAGES = {
    "data": "waiting for a batch",
    "rows": "looking rows up, or waiting for them",
    "network": "forward and backward of the network",
    "update": "updating rows",
    "all_reduce": "averaging the network's gradients",
    "optimizer": "updating the network",
    "other": "checks, records, logs",
}
"""Stages of a step, in the order in which they come, and what they are."""


class StepClock:
    """Adds up the time of each stage; what a driver does one after the other.

    A lap costs a call of the clock, below a microsecond. Under a GPU these are the times of the host, which runs ahead
    and waits where it needs a result.

    Args:
        now_s: the clock; another one in tests.

    Example:
        >>> times = iter([0.0, 1.0, 2.0, 4.0])
        >>> clock = StepClock(lambda: next(times))
        >>> clock.begin()
        >>> clock.lap("rows")
        >>> clock.lap("network")
        >>> clock.take(6.0, steps=2)["step_ms/network"], clock.take(0.0, steps=1)["step_ms/network"]
        (1000.0, 0.0)
    """

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._seconds = dict.fromkeys(STAGES, 0.0)
        self._last_s = now_s()

    def begin(self) -> None:
        """Starts a lap; the time before it belongs to no stage."""
        self._last_s = self._now_s()

    def lap(self, stage: str) -> None:
        """Ends a lap that belongs to a stage, and starts the next."""
        now_s = self._now_s()
        self._seconds[stage] += now_s - self._last_s
        self._last_s = now_s

    def take(self, elapsed_s: float, *, steps: int) -> dict[str, float]:
        """Milliseconds a step since the last take, by stage; what no lap covers is `other`.

        Args:
            elapsed_s: the time of all steps.
            steps: how many there were.
        """
        seconds = self._seconds
        seconds["other"] += max(elapsed_s - sum(seconds.values()), 0.0)
        self._seconds = dict.fromkeys(STAGES, 0.0)
        return {f"step_ms/{stage}": 1e3 * value / max(steps, 1) for stage, value in seconds.items()}
