"""Auto: the depth, the micro-batches and the threads with which a step should take least, from measured stages.

The schedule is played with durations that a model derives from those of steps done in turn:

    compute     of a micro-batch: its share of the samples, and COST_S for being one more
    dense       as measured: the network is averaged and updated beside the last gradients of rows
    rows        its share of the batch's distinct rows, by Heaps' law; where final rows come ahead, FINAL_SHARE of them
                come before
    gradients   the same, from the end
    all others  as measured

Threads share the cores of a rank: a stage asks for the share of its time in which it had the processor. A choice has to
gain LEAST_GAIN; the simplest of those that gain about as much is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from rowmesh.pipeline.cutter import Sizes, sizes_of
from rowmesh.pipeline.playing import play, step_s
from rowmesh.pipeline.schedule import FINAL_BELOW, Schedule, Task, make_schedule
from rowmesh.pipeline.sizes import WindowWork, new_rows

DEPTHS, COUNTS = (0, 1, 2, 3, 4), (1, 2, 4, 8)
LEAST_GAIN = 0.03
COST_S = 3e-4  # of one more micro-batch: small kernels, Python, autograd
FINAL_SHARE = 0.65  # of a batch's rows, the one before does not touch: Criteo, Avazu and Zipf ids alike
ROWS_EXPONENT = 0.77
_NUM_TURNS = 12


@dataclass(frozen=True)
class Choice:
    """A choice of depth, micro-batches and threads.

    Attributes:
        depth: K.
        micro_batches: N.
        joins: whether reading, copying and routing share a thread.
        step_s: expected time of a step.
        in_turn_s: time of a step when all is done in turn.
    """

    depth: int
    micro_batches: int
    joins: bool
    step_s: float
    in_turn_s: float

    @property
    def is_off(self) -> bool:
        """Whether all is best done in turn."""
        return self.depth == 0 and self.micro_batches == 1

    def __str__(self) -> str:
        if self.is_off:
            return f"off: nothing would gain {LEAST_GAIN:.0%} on {1e3 * self.in_turn_s:.1f} ms a step"
        return (
            f"depth {self.depth}, {self.micro_batches} micro-batch(es): {1e3 * self.step_s:.1f} ms a step expected, "
            f"{1e3 * self.in_turn_s:.1f} in turn"
        )


def work_of(stages: Mapping[str, float]) -> WindowWork:
    """Sizes of a window, from the seconds of each stage of a step without overlap."""
    compute, rows, gradients = (1e3 * stages.get(name, 0.0) for name in ("compute", "rows", "gradients"))
    return WindowWork(compute_ms=compute, fetch_ms=rows, push_ms=gradients)


def choose(
    stages: Mapping[str, float],
    cpu: Mapping[str, float],
    *,
    cores: float,
    can_split: bool,
    sizes: Sizes = "even",
    depths: tuple[int, ...] = DEPTHS,
    counts: tuple[int, ...] = COUNTS,
    schedule: Callable[..., Schedule] = make_schedule,
) -> Choice:
    """The best depth and number of micro-batches.

    Args:
        stages: seconds of each stage of a step that was done in turn, "compute" among them.
        cpu: of that, processor time; of a device none, whose host may spin while it waits.
        cores: of this rank.
        can_split: whether rows can travel by micro-batch.
        sizes: of micro-batches.
        depths: to choose from, the simplest first.
        counts: to choose from, the simplest first.
        schedule: makes that of a choice, from depth, number of micro-batches, `fetches_final` and `joins`.

    Example:
        >>> stages = {"route": 0.01, "compute": 0.06, "rows": 0.02, "gradients": 0.02}
        >>> choice = choose(stages, {}, cores=2, can_split=True)
        >>> choice.depth, choice.step_s < 0.08
        (1, True)
    """
    in_turn = sum(stages.values())
    candidates = [
        Choice(
            depth,
            count,
            joins,
            predicted_s(
                stages,
                cpu,
                depth,
                count,
                cores=cores,
                can_split=can_split,
                sizes=sizes,
                schedule=partial(schedule, joins=joins),
            ),
            in_turn,
        )
        for depth in depths
        for joins in ((True, False) if depth else (True,))
        for count in (counts if can_split else counts[:1])
    ]
    best = min(candidates, key=lambda choice: choice.step_s)
    if best.step_s > (1 - LEAST_GAIN) * in_turn:
        return candidates[0]
    return next(choice for choice in candidates if choice.step_s <= (1 + LEAST_GAIN) * best.step_s)


def predicted_s(
    stages: Mapping[str, float],
    cpu: Mapping[str, float],
    depth: int,
    count: int,
    *,
    cores: float,
    can_split: bool,
    sizes: Sizes = "even",
    schedule: Callable[..., Schedule] = make_schedule,
) -> float:
    """Seconds of a step by the model."""
    if depth == 0 and count == 1:
        return sum(stages.values())
    cut = sizes_of(1000 * count, count, sizes, work_of(stages))
    arrive = new_rows(cut, ROWS_EXPONENT) if can_split else [1.0, *([0.0] * (count - 1))]
    leave = new_rows(cut[::-1], ROWS_EXPONENT)[::-1] if can_split else [*([0.0] * (count - 1)), 1.0]
    finds_final = depth > 0 and can_split and count < FINAL_BELOW
    final = FINAL_SHARE if finds_final else 0.0

    def seconds(task: Task) -> float:
        whole = stages.get(task.stage, 0.0)
        if task.stage == "compute":
            return whole * cut[task.part] / sum(cut) + COST_S * (count > 1)
        if task.stage == "rows":
            return whole * arrive[task.part] * (1 - final)
        if task.stage == "gradients":
            return whole * leave[task.part]
        return final * stages.get("rows", 0.0) if task.stage == "final" else whole

    def share(task: Task) -> float:
        stage = "rows" if task.stage == "final" else task.stage
        return min(cpu.get(stage, 0.0) / stages[stage], 1.0) if stages.get(stage) else 0.0

    return step_s(
        play(schedule(depth, count, fetches_final=finds_final), seconds, _NUM_TURNS, cores=cores, share=share)
    )
