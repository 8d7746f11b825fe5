"""Recorder: when tasks of a pipeline were done, and how long its driver waited."""

from __future__ import annotations

from dataclasses import dataclass, field

from rowmesh.pipeline.schedule import COMPUTE, Span, Task

KEPT = 20_000  # spans, the last ones


@dataclass
class Totals:
    """Seconds since the start, or since they were last taken.

    Attributes:
        exposed_s: the driver waited for rows.
        compute_s: from looking a micro-batch up to the next.
        stages: by stage, how long its tasks took.
    """

    exposed_s: float = 0.0
    compute_s: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def exposed_share(self) -> float:
        """The share of the driver's time that it waited."""
        total = self.exposed_s + self.compute_s
        return self.exposed_s / total if total else 0.0


class Recorder:
    """Keeps spans.

    Args:
        rank: of this process.

    Attributes:
        totals: since they were last taken.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.totals = Totals()
        self._spans: list[Span] = []

    def add(self, span: Span) -> None:
        """A task that another thread did."""
        stages = self.totals.stages
        stages[span.task.stage] = stages.get(span.task.stage, 0.0) + span.end_s - span.start_s
        self._keep(span)

    def add_compute(self, task: Task, start_s: float, end_s: float) -> None:
        """A micro-batch that was computed."""
        self.totals.compute_s += end_s - start_s
        self._keep(Span(task, COMPUTE, start_s, end_s))

    def add_exposed(self, task: Task, start_s: float, end_s: float) -> None:
        """The driver waited before a task."""
        self.totals.exposed_s += end_s - start_s
        self._keep(Span(task._replace(stage="wait"), COMPUTE, start_s, end_s))

    def take(self) -> Totals:
        """The totals, which begin anew."""
        taken, self.totals = self.totals, Totals()
        return taken

    def spans(self) -> list[Span]:
        """The last ones."""
        return list(self._spans)

    def _keep(self, span: Span) -> None:
        self._spans.append(span)
        if len(self._spans) > 2 * KEPT:
            del self._spans[:KEPT]
