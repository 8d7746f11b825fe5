"""Recorder: when the tasks of a pipeline were done, and how long its driver waited."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rowmesh.pipeline.schedule import COMPUTE, Span, Task

KEPT = 20_000
"""Spans, the last ones."""
WAIT = "wait"


@dataclass
class Totals:
    """Seconds since the start, or since they were last taken.

    Attributes:
        exposed_s: the driver waited for rows.
        compute_s: from looking a micro-batch up to the next.
        dense_s: from the step of the rows' optimizer to the end of a batch: the dense network is averaged and updated.
        stages: by stage, how long its tasks took.
        cpu: of that, by stage, the processor time.
    """

    exposed_s: float = 0.0
    compute_s: float = 0.0
    dense_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)

    @property
    def exposed_share(self) -> float:
        """The share of the driver's time that it waited; 0 before it did anything."""
        return self.exposed_s / max(self.exposed_s + self.compute_s, 1e-9)


class Recorder:
    """Keeps spans. Each stage is added to by one thread.

    Attributes:
        totals: since they were last taken.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self._spans: deque[Span] = deque(maxlen=KEPT)

    def add(self, span: Span) -> None:
        """A task that was done."""
        totals, stage = self.totals, span.task.stage
        totals.stages[stage] = totals.stages.get(stage, 0.0) + span.end_s - span.start_s
        totals.cpu[stage] = totals.cpu.get(stage, 0.0) + span.cpu_s
        self._spans.append(span)

    def add_compute(self, task: Task, start_s: float, end_s: float) -> None:
        """A micro-batch that was computed."""
        self.totals.compute_s += end_s - start_s
        self._spans.append(Span(task, COMPUTE, start_s, end_s))

    def add_dense(self, task: Task, start_s: float, end_s: float) -> None:
        """What the driver did after the step of a batch."""
        self.totals.dense_s += end_s - start_s
        self._spans.append(Span(task, COMPUTE, start_s, end_s))

    def add_exposed(self, task: Task, start_s: float, end_s: float) -> None:
        """The driver waited before a task."""
        self.totals.exposed_s += end_s - start_s
        self._spans.append(Span(task._replace(stage=WAIT), COMPUTE, start_s, end_s))

    def take(self) -> Totals:
        """The totals, which begin anew."""
        taken, self.totals = self.totals, Totals()
        return taken

    def spans(self) -> list[Span]:
        """The last ones."""
        return list(self._spans)
