"""Playing: when the tasks of a schedule would be done, given how long each takes alone; a model of the runner.

The model knows what the runner does: each resource does its tasks in order, a task waits for those before it, and no
task of a turn begins before the driver enters the turn, which it does when its own tasks of the turn before are done.
On a device tasks are launched, by a driver that is turns ahead of what the device does.

It knows the cores, too. A task has the processor for a share of its time, and waits for messages, disks or a device in
the rest. Where tasks that run at once ask for more cores than there are, each gets the same part of what it asks for;
their waits take no longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rowmesh.errors import ConfigurationError
from rowmesh.pipeline.schedule import COMPUTE, Schedule, Span, Task

_EARLY = 1e-9  # relative: tasks that end so close to each other end together
_HALVINGS = 30  # of the interval in which the slowdown of busy tasks is looked for


class _Running(NamedTuple):
    """A task that has begun.

    Attributes:
        task: which.
        start_s: when it began.
        share: of its time alone, the processor's.
    """

    task: Task
    start_s: float
    share: float


def play(
    schedule: Schedule,
    seconds: Callable[[Task], float],
    num_turns: int,
    *,
    cores: float = math.inf,
    share: Callable[[Task], float] = lambda task: 1.0,
) -> list[Span]:
    """When tasks would be done if each took as long as given, in the order in which they begin.

    Args:
        schedule: what, in which order.
        seconds: how long a task takes alone.
        num_turns: in which batches are computed, of data that go on.
        cores: that the threads of the rank share.
        share: of a task's time alone, the processor's, 0 to 1.

    Raises:
        ConfigurationError: tasks wait for each other.

    Example:
        >>> from rowmesh.pipeline.schedule import make_schedule
        >>> spans = play(make_schedule(depth=0, num_parts=1), lambda task: 1.0, num_turns=2)
        >>> max(span.end_s for span in spans)  # 8 for the first batch, whose update is beside the dense network's
        16.0
    """
    return _Play(schedule, seconds, num_turns, cores, share).spans()


class _Play:
    """One play; arguments as for `play`."""

    def __init__(
        self,
        schedule: Schedule,
        seconds: Callable[[Task], float],
        num_turns: int,
        cores: float,
        share: Callable[[Task], float],
    ) -> None:
        self._schedule, self._seconds, self._cores, self._share = schedule, seconds, cores, share
        turns = range(-schedule.depth, num_turns)
        self._left = {
            resource: [(turn, task) for turn in turns for task in schedule.tasks(resource, turn)][::-1]
            for resource in schedule.resources
        }
        self._waits = {task: set(schedule.before(task)) for tasks in self._left.values() for _, task in tasks}
        self._running: dict[str, _Running] = {}
        self._rest_s: dict[str, float] = {}  # of what runs, as if alone
        self._done: set[Task] = set()
        self._now_s = 0.0

    def spans(self) -> list[Span]:
        """All tasks, in the order in which they begin."""
        spans: list[Span] = []
        while any(self._left.values()) or self._running:
            self._begin()
            if not self._running:
                stuck = [tasks[-1][1] for tasks in self._left.values() if tasks]
                raise ConfigurationError(f"the schedule waits for itself: {stuck}")
            spans += self._go_on()
        return sorted(spans, key=lambda span: span.start_s)

    def _begin(self) -> None:
        """Begins all tasks that can."""
        driven = None if self._schedule.is_launched else self._left.get(COMPUTE)
        entered = driven[-1][0] if driven else math.inf  # turns before that of the driver's next task are over
        if driven is not None and COMPUTE in self._running:
            entered = min(entered, self._running[COMPUTE].task.batch)
        for resource, tasks in self._left.items():
            if resource in self._running or not tasks:
                continue
            turn, task = tasks[-1]
            if turn <= entered and self._waits[task] <= self._done:
                tasks.pop()
                self._running[resource] = _Running(task, self._now_s, self._share(task))
                self._rest_s[resource] = self._seconds(task)

    def _go_on(self) -> Iterator[Span]:
        """Goes on until the next task ends; gives those that do."""
        slower = slowdown([each.share for each in self._running.values()], self._cores)
        lasts = {name: 1 + each.share * (slower - 1) for name, each in self._running.items()}  # times its time alone
        passed_s = min(self._rest_s[name] * lasts[name] for name in self._running)
        self._now_s += passed_s
        for name, (task, start_s, share) in list(self._running.items()):
            rest_s = self._rest_s[name] - passed_s / lasts[name]
            self._rest_s[name] = rest_s
            if rest_s <= _EARLY * passed_s:
                del self._running[name]
                self._done.add(task)
                yield Span(task, name, start_s, self._now_s, share * self._seconds(task))


def slowdown(shares: Sequence[float], cores: float) -> float:
    """How many times longer than alone tasks have the processor, where several run at once.

    Args:
        shares: of the time of each alone, the processor's, 0 to 1.
        cores: that they share.

    Example:
        >>> slowdown([1.0, 1.0], cores=2), round(slowdown([1.0, 1.0, 1.0], cores=2), 3)
        (1.0, 1.5)
        >>> round(slowdown([1.0, 0.5], cores=1), 3)  # the second takes .5 + .5 × 1.618 as long as alone
        1.618
    """
    if sum(shares) <= cores:
        return 1.0
    low, high = 1.0, len(shares) / cores
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        asked = sum(share / (1 + share * (middle - 1)) for share in shares)
        low, high = (middle, high) if asked > cores else (low, middle)
    return high


def step_s(spans: Sequence[Span]) -> float:
    """Seconds of a step in the second half of a played schedule, where it runs evenly."""
    ends = {span.task.batch: span.end_s for span in spans if span.task.stage == "dense"}
    last, first = len(ends) - 1, len(ends) // 2
    return (ends[last] - ends[first]) / max(last - first, 1)
