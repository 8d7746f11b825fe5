"""Stages that sleep: a pipeline's real schedule and runner over tasks of known length, beside what `play` predicts.

What is measured is how well threads overlap, and what waits for what; nothing is computed, sent or read, so that no
core, cable or disk is short. A stage of so many milliseconds takes them for a batch; where micro-batches have tasks of
their own, these share them.

- ratio: a measured step over the predicted one.

Source: NestPipe §IV-A, Fig. 4.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping

from benchmarks.command import Report
from rowmesh.pipeline.playing import play, step_s
from rowmesh.pipeline.runner import Runner
from rowmesh.pipeline.schedule import COMPUTE, Schedule, Span, Task, make_schedule

STAGES = ("read", "copy", "route", "retrieve", "rows", "compute", "gradients", "update")
FIVE = {"read": 20.0, "copy": 20.0, "route": 20.0, "retrieve": 20.0, "compute": 20.0}
ALL = dict.fromkeys(STAGES, 20.0)
DRAWN_MS = (0.0, 5.0, 10.0, 20.0)  # of a stage in a drawn mix
TARGET_MS, TARGET_RATIO = 22.0, 0.1


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this case."""
    add = parser.add_argument
    add(
        "--stages",
        type=_mix,
        nargs="?",
        const={"five": FIVE, "all": ALL},
        help="stages that sleep: NAME=MS,… or, without, five of 20 ms, all of 20 ms and drawn mixes",
    )
    add("--stages-depth", type=_integers, default=[0, 1, 2, 3, 4], help="batches ahead, by commas")
    add("--stages-micro-batches", type=_integers, default=[1, 8], help="how many, by commas")
    add("--stages-mixes", type=int, default=4, help="how many mixes are drawn")
    add("--stages-repeats", type=int, default=3, help="runs, of whose steps the median counts")
    add("--stages-steps", type=int, default=24, help="batches of a run, of which the second half is timed")


def run(report: Report, options: argparse.Namespace) -> None:
    """Every mix, depth and number of micro-batches.

    Raises:
        SystemExit: there is no such stage.
    """
    if options.quick:
        options.stages_depth, options.stages_mixes, options.stages_steps, options.stages_repeats = [0, 1, 4], 1, 6, 1
    worst = 0.0
    for mix, stages_ms in _mixes(options).items():
        for count in options.stages_micro_batches:
            for depth in options.stages_depth:
                schedule = make_schedule(depth, count, is_tiered=True, copies=True)
                task_s = seconds_of(schedule, stages_ms)
                predicted_ms = 1e3 * step_s(play(schedule, task_s, options.stages_steps))
                runs = [sleep(schedule, task_s, options.stages_steps) for _ in range(options.stages_repeats)]
                measured_ms = 1e3 * statistics.median(step_s(spans) for spans in runs)
                ratio = measured_ms / predicted_ms if predicted_ms else None
                worst = max(worst, abs((ratio or 1.0) - 1.0))
                report.line(
                    case="stages",
                    mix=mix,
                    depth=depth,
                    micro_batches=count,
                    stages_ms=stages_ms,
                    step_ms=round(measured_ms, 3),
                    predicted_ms=round(predicted_ms, 3),
                    ratio=None if ratio is None else round(ratio, 3),
                )
                if mix == "five" and count == 1 and depth == max(options.stages_depth):
                    text = f"stages: ms of a step, five of 20 ms, K={depth}, target {TARGET_MS}"
                    report.ratio(text, round(measured_ms, 3))
    report.ratio(f"stages: furthest from what is predicted, target {TARGET_RATIO}", round(worst, 3))


def _mixes(options: argparse.Namespace) -> dict[str, Mapping[str, float]]:
    if "given" in options.stages:
        return options.stages
    generator = random.Random(0)
    return options.stages | {
        f"drawn {mix}": {name: generator.choice(DRAWN_MS) for name in STAGES} for mix in range(options.stages_mixes)
    }


def seconds_of(schedule: Schedule, stages_ms: Mapping[str, float]) -> Callable[[Task], float]:
    """How long each task takes.

    Example:
        >>> seconds = seconds_of(make_schedule(1, 4), {"rows": 20.0, "read": 3.0})
        >>> seconds(Task("rows", 0, 2)), seconds(Task("read", 0)), seconds(Task("route", 0))
        (0.005, 0.003, 0.0)
    """
    shares = {stage.name: schedule.num_parts if stage.by_part else 1 for stage in schedule.stages}
    return lambda task: stages_ms.get(task.stage, 0.0) / 1e3 / shares[task.stage]


def sleep(schedule: Schedule, seconds: Callable[[Task], float], num_batches: int) -> list[Span]:
    """Runs so many batches whose tasks sleep; returns when those of the driver were done."""
    spans: list[Span] = []

    def act(task: Task) -> None:
        if length_s := seconds(task):
            time.sleep(length_s)

    def drive(task: Task) -> None:
        began = time.perf_counter()
        act(task)
        spans.append(Span(task, COMPUTE, began, time.perf_counter()))
        runner.done(task)

    actions = {stage.name: act for stage in schedule.stages if stage.resource != COMPUTE}
    runner = Runner(schedule, actions)
    try:
        for turn in range(-schedule.depth, num_batches):
            runner.enter(turn)
            if turn < 0:
                continue
            for task in schedule.tasks(COMPUTE, turn):
                if task.stage == "compute":
                    runner.wait(task)
                drive(task)
        runner.wait_for_all()
    finally:
        runner.close()
    return spans


def _mix(text: str) -> dict[str, Mapping[str, float]]:
    """A mix of stages and their milliseconds.

    >>> _mix("read=20,rows=2.5")
    {'given': {'read': 20.0, 'rows': 2.5}}
    """
    found: dict[str, float] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        known = (*STAGES, "open", "final", "step", "dense")
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is no stage; there are {', '.join(known)}")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{pair!r}: give STAGE=MILLISECONDS, such as read=20") from error
        if found[name] < 0:
            raise argparse.ArgumentTypeError(f"{pair!r}: a stage takes 0 ms or more")
    return {"given": found}


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
