"""The training loop: steps, and what comes between them: lines of the log, evaluations, checkpoints, versions."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, closing
from typing import Any

from rowmesh._support.faults import reach
from rowmesh._support.memory import MemoryGauge
from rowmesh._support.random_states import random_states, set_random_states
from rowmesh.checkpoint.write import WRITING
from rowmesh.data.quarantine import Quarantine
from rowmesh.data.raw import RawLoader
from rowmesh.errors import Preempted, Terminated
from rowmesh.mesh.waiting import gather_objects
from rowmesh.run.best import BestModel
from rowmesh.run.checkpoints import Checkpoints
from rowmesh.run.checks import naming_lost_peers
from rowmesh.run.config import chosen
from rowmesh.run.console import Console
from rowmesh.run.drift import Drift, configured_drift
from rowmesh.run.gradients import saved_buffers
from rowmesh.run.interval import Interval
from rowmesh.run.publications import Publications
from rowmesh.run.raw_task import MAX_BAD_ROWS
from rowmesh.run.run_folder import RunFolder
from rowmesh.run.run_log import RunLog
from rowmesh.run.steps import PipelinedSteps, PlainSteps, Steps
from rowmesh.run.survivors import Standing, Survivors
from rowmesh.run.task import StepBatch
from rowmesh.run.trainer import Trainer

PAUSE_EVERY = 64
"""Steps after which a pipeline has opened no batch that it cannot take back: a checkpoint may have been asked for."""


def train(trainer: Trainer, run: RunFolder, publications: Publications, console: Console) -> None:
    """Trains for the configured steps, evaluating now and then, and writes checkpoints and versions as configured.

    With `train.patience` it stops early, and the best model is taken back. Collective: every rank calls it.

    Args:
        trainer: does the steps; goes on from where it is.
        run: the folder.
        publications: versions for who serves.
        console: shows how far the run is, and what happens.

    Raises:
        Preempted: a rank got SIGTERM or SIGUSR1, and a checkpoint is written.
        Terminated: none could be.
    """
    job = trainer.job
    with (
        RunLog(job, run, console.progress(trainer.total_steps), trainer.step) as log,
        naming_lost_peers(job.mesh, "training"),
        configured_drift(trainer.task, job) as drift,
        trainer.requests.heeding_signals(),
        Checkpoints(job, run, log.progress.write, trainer.step) as checkpoints,
        ExitStack() as stack,
    ):
        best = BestModel(job, run, log.progress.write)
        loop = _Loop(trainer, log, checkpoints, publications, best, drift)
        _keep_bad_rows(trainer, run, stack)
        batches = stack.enter_context(closing(trainer.batches()))  # threads read ahead for them, until closed
        done = stack.enter_context(closing(loop.steps(batches, trainer.steps_left)))
        survivors = Survivors(job, run, checkpoints, drift, trainer.requests, trainer.step)
        trainer.keeps_buffers = not survivors.reason and bool(saved_buffers(job.network))
        stack.enter_context(survivors.saving(loop.standing, loop.state_before))
        loop.run(done)
        loop.steps.finish(run.trace)
    trainer.trained_steps = trainer.step
    if best.kept_step and best.kept_step != trainer.step and trainer.stopping.best_step != trainer.step:
        trainer.load_state_dict(best.take_back(), keep_stopping=True)


class _Loop:
    """The work between the steps of a run: the log, evaluations, checkpoints and publications.

    Args:
        trainer: does the steps.
        log: of the run.
        checkpoints: of the run.
        publications: versions for readers that serve the model.
        best: the best model so far.
        drift: keeps the plan up to date with the traffic.

    Attributes:
        steps: how batches are gone through.
    """

    def __init__(
        self,
        trainer: Trainer,
        log: RunLog,
        checkpoints: Checkpoints,
        publications: Publications,
        best: BestModel,
        drift: Drift | None,
    ) -> None:
        self._trainer, self._job, self._config, self._mesh = trainer, trainer.job, trainer.config, trainer.job.mesh
        self._log, self._checkpoints, self._publications = log, checkpoints, publications
        self._best, self._drift, self._memory = best, drift, MemoryGauge()
        self._eval_every, tables = chosen(self._config.train.eval_every), self._job.embeddings
        knows_ids = self._config.model.is_sequence and any(table.takes_any_id for table in tables.tables)
        # An evaluation that needs all fast memory, keeps the model, or ranks the items that tables know.
        self._evaluates_idle = bool(tables.tier_counters or trainer.stopping.patience or knows_ids)
        self._lacks_undo = tables.driven.may_lack_undo and not self._config.pipeline.is_off
        self.steps = self._make_steps()
        self._interval = self._go_on()

    def run(self, done: Iterable[tuple[StepBatch, float]]) -> None:
        """Goes through the batches that were trained on, each with the losses that became known by it."""
        trainer = self._trainer
        trainer.clock.begin()
        for batch, loss in done:
            reach("loop.step")
            self._interval.add(batch.weight, batch.num_samples, loss)
            self._follow(batch)
            if trainer.stopping.is_over:  # nothing is under way: steps pause where they are evaluated
                break
            self._write()
            trainer.is_between = True
            trainer.clock.begin()
        if trainer.total_steps is None and self._interval.steps:  # raw rows ended: the last step came unannounced
            self._end_interval()
        self._checkpoints.wait()  # a signal that comes meanwhile is heeded
        if trainer.requests.agree():
            self._checkpoint()

    def standing(self) -> Standing:
        """The position of this rank in the run, between steps or amid one."""
        step, trainer = self._trainer.step, self._trainer
        lines = [step - step % every for every in (self._config.train.log_every, self._eval_every) if every]
        return Standing(step, trainer.is_between, self._interval.to_plain(trainer.loader.waited_s), max(lines))

    def state_before(self, intervals: list[list[float]], states: list[dict[str, Any]]) -> dict[str, Any]:
        """All that a checkpoint has beside the rows, where another step may have begun, which is not done.

        Args:
            intervals: of each rank.
            states: of each rank, of random numbers.
        """
        whole = self._whole_state(intervals, states)
        return whole | {"network": whole["network"] | self._trainer.buffers_before()}

    def _follow(self, batch: StepBatch) -> None:
        """Notes what a step did, measures the model, and adapts to the traffic."""
        trainer, step, log = self._trainer, self._trainer.step, self._log
        log.step(step)
        if (window := trainer.progressive.after_step(step)) is not None:
            log.window(step, window.as_record())
        trainer.requests.is_urgent = self._checkpoints.poll()
        if self._drift is not None and (text := self._drift.after_step(batch.sparse)):
            log.progress.write(f"drift after step {step}: {text}")
        if self._is_due(self._config.train.log_every):
            self._end_interval()
        if self._eval_every and self._is_due(self._eval_every):
            (self.steps.pause if self._evaluates_idle else self.steps.wait)()
            self._interval.loss += trainer.losses.rest()
            self._validate()

    def _write(self) -> None:
        """Writes a checkpoint and a version, where those are due, and all rows may be read."""
        step, requests = self._trainer.step, self._trainer.requests
        if not self._is_idle:
            return
        is_asked = requests.end or self._checkpoints.is_due(step, is_asked=requests.checkpoint)
        if is_asked and self._checkpoints.may_write(step):
            self.steps.wait()
            self._checkpoint()
        if self._publications.is_due(step, is_asked=requests.version):
            self.steps.wait()
            self._publish()

    def _end_interval(self) -> None:
        """Sums an interval over ranks, takes the mean of what else is recorded, writes it, and begins another."""
        trainer, interval, num_ranks = self._trainer, self._interval, self._mesh.world_size
        interval.loss += trainer.losses.rest()
        elapsed_s, resumed_s = interval.elapsed_s, interval.resumed_s
        waited_s = interval.waited_s + trainer.loader.waited_s
        record = self.steps.record() | trainer.clock.take(resumed_s, steps=interval.steps)
        own = (interval.loss, interval.weight, interval.samples, self._memory.read(), waited_s, *record.values())
        everyone = gather_objects(self._mesh, own, "summing the losses of all ranks")
        loss, weight, samples, memory_bytes, all_waited_s, *recorded = map(sum, zip(*everyone, strict=True))
        self._log.interval(
            trainer.step,
            loss=loss / weight if weight else math.nan,
            samples_per_s=samples / elapsed_s,
            memory_bytes=int(memory_bytes),
            waited_for_data_share=all_waited_s / (num_ranks * elapsed_s),
            memory_bytes_by_rank=[int(theirs[3]) for theirs in everyone],
            **trainer.lrs,
            **{name: value / num_ranks for name, value in zip(record, recorded, strict=True)},
        )
        self._interval = Interval(waited_s=-trainer.loader.waited_s)

    def _validate(self) -> None:
        """Evaluates the validation split, and keeps the model if that is the best. Steps are not charged for it."""
        trainer, stopping, split = self._trainer, self._trainer.stopping, self._config.data.validation
        with self._interval.paused():
            metrics = trainer.task.validate(self._job)
            is_better = stopping.add(trainer.step, metrics.loss)
            if stopping.patience and is_better and trainer.step != trainer.total_steps:
                self._best.keep(trainer.step, trainer.state_dict())
            self._log.evaluation(trainer.step, split, metrics.as_record())
            self._log.progress.write(f"{split} after step {trainer.step}: {metrics.text}")

    def _checkpoint(self) -> None:
        """Writes one, or begins to; ends the run where that is asked for. Steps are not charged for it."""
        trainer, checkpoints, requests = self._trainer, self._checkpoints, self._trainer.requests
        with self._interval.paused():
            checkpoints.wait()
            self._interval.loss += trainer.losses.rest()
            self._log.sync()
            if checkpoints.last != trainer.step:
                own = [self._interval.to_plain(trainer.loader.waited_s), random_states(self._job.embeddings.device)]
                intervals, states = zip(*gather_objects(self._mesh, own, WRITING), strict=True)
                drift = None if self._drift is None else self._drift.state_dict()
                window = trainer.progressive.state_dict()
                state = self._whole_state(list(intervals), list(states), drift=drift, window=window)
                checkpoints.write(trainer.step, state, has_best=self._best.kept_step > 0)
            self._log.skip()
            requests.done()
        if requests.end:
            checkpoints.wait()
            is_written = checkpoints.last == trainer.step > 0
            self._log.progress.write(checkpoints.farewell(trainer.step, requests.signal, is_written=is_written))
            raise Preempted if is_written else Terminated(requests.signal or signal.SIGTERM)

    def _publish(self) -> None:
        """Publishes a version. Steps are not charged for it."""
        with self._interval.paused():
            self._publications.write(self._trainer.step, self._log.progress.write)
            self._log.skip()
            self._trainer.requests.published()

    def _whole_state(
        self,
        intervals: list[list[float]],
        states: list[dict[str, Any]],
        *,
        drift: Mapping[str, Any] | None = None,
        window: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """All that a checkpoint has beside the rows; of each rank its interval and its random states."""
        progress = {
            "loader": self._trainer.loader.state_after(self._trainer.step),
            "intervals": intervals,
            "random_states": states,
            "best_step": self._best.kept_step,
            "drift": drift,
            "window": window,
            "decided": self._log.state_dict(),
        }
        return {**self._trainer.state_dict(), "progress": progress}

    def _go_on(self) -> Interval:
        """Takes up what a checkpoint has for the loop; returns what had added up by then."""
        if (progress := self._trainer.progress) is None:
            return Interval()
        rank, num_ranks, states = self._mesh.rank, self._mesh.world_size, progress["random_states"]
        self._best.kept_step = progress["best_step"]
        if self._drift is not None and progress["drift"] is not None:
            self._drift.load_state_dict(progress["drift"])
        if progress["window"] is not None:  # checkpoints of survivors have none
            self._trainer.progressive.load_state_dict(progress["window"])
        self._log.load_state_dict(progress["decided"])
        set_random_states(states[rank % len(states)], self._job.embeddings.device)
        return Interval.resumed(progress["intervals"], rank, num_ranks)

    def _make_steps(self) -> Steps:
        if self._config.pipeline.is_off:
            return PlainSteps(self._trainer)
        pauses = self._idle_steps
        if self._eval_every and self._evaluates_idle and self._lacks_undo:
            pauses.append(self._eval_every)
        return PipelinedSteps(self._trainer, self._job, pauses, self._log.progress.write)

    @property
    def _idle_steps(self) -> list[int]:
        """Every how many steps a pipeline has opened no batch that it cannot take back, so that it can pause."""
        checkpoint, publish = self._config.checkpoint, self._config.publish
        if not self._lacks_undo or not (checkpoint.is_on or publish.is_on):
            return []
        return [PAUSE_EVERY, *filter(None, (checkpoint.every_steps, publish.every_steps))]

    @property
    def _is_idle(self) -> bool:
        """Whether a pipeline can pause after this step."""
        pauses = self._idle_steps
        return not pauses or any(self._is_due(every) for every in pauses)

    def _is_due(self, every: int) -> bool:
        return self._trainer.step % every == 0 or self._trainer.step == self._trainer.total_steps


def _keep_bad_rows(trainer: Trainer, run: RunFolder, stack: ExitStack) -> None:
    """Where raw rows go that cannot be used: each part of a run has files of its own."""
    if isinstance(trainer.loader, RawLoader):
        path = run.bad_rows(trainer.job.mesh.rank, trainer.step)
        path.parent.mkdir(exist_ok=True)
        quarantine = Quarantine(path, trainer.config.data.max_bad_rows, keep_at=path, option=MAX_BAD_ROWS)
        trainer.loader.quarantine = stack.enter_context(quarantine)
