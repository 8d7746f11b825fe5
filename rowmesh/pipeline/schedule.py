"""Schedule: the stages of a batch, what each uses, and what it waits for; a value that is run, and played.

In turn t the micro-batches of batch t are computed. A stage that is *ahead* by a turns works for batch t + a then. Each
resource does the tasks of a turn in the order in which their stages are declared, and turn after turn: the same order
on all ranks, so that collectives cannot cross. The thread that drives the pipeline computes, steps the optimizer of the
rows, and averages and updates the dense network while the last gradients of rows travel.

    depth 0        read, route and open a batch in its own turn; rows still come while other micro-batches are computed
    depth K ≥ 1    read, route and open batch t + K in turn t; fetch what is final of batch t + 1

Source: NestPipe §IV-A (five stages) and §V-B (streams), EL-Rec §V (a queue of batches ahead). Differs: both are one
schedule, and rows that are final cross the step boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rowmesh.errors import ConfigurationError

COMPUTE = "compute"
"""The resource of the thread that drives the pipeline."""
SENDING = ("rows", "gradients", "communication")
"""Resources whose threads exchange messages with other ranks, or meet them at barriers."""
REUSED_AFTER = 2
"""Turns after its own in which the memory of a batch is used again, on a device."""


class After(NamedTuple):
    """The stage that another stage waits for, of the same batch or of the batch `back` batches before it.

    Within a batch, a micro-batch waits for the same micro-batch of a stage that has micro-batches. Otherwise a stage
    waits for all tasks of the other.
    """

    stage: str
    back: int = 0


class Task(NamedTuple):
    """A stage of one batch or micro-batch; `part` is 0 where the stage is of the batch."""

    stage: str
    batch: int
    part: int = 0


@dataclass(frozen=True)
class Stage:
    """A kind of task.

    Attributes:
        name: of the stage.
        resource: what it uses; tasks of one resource are done one after the other.
        after: what it waits for.
        ahead: turns before the batch is computed.
        by_part: whether each micro-batch has its own.
    """

    name: str
    resource: str
    after: tuple[After, ...] = ()
    ahead: int = 0
    by_part: bool = False


@dataclass(frozen=True)
class Schedule:
    """Stages, and the number of micro-batches.

    Raises:
        ConfigurationError: a stage waits for one that is not declared.

    Example:
        >>> schedule = make_schedule(depth=1, num_parts=2)
        >>> [(task.stage, task.batch) for task in schedule.tasks("rows", turn=0)]
        [('rows', 0), ('rows', 0), ('open', 1), ('final', 1)]
    """

    stages: tuple[Stage, ...]
    num_parts: int
    depth: int

    def __post_init__(self) -> None:
        names = {stage.name for stage in self.stages}
        if missing := [after.stage for stage in self.stages for after in stage.after if after.stage not in names]:
            raise ConfigurationError(f"stages wait for {missing}, which are not among {sorted(names)}")

    @property
    def resources(self) -> tuple[str, ...]:
        """All, in the order of their first stage."""
        return tuple(dict.fromkeys(stage.resource for stage in self.stages))

    def stage(self, name: str) -> Stage:
        """A stage by its name."""
        return next(stage for stage in self.stages if stage.name == name)

    def tasks(self, resource: str, turn: int) -> Iterator[Task]:
        """The tasks of a resource in a turn, in order; batches below 0 do not exist."""
        for stage in self.stages:
            batch = turn + stage.ahead
            if stage.resource == resource and batch >= 0:
                yield from self._of(stage, batch)

    def before(self, task: Task) -> Iterator[Task]:
        """The tasks that a task waits for, beside the tasks of its resource."""
        mine = self.stage(task.stage)
        for after in mine.after:
            other = self.stage(after.stage)
            if task.batch < after.back:
                continue
            if mine.by_part and other.by_part and not after.back:
                yield Task(other.name, task.batch, task.part)
            else:
                yield from self._of(other, task.batch - after.back)

    def _of(self, stage: Stage, batch: int) -> Iterator[Task]:
        for part in range(self.num_parts if stage.by_part else 1):
            yield Task(stage.name, batch, part)


def make_schedule(
    depth: int, num_parts: int, *, fetches_final: bool = True, is_tiered: bool = False, is_on_device: bool = False
) -> Schedule:
    """The stages of training.

    Args:
        depth: K, batches that are read ahead.
        num_parts: N, micro-batches.
        fetches_final: whether rows are fetched across the step boundary (depth 1 or more); never where
            tiered rows are on a device.
        is_tiered: whether rows are prefetched into a fast tier.
        is_on_device: whether tasks launch their work on a device. Then all messages are of one resource, in one order
            on all ranks, and a batch reuses the memory of an earlier one; see [Note: streams] in
            `rowmesh.pipeline.streams`.
    """
    of_memory = (After("update", depth + REUSED_AFTER),) if is_on_device else ()
    down, up = ("communication",) * 2 if is_on_device else ("rows", "gradients")
    kept = ("retrieve",) if is_tiered else ()
    here = tuple(After(name) for name in ("open", *kept))
    rows = Stage("rows", down, (*here, After("update", 1)), by_part=True)
    opening = Stage("open", down, (After("route"), After("open", 1)), ahead=depth)
    final = Stage("final", down, (*here, After("open", 1), After("update", 2)), ahead=1)
    if is_tiered and is_on_device:  # a batch may come to fast memory only after an update that is behind `final`
        fetches_final = False
    if depth and fetches_final:
        of_rows = (rows, opening, final)
    else:
        of_rows = (rows, opening) if depth else (opening, rows)
    stages = [
        Stage("read", "worker", ahead=depth),
        Stage("route", "worker", (After("read"), *of_memory), ahead=depth),
        *of_rows,
        Stage("compute", COMPUTE, (After("rows"), After("step", 1)), by_part=True),
        Stage("step", COMPUTE, (After("compute"),)),
        Stage("dense", COMPUTE, (After("compute"),)),
        Stage("gradients", up, (After("compute"),), by_part=True),
        Stage("update", up, (After("gradients"), After("step"))),
    ]
    if is_tiered:
        stages += [
            Stage("retrieve", "tier", (After("open"),), ahead=depth),
        ]
    return Schedule(tuple(stages), num_parts, depth)


class Span(NamedTuple):
    """When a task was done, in seconds.

    Attributes:
        cpu_s: of them, the processor time of its thread.
    """

    task: Task
    resource: str
    start_s: float
    end_s: float
    cpu_s: float = 0.0


def play(schedule: Schedule, seconds: Callable[[Task], float], num_batches: int) -> list[Span]:
    """When tasks would be done if each took as long as given, in the order in which they begin.

    Example:
        >>> spans = play(make_schedule(depth=0, num_parts=1), lambda task: 1.0, num_batches=2)
        >>> max(span.end_s for span in spans)  # 7 for the first batch; rows of the second wait for its update
        11.0
    """
    turns = range(-schedule.depth, num_batches)
    queues = {
        resource: [task for turn in turns for task in schedule.tasks(resource, turn) if task.batch < num_batches]
        for resource in schedule.resources
    }
    ends: dict[Task, float] = {}
    free, spans = dict.fromkeys(queues, 0.0), []
    while any(queues.values()):
        before = len(spans)
        for resource, queue in queues.items():
            while queue and all(task in ends for task in schedule.before(queue[0])):
                task = queue.pop(0)
                start = max([free[resource], *(ends[each] for each in schedule.before(task))])
                ends[task] = free[resource] = start + seconds(task)
                spans.append(Span(task, resource, start, ends[task]))
        if len(spans) == before:
            stuck = [queue[0] for queue in queues.values() if queue]
            raise ConfigurationError(f"the schedule waits for itself: {stuck}")
    return sorted(spans, key=lambda span: span.start_s)


def step_s(spans: Sequence[Span], num_batches: int) -> float:
    """Seconds of a step in the second half of a played schedule, where it runs evenly."""
    ends = {span.task.batch: span.end_s for span in spans if span.task.stage == "dense"}
    first = num_batches // 2
    return (ends[num_batches - 1] - ends[first]) / max(num_batches - 1 - first, 1)
