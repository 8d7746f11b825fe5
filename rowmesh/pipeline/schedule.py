"""Schedule: the stages of a batch, what each uses, and what it waits for; a value that is run, and played.

In turn t the micro-batches of batch t are computed. A stage that is *ahead* by a turns works for batch t + a then. Each
resource does the tasks of a turn in the order in which their stages are declared, and turn after turn: the same order
on all ranks, so that collectives cannot cross. The thread that drives the pipeline computes, steps the optimizer of the
rows, and averages and updates the dense network while the last gradients of rows travel. Before the step it may call
for the norm of the gradients of rows, which owners find once they have all of them; it alone waits for that.

    depth 0        read, copy, route and open a batch in its own turn; rows still come while other micro-batches are
                   computed
    depth K ≥ 1    read, copy and route batch t + K in turn t; open a batch, and pin its rows if they are tiered, half
                   as far ahead; fetch what is final of batch t + 1

A batch passes K + 1 turns, so that K + 1 stages of one length hide behind each other. They are opened half way: rows of
batch t + 1 come after what is opened in turn t, in one order on all ranks, and would wait for that to be read and
routed in the same turn. A batch that is opened takes memory of owners, and rows that are pinned take fast memory.

Source: NestPipe §IV-A (five stages) and §V-B (streams), EL-Rec §V (a queue of batches ahead). Differs: both are one
schedule, and rows that are final cross the step boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rowmesh.errors import ConfigurationError

COMPUTE = "compute"
"""The resource of the thread that drives the pipeline."""
SENDING = ("rows", "gradients", "communication")
"""Resources whose threads exchange messages with other ranks, or meet them at barriers."""
FINAL_BELOW = 4
"""Micro-batches from which on final rows do not come ahead: those that the first one needs are few by then, and ahead
they share the way with the averaging of the network's gradients."""
REUSED_AFTER = 2
"""Turns after its own in which the memory of a batch is used again, on a device."""
PREPARES = {"read": "reader", "copy": "copier", "route": "router"}
"""The resources of stages that prepare a batch on this rank alone, each with a thread of its own."""
PREPARING = "worker"
"""Their resource where they share a thread."""


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

    Attributes:
        stages: in the order in which a resource does them in a turn.
        num_parts: N, micro-batches.
        depth: K, batches that are read ahead.
        is_launched: whether tasks launch work on a device, so that the driver is turns ahead of what is done there.
        first: the first batch; there are none before.

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
    is_launched: bool = False
    first: int = 0

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
        """The tasks of a resource in a turn, in order."""
        for stage in self.stages:
            batch = turn + stage.ahead
            if stage.resource == resource and batch >= self.first:
                yield from self._of(stage, batch)

    def before(self, task: Task) -> Iterator[Task]:
        """The tasks that a task waits for, beside the tasks of its resource."""
        mine = self.stage(task.stage)
        for after in mine.after:
            other = self.stage(after.stage)
            if task.batch - after.back < self.first:
                continue
            if mine.by_part and other.by_part and not after.back:
                yield Task(other.name, task.batch, task.part)
            else:
                yield from self._of(other, task.batch - after.back)

    def _of(self, stage: Stage, batch: int) -> Iterator[Task]:
        for part in range(self.num_parts if stage.by_part else 1):
            yield Task(stage.name, batch, part)


def make_schedule(
    depth: int,
    num_parts: int,
    *,
    fetches_final: bool = True,
    is_tiered: bool = False,
    is_on_device: bool = False,
    opens_ahead: bool = True,
    copies: bool = False,
    joins: bool = False,
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
        opens_ahead: whether batches are opened before their turn. Not where their route waits for the step of the batch
            before: a program may call for the norm of that batch first, which one resource would do after opening.
        copies: whether the program copies a batch, to a device for example, before it is routed.
        joins: whether reading, copying and routing share a thread, which would only fight for a core if they had three.
    """
    of_memory = (After("update", depth + REUSED_AFTER),) if is_on_device else ()
    down, up = ("communication",) * 2 if is_on_device else ("rows", "gradients")
    reader, copier, router = (PREPARING if joins else resource for resource in PREPARES.values())
    kept = ("retrieve",) if is_tiered else ()
    here = tuple(After(name) for name in ("open", *kept))
    rows = Stage("rows", down, (*here, After("update", 1)), by_part=True)
    half = max(1, depth // 2) if depth and opens_ahead else 0
    opening = Stage("open", down, (After("route"), After("open", 1)), ahead=half)
    final = Stage("final", down, (*here, After("open", 1), After("update", 2)), ahead=1)
    if is_tiered and is_on_device:  # a batch may come to fast memory only after an update that is behind `final`
        fetches_final = False
    if half and fetches_final:
        of_rows = (rows, opening, final)
    else:
        of_rows = (rows, opening) if half else (opening, rows)
    stages = [
        Stage("read", reader, of_memory, ahead=depth),
        *[Stage("copy", copier, (After("read"),), ahead=depth)] * copies,
        Stage("route", router, (After("copy" if copies else "read"), *of_memory), ahead=depth),
        *of_rows,
        Stage("compute", COMPUTE, (After("rows"), After("step", 1)), by_part=True),
        Stage("call", COMPUTE, (After("compute"),)),
        Stage("step", COMPUTE, (After("call"),)),
        Stage("dense", COMPUTE, (After("compute"),)),
        Stage("gradients", up, (After("compute"),), by_part=True),
        Stage("norm", up, (After("gradients"), After("call"))),
        Stage("update", up, (After("gradients"), After("step"))),
    ]
    if is_tiered:
        stages.append(Stage("retrieve", "tier", (After("open"),), ahead=half))
    return Schedule(tuple(stages), num_parts, depth, is_launched=is_on_device)


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
