"""Device recorder: when a device did the tasks of a pipeline, by its own clock, known to the host some time later.

[Note: clocks]
A task on a device is between two marks with a time in its stream, which the device passes when it comes to them. The
host never waits for that: whenever a task is noted, or totals are taken, it looks which marks have passed.

*The device's seconds.* A device gives the time between two marks, not the time of one, and in 24 bits: over an hour to
0.2 ms. So a mark is timed from a recent mark whose time is known. The known mark is replaced once a second, by one that
passed at least a second later; the one before it precedes all work that is launched from then on, on any stream.

*The host's seconds.* Ranks, and what only hosts do, have no other clock in common. To read spans (`flush`) the host
waits for all that was noted, then records a mark on the idle device and reads its own clock; the two agree to within
the few µs that this takes. The shortest of several tries counts. That difference moves all spans since the last
reading. Two clocks may drift apart by some 10 µs a second: a trace is right to a few µs at its end, where it is
read, and to some 0.1 ms ten seconds before. Within a device spans are exact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rowmesh.ops.streams import Mark, Stream
from rowmesh.pipeline.recorder import KEPT, Recorder, Totals
from rowmesh.pipeline.schedule import Span, Task

_MOVES_ON_S = 1.0
_TRIES = 5


class _Known(NamedTuple):
    """A mark that has passed, and when: in the device's seconds."""

    mark: Mark
    time_s: float

    def time_of(self, later: Mark) -> float:
        return self.time_s + self.mark.seconds_until(later)


class _Noted(NamedTuple):
    """A task that may not be done yet, and the marks that give its time."""

    task: Task
    start: Mark
    end: Mark
    before: _Known

    @property
    def is_done(self) -> bool:  # the program may have changed its stream between the two
        return self.end.has_passed and self.start.has_passed


class DeviceRecorder(Recorder):
    """Keeps spans of a device; those that its host adds are by the host's clock. See [Note: clocks].

    Args:
        current: the stream that the calling thread computes on.

    Example:
        >>> import torch
        >>> recorder = DeviceRecorder(lambda: Stream.current(torch.device("cpu")))
        >>> start = recorder.now()
        >>> recorder.note(Task("rows", 3), "communication", start, recorder.now())
        >>> [(span.task.stage, 0 < span.end_s - span.start_s < 1) for span in recorder.spans()]
        [('rows', True)]
    """

    def __init__(self, current: Callable[[], Stream]) -> None:
        super().__init__()
        self._current = current
        self._under_way: dict[str, deque[_Noted]] = {}  # by resource: in each, tasks are done in order
        self._by_device: deque[Span] = deque(maxlen=KEPT)  # in the device's seconds
        first = self.now()
        first.wait()  # so that all timed work comes after it
        self._before = self._next = _Known(first, 0.0)

    def now(self) -> Mark:
        """Where the driver's stream is."""
        return self._current().mark(has_time=True)

    def note(self, task: Task, resource: str, start: Mark, end: Mark, cpu_s: float | None = 0.0) -> None:
        """Notes a task between two marks of a stream. The time its thread took to launch it is not counted."""
        with self._lock:
            noted = self._under_way.setdefault(resource, deque(maxlen=KEPT))
            self._look(resource)  # before one that is done is dropped for the new one
            noted.append(_Noted(task, start, end, self._before))

    def _look(self, resource: str) -> None:
        """Takes the spans of the tasks of a resource that are done by now."""
        noted = self._under_way[resource]
        while noted and noted[0].is_done:
            task, start, end, before = noted.popleft()
            end_s = before.time_of(end)
            span = Span(task, resource, end_s - start.seconds_until(end), end_s)
            self._count(span)
            self._by_device.append(span)
            if end_s > self._next.time_s + _MOVES_ON_S:
                self._before, self._next = self._next, _Known(end, end_s)

    def _look_at_all(self) -> None:
        for resource in self._under_way:
            self._look(resource)

    def take(self) -> Totals:
        """The totals of what is done by now."""
        with self._lock:
            self._look_at_all()
            return super().take()

    def flush(self) -> None:
        """Waits until all that was noted is done, and moves it to the host's clock."""
        with self._lock:
            last = [noted[-1].end for noted in self._under_way.values() if noted]
        for mark in last:  # without the lock: others may note more
            mark.wait()
        with self._lock:
            self._look_at_all()
            if not self._by_device:
                return
            ahead_s = self._host_ahead_s()
            for task, resource, start_s, end_s, _ in self._by_device:
                self._spans.append(Span(task, resource, start_s + ahead_s, end_s + ahead_s))
            self._by_device.clear()

    def _host_ahead_s(self) -> float:
        """The reading of the host's clock when the device's shows 0; the device has nothing else to do."""
        tries = []
        for _ in range(_TRIES):
            asked_s = time.perf_counter()
            mark = self.now()
            while not mark.has_passed:  # not `wait`, which sleeps, and wakes up late
                pass
            passed_s = time.perf_counter()
            tries.append((passed_s - asked_s, (asked_s + passed_s) / 2 - self._before.time_of(mark)))
        return min(tries)[1]
