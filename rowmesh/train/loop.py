"""The training loop: an ordinary one, on every rank alike."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rowmesh.checkpoint.write import WRITING
from rowmesh.data.quarantine import Quarantine
from rowmesh.data.raw import RawLoader
from rowmesh.errors import Preempted, Terminated
from rowmesh.faults import reach
from rowmesh.mesh.waiting import gather_objects
from rowmesh.observe import MemoryGauge
from rowmesh.observe.step_clock import StepClock
from rowmesh.optim import EmbeddingOptimizer
from rowmesh.pipeline import BatchInFlight
from rowmesh.random_states import random_states, seed_step, set_random_states
from rowmesh.state_form import in_form
from rowmesh.train.best import BestModel
from rowmesh.train.checkpoints import Checkpoints
from rowmesh.train.checks import naming_lost_peers
from rowmesh.train.config import Config, OptimizerConfig, chosen
from rowmesh.train.drift import Drift, configured_drift
from rowmesh.train.gradients import SharedGradients, saved_buffers
from rowmesh.train.graphs import training_network
from rowmesh.train.interval import Interval
from rowmesh.train.job import Job
from rowmesh.train.losses import Losses
from rowmesh.train.progressive import Progressive
from rowmesh.train.publications import Publications
from rowmesh.train.requests import NUM_FLAGS, Requests
from rowmesh.train.run_folder import RunFolder
from rowmesh.train.run_log import RunLog
from rowmesh.train.schedule import go_on, make_scheduler
from rowmesh.train.steps import PipelinedSteps, PlainSteps, Steps
from rowmesh.train.stopping import EarlyStopping
from rowmesh.train.survivors import Standing, Survivors
from rowmesh.train.task import Computed, StepBatch

PAUSE_EVERY = 64
"""Steps after which a pipeline over dynamic tables has nothing under way: a checkpoint may have been asked for."""


class Trainer:
    """Trains a job for the configured steps.

    Attributes:
        step: steps done, of the model that there is: fewer than were trained where the best model was taken back.
        trained_steps: steps done in all.
        total_steps: steps of the run, at most; None: until there are no more rows.
        publications: versions for who serves; to be closed.
        stopping: what evaluations found, and which was the best.

    Args:
        job: what to train.
    """

    def __init__(self, job: Job) -> None:
        config = job.config
        self.job, self.config, self.step, self.trained_steps = job, config, 0, 0
        self.stopping = EarlyStopping(chosen(config.train.patience), is_relative=job.task.is_relative)
        self._eval_every = chosen(config.train.eval_every)
        self._requests = Requests(config.checkpoint, job.mesh, 60.0 * config.publish.every_minutes)
        self.publications = Publications(job)
        self._loader = job.task.loader(
            job, validates=self._eval_every > 0, is_asked=lambda: bool(self._requests.signal)
        )
        self.total_steps = _total_steps(config, self._loader.num_batches)
        self._gradients = SharedGradients(job.network, job.mesh, job.embeddings.transport, NUM_FLAGS)
        self._network = training_network(job.network, config)
        self._dense_optimizer = make_optimizer(config.optimizer, job.network)
        self._embedding_optimizer = EmbeddingOptimizer(job.embeddings)
        self._optimizers: list[Optimizer] = [self._dense_optimizer, self._embedding_optimizer]
        self._losses = Losses(job.embeddings.device)
        self._progressive = Progressive(job, config.train.progressive_every)
        self._memory, self._clock = MemoryGauge(), StepClock()
        self._lrs: dict[str, float] = {}
        self._resumed: Mapping[str, Any] | None = None
        self._batch_weight = 0.0
        self._keeps_buffers, self._buffers_before = False, (-1, dict[str, Tensor]())  # and after which step
        self._is_between = True  # two steps; not between the last of a step and what follows it, a line say
        self._schedulers = [make_scheduler(config.schedule, each, self.total_steps) for each in self._optimizers]

    def run(self, run: RunFolder) -> None:
        """Trains, evaluating on the validation split now and then, and writes checkpoints as configured.

        With `train.patience` it stops early, and the best model is taken back. Collective: every rank calls it.

        Raises:
            Preempted: a rank got SIGTERM or SIGUSR1, and a checkpoint is written.
            Terminated: none could be.
        """
        with (
            RunLog(self.job, run, self.total_steps, self.step) as log,
            naming_lost_peers(self.job.mesh, "training"),
            configured_drift(self.job) as drift,
            self._requests.heeding_signals(),
            Checkpoints(self.job, run, log.progress.write, self.step) as checkpoints,
            ExitStack() as stack,
        ):
            steps = self._make_steps(drift is not None, log)
            best = BestModel(self.job, run, log.progress.write)
            interval = self._go_on(best, drift)
            self._keep_bad_rows(run, stack)
            batches = stack.enter_context(closing(self._batches()))  # threads read ahead for them, until closed
            done = stack.enter_context(closing(steps(batches, self._steps_left())))
            survivors = Survivors(self.job, run, checkpoints, drift, self._requests, self.step)
            self._keeps_buffers = not survivors.reason and bool(saved_buffers(self.job.network))
            stack.enter_context(survivors.saving(lambda: self._standing(interval), partial(self._state_before, best)))
            self._clock.begin()
            for batch, loss in done:
                reach("loop.step")
                interval.loss += loss
                interval.weight += batch.weight
                interval.samples += batch.num_samples
                interval.steps += 1
                log.step(self.step)
                if (window := self._progressive.after_step(self.step)) is not None:
                    log.window(self.step, window.as_record())
                self._requests.is_urgent = checkpoints.poll()
                if drift is not None and (text := drift.after_step(batch.sparse)):
                    log.progress.write(f"drift after step {self.step}: {text}")
                if self._is_due(self.config.train.log_every):
                    interval.loss += self._losses.rest()
                    self._log(log, interval, steps.record())
                    interval = Interval(waited_s=-self._loader.waited_s)
                if self._eval_every and self._is_due(self._eval_every):
                    steps.wait()
                    interval.loss += self._losses.rest()
                    interval.started_s += self._validate(log, best)
                    if self.stopping.is_over:  # nothing is under way: the steps pause here
                        break
                if checkpoints.may_write(self.step) and self._is_idle and self._is_asked(checkpoints):
                    steps.wait()
                    self._checkpoint(checkpoints, log, interval, best, drift)
                if self._is_idle and self.publications.is_due(self.step, is_asked=self._requests.version):
                    steps.wait()
                    self._publish(log, interval)
                self._is_between = True
                self._clock.begin()
            if self.total_steps is None and interval.steps:  # nobody knew that it was the last one
                interval.loss += self._losses.rest()
                self._log(log, interval, steps.record())
                interval = Interval(waited_s=-self._loader.waited_s)
            checkpoints.wait()  # a signal that comes meanwhile is heeded
            if self._requests.agree():
                self._checkpoint(checkpoints, log, interval, best, drift)
            steps.finish(run.trace)
        self.trained_steps = self.step
        if best.kept_step and best.kept_step != self.step and self.stopping.best_step != self.step:
            self.load_state_dict(best.take_back(), keep_stopping=True)

    def train_step(self, batch: StepBatch) -> float:
        """One step; returns the sum of this rank's losses that the host got to know: on a CPU those of its samples.

        Collective: every rank calls it.
        """
        self._begin_step(batch)
        embeddings = self.job.embeddings(batch.sparse)
        self._clock.lap("rows")
        computed = self.job.task.compute(self.job, batch, embeddings, self._network)
        self._gradients.sends_early()
        total = self._backward(computed)
        self._clock.lap("network")
        self._end_step()
        return total

    def train_window(self, window: BatchInFlight[StepBatch]) -> float:
        """One step by micro-batches; returns the same. Collective: every rank calls it."""
        batch, total = window.item, 0.0
        self._begin_step(batch)
        for part in window:
            embeddings = part.embeddings
            self._clock.lap("rows")
            total += self._backward(self.job.task.compute(self.job, batch, embeddings, self._network, part.samples))
            self._clock.lap("network")
        self._end_step()
        return total

    @property
    def _where(self) -> str:
        return f"step {self.step + 1} on rank {self.job.mesh.rank}"

    def _begin_step(self, batch: StepBatch) -> None:
        self._clock.lap("data")
        self.job.task.check_batch(batch, self._where)
        self._batch_weight = self.job.task.global_weight(self.job, batch, self.step)
        self._gradients.zero()
        self._embedding_optimizer.zero_grad()
        seed_step(self.config.train.seed, self.step, self.job.mesh.rank)
        if self._keeps_buffers:  # the network changes them before the step is done
            buffers = {name: buffer.clone() for name, buffer in saved_buffers(self.job.network).items()}
            self._buffers_before = self.step, buffers
        self._clock.lap("other")

    def _backward(self, computed: Computed) -> float:
        """Adds the gradients of some samples; returns the sum of the losses that the host got to know."""
        reach("loop.backward")
        known = self._losses.add(computed.total, self._where)
        if computed.outputs is not None and computed.labels is not None:
            self._progressive.add(computed.outputs, computed.labels, computed.weights)
        self.local_loss(computed.total).backward()
        return known

    def _end_step(self) -> None:
        """Updates rows and network; rows first: under a pipeline they do so beside the rest."""
        self._lrs = self._current_lrs()
        if most := self.config.train.clip_grad_norm:  # of what all ranks have together: the average comes before
            self._average()
            self._embedding_optimizer.clip_grad_norm_(most, self.job.network.parameters())
        self._embedding_optimizer.step()
        self._clock.lap("update")
        if not most:
            self._average()
        self._is_between = False
        self._dense_optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        self._clock.lap("optimizer")
        self.step += 1

    def _average(self) -> None:
        """Averages the network's gradients; with them ranks learn what others were asked for."""
        self._requests.put(self._gradients.flags)
        self._gradients.average()
        self._requests.take(self._gradients.flags)
        self._clock.lap("all_reduce")

    def _make_steps(self, can_migrate: bool, log: RunLog) -> Steps:
        config = self.config
        if config.pipeline.is_off:
            return PlainSteps(self)
        pauses = [config.placement.drift.check_every] if can_migrate else []
        pauses += self._idle_steps
        ranks_known = config.model.is_sequence and self._is_dynamic  # nothing is ahead of what the tables know
        if self._eval_every and (self.job.embeddings.tier_counters or self.stopping.patience or ranks_known):
            pauses.append(self._eval_every)
        return PipelinedSteps(self, self.job, pauses, log.progress.write)

    @property
    def _idle_steps(self) -> list[int]:
        """Every how many steps a pipeline opens no batch ahead: what dynamic tables know is that after all of them."""
        checkpoint, publish = self.config.checkpoint, self.config.publish
        is_ahead = self._is_dynamic and not self.config.pipeline.is_off
        if not is_ahead or not (checkpoint.is_on or publish.is_on):
            return []
        return [PAUSE_EVERY, *filter(None, (checkpoint.every_steps, publish.every_steps))]

    @property
    def _is_dynamic(self) -> bool:
        return any(table.storage == "dynamic" for table in self.job.embeddings.tables)

    @property
    def _is_idle(self) -> bool:
        """Whether all rows may be read after this step, for all that pipelines did ahead."""
        pauses = self._idle_steps
        return not pauses or any(self._is_due(every) for every in pauses)

    def local_loss(self, total: Tensor) -> Tensor:
        """The loss that a rank differentiates: gradients are averaged over ranks, whose parts may differ in weight.

        Each of W ranks has Σ w·loss of its own samples; W / Σ w of all samples makes of their average the weighted mean
        over the global batch. Where all weights are 0 there is none, and nothing to learn.
        """
        return total * (self.job.mesh.world_size / self._batch_weight if self._batch_weight else 0.0)

    def state_dict(self) -> dict[str, object]:
        """The dense network and the optimizers' own state, for a checkpoint beside the rows."""
        with in_form("elsewhere"):
            return {
                "network": self.job.network.state_dict(),
                "linear": self.job.linear.state_dict(),
                "dense_optimizer": self._dense_optimizer.state_dict(),
                "embedding_optimizer": self._embedding_optimizer.state_dict(),
                "schedulers": [scheduler.state_dict() for scheduler in self._schedulers],
                "early_stopping": self.stopping.state_dict(),
                "step": self.step,
            }

    def load_state_dict(self, state: Mapping[str, Any], *, keep_stopping: bool = False) -> None:
        """Takes over what `state_dict` gave; rows and their state are read from the checkpoint beside it.

        Args:
            state: of a run with the same configuration.
            keep_stopping: do not forget what was evaluated since.
        """
        self.job.network.load_state_dict(state["network"])
        if "linear" in state:  # not in models of earlier versions
            self.job.linear.load_state_dict(state["linear"])
        self._dense_optimizer.load_state_dict(state["dense_optimizer"])
        of_rows = dict(state["embedding_optimizer"])
        if len(of_rows["param_groups"]) != len(self._embedding_optimizer.param_groups):  # tables are stored otherwise
            of_rows |= {key: self._embedding_optimizer.state_dict()[key] for key in ("state", "param_groups")}
        with in_form("elsewhere"):
            self._embedding_optimizer.load_state_dict(of_rows)
        for scheduler, values in zip(self._schedulers, state["schedulers"], strict=True):
            go_on(scheduler, values)
        if not keep_stopping:
            self.stopping.load_state_dict(state["early_stopping"])
        self.step = state["step"]

    def begin_with(self, state: Mapping[str, Any]) -> None:
        """Goes on with the optimizers' states of another run's model; its rows and its network are there already.

        Learning rates, and what else the configuration says of optimizers, stay.
        """
        for name, optimizer in zip(("dense_optimizer", "embedding_optimizer"), self._optimizers, strict=True):
            with in_form("elsewhere"):
                own = optimizer.state_dict()["param_groups"]
                optimizer.load_state_dict({**state[name], "param_groups": own})

    def resume(self, state: Mapping[str, Any]) -> None:
        """Takes over what a checkpoint has beside the rows; `run` goes on from its step.

        Raises:
            ConfigurationError: its batches came in another order than those of this run.
        """
        self.load_state_dict(state)
        self._loader.load_state_dict(state["progress"]["loader"])
        self._resumed = state["progress"]

    def _go_on(self, best: BestModel, drift: Drift | None) -> Interval:
        """Takes up what `resume` was given for the loop; returns what had added up by then."""
        if self._resumed is None:
            return Interval()
        progress, mesh = self._resumed, self.job.mesh
        best.kept_step = progress["best_step"]
        if drift is not None and progress["drift"] is not None:
            drift.load_state_dict(progress["drift"])
        if progress.get("window") is not None:  # in checkpoints of earlier versions and of survivors there is none
            self._progressive.load_state_dict(progress["window"])
        states = progress["random_states"]
        set_random_states(states[mesh.rank % len(states)], self.job.embeddings.device)
        return Interval.resumed(progress["intervals"], mesh.rank, mesh.world_size)

    def _standing(self, interval: Interval) -> Standing:
        """What this rank stands at, wherever it is."""
        lines = [self.step - self.step % every for every in (self.config.train.log_every, self._eval_every) if every]
        return Standing(self.step, self._is_between, interval.to_plain(self._loader.waited_s), max(lines))

    def _is_asked(self, checkpoints: Checkpoints) -> bool:
        return self._requests.end or checkpoints.is_due(self.step, is_asked=self._requests.checkpoint)

    def _checkpoint(
        self, checkpoints: Checkpoints, log: RunLog, interval: Interval, best: BestModel, drift: Drift | None
    ) -> None:
        """Writes a checkpoint, or begins to; ends the run where that is asked for. Steps are not charged for it."""
        started_s = time.perf_counter()
        checkpoints.wait()
        interval.loss += self._losses.rest()
        log.sync()
        if checkpoints.last != self.step:
            own = [interval.to_plain(self._loader.waited_s), random_states(self.job.embeddings.device)]
            intervals, states = zip(*gather_objects(self.job.mesh, own, WRITING), strict=True)
            state = self._whole_state(
                best,
                list(intervals),
                list(states),
                drift=None if drift is None else drift.state_dict(),
                window=self._progressive.state_dict(),
            )
            checkpoints.write(self.step, state, has_best=best.kept_step > 0)
        log.skip()
        self._requests.done()
        interval.started_s += time.perf_counter() - started_s
        if self._requests.end:
            checkpoints.wait()
            is_written = checkpoints.last == self.step > 0
            log.progress.write(checkpoints.farewell(self.step, self._requests.signal, is_written=is_written))
            raise Preempted if is_written else Terminated(self._requests.signal or signal.SIGTERM)

    def _publish(self, log: RunLog, interval: Interval) -> None:
        """Publishes a version. Steps are not charged for it."""
        started_s = time.perf_counter()
        self.publications.write(self.step, log.progress.write)
        log.skip()
        self._requests.published()
        interval.started_s += time.perf_counter() - started_s

    def _whole_state(
        self,
        best: BestModel,
        intervals: list[list[float]],
        states: list[dict[str, Any]],
        *,
        drift: object = None,
        window: object = None,
    ) -> dict[str, Any]:
        """All that a checkpoint has beside the rows; of each rank its interval and its random states."""
        progress = {
            "loader": self._loader.state_after(self.step),
            "intervals": intervals,
            "random_states": states,
            "best_step": best.kept_step,
            "drift": drift,
            "window": window,
        }
        return {**self.state_dict(), "progress": progress}

    def _state_before(
        self, best: BestModel, intervals: list[list[float]], states: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """The same where another step may have begun, which is not done."""
        whole, (step, buffers) = self._whole_state(best, intervals, states), self._buffers_before
        return whole | ({"network": whole["network"] | buffers} if step == self.step else {})

    def _batches(self) -> Generator[StepBatch]:
        """Epoch after epoch; raw rows once."""
        yield from self._loader
        while self._loader.num_batches is not None:
            yield from self._loader

    def _steps_left(self) -> int | None:
        if self.stopping.is_over:
            return 0
        return None if self.total_steps is None else self.total_steps - self.step

    def _keep_bad_rows(self, run: RunFolder, stack: ExitStack) -> None:
        """Where raw rows go that cannot be used: each part of a run has files of its own."""
        if isinstance(self._loader, RawLoader):
            path = run.bad_rows(self.job.mesh.rank, self.step)
            path.parent.mkdir(exist_ok=True)
            quarantine = Quarantine(path, self.config.data.max_bad_rows, keep_at=path)
            self._loader.quarantine = stack.enter_context(quarantine)

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.total_steps

    def _log(self, log: RunLog, interval: Interval, record: dict[str, float]) -> None:
        """Sums an interval over ranks, takes the mean of what else is recorded, and writes it."""
        resumed_s = time.perf_counter() - interval.started_s
        elapsed_s = interval.before_s + resumed_s
        waited_s = interval.waited_s + self._loader.waited_s
        record = record | self._clock.take(resumed_s, steps=interval.steps)
        own = (interval.loss, interval.weight, interval.samples, self._memory.read(), waited_s, *record.values())
        everyone = gather_objects(self.job.mesh, own, "summing the losses of all ranks")
        loss, weight, samples, memory_bytes, all_waited_s, *recorded = map(sum, zip(*everyone, strict=True))
        log.interval(
            self.step,
            loss=loss / weight if weight else math.nan,
            samples_per_s=samples / elapsed_s,
            memory_bytes=int(memory_bytes),
            waited_for_data_share=all_waited_s / (self.job.mesh.world_size * elapsed_s),
            memory_bytes_by_rank=[int(theirs[3]) for theirs in everyone],
            **self._lrs,
            **{name: value / self.job.mesh.world_size for name, value in zip(record, recorded, strict=True)},
        )

    def _current_lrs(self) -> dict[str, float]:
        """The learning rates of the next update: of the network and of every group of tables."""
        groups = zip(self.job.embeddings.groups, self._embedding_optimizer.param_groups, strict=True)
        return {
            "lr": self._dense_optimizer.param_groups[0]["lr"],
            **{f"embedding_lr/{group.name}": parameters["lr"] for group, parameters in groups},
        }

    def _validate(self, log: RunLog, best: BestModel) -> float:
        """Evaluates the validation split, and keeps the model if that is the best; returns how long it took."""
        started_s = time.perf_counter()
        split, metrics = self.config.data.validation, self.job.task.validate(self.job)
        is_better = self.stopping.add(self.step, metrics.loss)
        if self.stopping.patience and is_better and self.step != self.total_steps:
            best.keep(self.step, self.state_dict())
        log.evaluation(self.step, split, metrics.as_record())
        log.progress.write(f"{split} after step {self.step}: {metrics.text}")
        return time.perf_counter() - started_s


def _total_steps(config: Config, num_batches: int | None) -> int | None:
    if num_batches is None:
        return config.train.steps or None
    available = chosen(config.train.epochs) * num_batches
    return min(config.train.steps or available, available)


def make_optimizer(config: OptimizerConfig, network: torch.nn.Module) -> Optimizer:
    """The optimizer of the dense network; all parameters are updated in one call where they can be."""
    parameters, lr, weight_decay = list(network.parameters()), chosen(config.lr), config.weight_decay
    fused = all(parameter.is_floating_point() for parameter in parameters)
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=config.momentum, weight_decay=weight_decay, fused=fused)
    if config.name == "adagrad":
        return torch.optim.Adagrad(parameters, lr, weight_decay=weight_decay, fused=fused and parameters[0].is_cpu)
    return torch.optim.Adam(parameters, lr, weight_decay=weight_decay, fused=fused)
