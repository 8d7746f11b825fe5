"""Recorder: when the tasks of a pipeline were done, and how long its driver waited."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from rowmesh.ops.streams import Mark
from rowmesh.pipeline.schedule import COMPUTE, Span, Task

KEPT = 20_000
"""Spans, the last ones."""
WAIT = "wait"


@dataclass
class Totals:
    """Seconds since the start, or since they were last taken.

    Attributes:
        stages: by stage, how long its tasks took; "compute" from looking a micro-batch up to the next, "dense" from the
            step of the rows' optimizer to the end of a batch, "wait" what the driver waited for rows.
        cpu: of that, by stage, the processor time.
    """

    stages: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def exposed_share(self) -> float:
        """The share of the driver's time that it waited; 0 before it did anything."""
        waited_s, computed_s = (self.stages.get(name, 0.0) for name in (WAIT, COMPUTE))
        return waited_s / max(waited_s + computed_s, 1e-9)


class Recorder:
    """Keeps spans, by the host's clock. Any thread may add to it.

    Example:
        >>> recorder = Recorder()
        >>> recorder.note(Task("compute", 0), COMPUTE, Mark(time_s=1.0), Mark(time_s=4.0))
        >>> recorder.note(Task("wait", 1), COMPUTE, Mark(time_s=4.0), Mark(time_s=5.0))
        >>> recorder.take().exposed_share
        0.25
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._totals = Totals()
        self._spans: deque[Span] = deque(maxlen=KEPT)

    def now(self) -> Mark:
        """Where the driver is."""
        return Mark(time_s=time.perf_counter())

    def note(self, task: Task, resource: str, start: Mark, end: Mark, cpu_s: float | None = 0.0) -> None:
        """A task that was done between two marks; `cpu_s` None: with a processor all the time."""
        seconds = start.seconds_until(end)
        self.add(Span(task, resource, start.time_s, end.time_s, seconds if cpu_s is None else cpu_s))

    def add(self, span: Span) -> None:
        """A task that was done, by the host's clock."""
        with self._lock:
            self._count(span)
            self._spans.append(span)

    def _count(self, span: Span) -> None:
        totals, stage = self._totals, span.task.stage
        totals.stages[stage] = totals.stages.get(stage, 0.0) + span.end_s - span.start_s
        totals.cpu[stage] = totals.cpu.get(stage, 0.0) + span.cpu_s

    def flush(self) -> None:
        """Waits until all that was noted is known."""

    def take(self) -> Totals:
        """The totals of what is known, which begin anew."""
        with self._lock:
            taken, self._totals = self._totals, Totals()
            return taken

    def spans(self) -> list[Span]:
        """The last ones, of all that was noted; waits until they are known."""
        self.flush()
        with self._lock:
            return list(self._spans)
