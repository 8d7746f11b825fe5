"""Steps: how a trainer goes through batches: whole and in turn, or through a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from rowmesh.mesh.waiting import gather_objects
from rowmesh.observe.trace import Event, write_trace
from rowmesh.pipeline import BatchInFlight, Pipeline
from rowmesh.pipeline.auto import COUNTS, DEPTHS, choose, work_of
from rowmesh.pipeline.recorder import WAIT, Totals
from rowmesh.pipeline.sizes import WindowWork
from rowmesh.placement.text import bytes_text
from rowmesh.run.config import PipelineConfig
from rowmesh.run.job import Job
from rowmesh.run.section import shared
from rowmesh.run.task import StepBatch

WARM_UP_STEPS, MEASURED_STEPS = 8, 16


class Trains(Protocol):
    """The methods of a trainer that steps call.

    Attributes:
        step: steps so far.
    """

    step: int

    def train_step(self, batch: StepBatch) -> float:
        """Trains on a batch; returns the sum of the losses of this rank that became known."""
        ...

    def train_window(self, window: BatchInFlight[StepBatch]) -> float:
        """Trains on a batch by micro-batches; returns the same."""
        ...


class Steps(Protocol):
    """How batches are trained on."""

    def __call__(self, batches: Iterator[StepBatch], count: int | None) -> Generator[tuple[StepBatch, float]]:
        """Trains on so many batches, or on all of them (None).

        Gives each with the sum of the losses of this rank that became known by it.
        """
        ...

    def wait(self) -> None:
        """Waits until rows may be looked up otherwise."""
        ...

    def pause(self) -> None:
        """Waits until nothing is under way, nor opened ahead. Collective."""
        ...

    def record(self) -> dict[str, float]:
        """Facts about the time since the last call, on this rank."""
        ...

    def finish(self, trace: Path) -> None:
        """Writes what is to be written at the end. Collective."""
        ...


class PlainSteps:
    """Whole batches, in turn."""

    def __init__(self, trainer: Trains) -> None:
        self._trainer = trainer

    def __call__(self, batches: Iterator[StepBatch], count: int | None) -> Generator[tuple[StepBatch, float]]:
        """Trains on so many batches."""
        for batch in islice(batches, count):
            yield batch, self._trainer.train_step(batch)

    def wait(self) -> None:
        """Nothing is under way between steps."""

    def pause(self) -> None:
        """Nothing is opened ahead."""

    def record(self) -> dict[str, float]:
        """Nothing."""
        return {}

    def finish(self, trace: Path) -> None:
        """Nothing."""


class PipelinedSteps:
    """Batches of a pipeline, which is chosen after some steps in turn where the configuration says "auto".

    Args:
        trainer: does what is to be done for each batch.
        job: what is trained.
        pauses: after every so many steps, of each, nothing is opened ahead, for batches that cannot be taken back.
        log: receives the choices that were made.
    """

    def __init__(self, trainer: Trains, job: Job, pauses: Sequence[int], log: Callable[[str], None]) -> None:
        self._trainer, self._job, self._pauses, self._log = trainer, job, pauses, log
        self._pipeline: Pipeline[StepBatch] | None = None
        self._pipelines: list[Pipeline[StepBatch]] = []
        self._has_told = False  # what a batch in flight takes
        share = job.config.pipeline.communication_share
        self._work = None if share == "auto" else WindowWork.of_share(share)

    def __call__(self, batches: Iterator[StepBatch], count: int | None) -> Generator[tuple[StepBatch, float]]:
        """Trains on so many batches."""
        config, left, joins = self._job.config.pipeline, count, None
        if config.is_measured:
            in_turn, first_steps = self._make(0, 1, overlap=False), WARM_UP_STEPS + MEASURED_STEPS
            if count is not None and count <= first_steps:
                self._log(f"pipeline  off: {count} steps are too few to measure the first {first_steps} and choose")
                yield from self._run(in_turn, batches, count)
                return
            yield from self._run(in_turn, batches, WARM_UP_STEPS)
            in_turn.recorder.flush()
            in_turn.recorder.take()
            yield from self._run(in_turn, batches, MEASURED_STEPS)
            left = None if left is None else left - first_steps
            config, joins = self._chosen(config)
        assert config.depth != "auto"
        assert config.micro_batches != "auto"
        pipeline = self._make(config.depth, config.micro_batches, joins=joins)
        self._log(f"pipeline  {'; '.join(dict.fromkeys(pipeline.reasons))}")
        self._log(f"pipeline  {pipeline.threads}")
        yield from self._run(pipeline, batches, left)

    def wait(self) -> None:
        """Waits until the steps so far are done."""
        if self._pipeline is not None:
            self._pipeline.wait()

    def pause(self) -> None:
        """Waits until the steps so far are done, and takes back what was opened ahead. Collective."""
        if self._pipeline is not None:
            self._pipeline.pause()

    def record(self) -> dict[str, float]:
        """The share of the time that computation waited for rows."""
        pipeline = self._pipeline
        assert pipeline
        if not self._has_told and (size := pipeline.window_bytes):
            self._has_told = True
            self._log(
                f"pipeline  each batch in flight takes {bytes_text(size)}: {pipeline.schedule.depth + 1} and more"
            )
        return {"exposed_share": pipeline.take_exposed_share()}

    def finish(self, trace: Path) -> None:
        """Writes the trace of all ranks, where that was asked for. Collective."""
        if not self._job.config.pipeline.trace:
            return
        shift_s = time.time() - time.perf_counter()  # ranks on several hosts have no other clock in common
        spans = [span for pipeline in self._pipelines for span in pipeline.recorder.spans()]
        mine = [
            Event(task.stage, resource, task.batch, task.part, start_s + shift_s, end_s + shift_s)
            for task, resource, start_s, end_s, _ in spans
        ]
        everyone = gather_objects(self._job.mesh, mine, "collecting the trace of all ranks")
        if self._job.mesh.rank == 0:
            try:
                write_trace(trace, [[Event(*event) for event in events] for events in everyone])
            except OSError as error:  # no reason to lose the model
                self._log(f"cannot write {trace}: {error.strerror or error}; there is no trace of this run")

    def _make(
        self, depth: int, micro_batches: int, *, joins: bool | None = None, overlap: bool = True
    ) -> Pipeline[StepBatch]:
        given: dict[str, Any] = shared(self._job.config.pipeline, Pipeline)
        given |= {"depth": depth, "micro_batches": micro_batches}
        pipeline = Pipeline[StepBatch](self._job.embeddings, **given, work=self._work, joins=joins, overlap=overlap)
        self._pipelines.append(pipeline)
        return pipeline

    def _run(
        self, pipeline: Pipeline[StepBatch], batches: Iterator[StepBatch], count: int | None
    ) -> Generator[tuple[StepBatch, float]]:
        """So many batches, or all there are, with pauses."""
        end = None if count is None else self._trainer.step + count
        while (now := self._trainer.step) != end:
            counts = [*(every - now % every for every in self._pauses), *([] if end is None else [end - now])]
            steps = min(counts) if counts else None
            yield from self._run_on(pipeline, batches, steps)
            if steps is None or self._trainer.step < now + steps:
                return

    def _run_on(
        self, pipeline: Pipeline[StepBatch], batches: Iterator[StepBatch], count: int | None
    ) -> Generator[tuple[StepBatch, float]]:
        """So many batches; the last is given when nothing is under way any more."""
        self._pipeline, last = pipeline, None
        with closing(pipeline.windows(islice(batches, count))) as windows:
            for number, window in enumerate(windows, 1):
                done = (window.item, self._trainer.train_window(window))
                if count is None or number < count:
                    yield done
                else:
                    last = done
        if last is not None:
            yield last

    def _chosen(self, config: PipelineConfig) -> tuple[PipelineConfig, bool]:
        """The configuration with what the measured steps advise, and whether threads are joined.

        The same on all ranks.
        """
        assert self._pipeline
        pipeline = self._pipeline
        pipeline.recorder.flush()
        mine = _per_step(pipeline.recorder.take(), MEASURED_STEPS)
        everyone = gather_objects(self._job.mesh, mine, "comparing measured stages")
        cores = min(gather_objects(self._job.mesh, pipeline.cores, "comparing their cores"))
        stages, cpu = ({name: max(rank[k].get(name, 0.0) for rank in everyone) for name in mine[k]} for k in (0, 1))
        choice = choose(
            stages,
            cpu,
            cores=cores,
            can_split=pipeline.can_split,
            sizes=config.sizes,
            depths=DEPTHS if config.depth == "auto" else (config.depth,),
            counts=COUNTS if config.micro_batches == "auto" else (config.micro_batches,),
            schedule=pipeline.make_schedule,
        )
        self._log(f"pipeline  {choice}")
        if config.communication_share == "auto":
            self._work = work_of(stages)
        return config.model_copy(update={"depth": choice.depth, "micro_batches": choice.micro_batches}), choice.joins


def _per_step(totals: Totals, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each stage of a step, and of them those of the processor."""
    stages, cpu = (
        {name: seconds / steps for name, seconds in each.items() if name != WAIT}  # in turn, for the other stages
        for each in (totals.stages, totals.cpu)
    )
    return stages, cpu
