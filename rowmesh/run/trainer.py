"""Trainer: what one step of a run is, and the state of all but the rows."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rowmesh._support.faults import reach
from rowmesh._support.random_states import seed_step
from rowmesh.collection.optimizer import EmbeddingOptimizer
from rowmesh.collection.state_form import in_form
from rowmesh.observe.step_clock import StepClock
from rowmesh.pipeline import BatchInFlight
from rowmesh.run.config import Config, OptimizerConfig, chosen
from rowmesh.run.gradients import SharedGradients, saved_buffers
from rowmesh.run.graphs import training_network
from rowmesh.run.job import Job
from rowmesh.run.losses import Losses
from rowmesh.run.progressive import Progressive
from rowmesh.run.requests import NUM_FLAGS, Requests
from rowmesh.run.schedule import go_on, make_scheduler
from rowmesh.run.stopping import EarlyStopping
from rowmesh.run.task import Computed, StepBatch, Task


class Trainer:
    """Does the steps of a job. Every rank makes one.

    Args:
        job: what to train.
        task: what it is trained for.

    Attributes:
        step: steps done, of the model that there is: fewer than were trained where the best model was taken back.
        trained_steps: steps done in all.
        total_steps: steps of the run, at most; None: until there are no more rows.
        is_between: whether the last step is done, and all that follows it, a line of the log say; the loop sets it.
        loader: of the training data.
        requests: what ranks ask each other for along with the gradients.
        stopping: what evaluations found, and which was the best.
        losses: those that the host does not know yet.
        progressive: collects what is predicted before it is trained on.
        clock: where the time of steps goes.
        lrs: the learning rates of the last update: of the network and of every group of tables.
        keeps_buffers: whether a step leaves a copy of the network's buffers as they were before it.
        progress: what the checkpoint has of the loop that this goes on from; None: it begins.
    """

    def __init__(self, job: Job, task: Task) -> None:
        config = job.config
        self.job, self.task, self.config, self.step, self.trained_steps = job, task, config, 0, 0
        self.stopping = EarlyStopping(chosen(config.train.patience), is_relative=task.is_relative)
        self.requests = Requests(config.checkpoint, job.mesh, 60.0 * config.publish.every_minutes)
        self.loader = task.loader(
            job, validates=chosen(config.train.eval_every) > 0, is_asked=lambda: bool(self.requests.signal)
        )
        self.total_steps = _total_steps(config, self.loader.num_batches)
        self._gradients = SharedGradients(job.network, job.mesh, job.embeddings.transport, NUM_FLAGS)
        self._network = training_network(job.network, config)
        self._dense_optimizer = make_optimizer(config.optimizer, job.network)
        self._embedding_optimizer = EmbeddingOptimizer(job.embeddings)
        self._optimizers: list[Optimizer] = [self._dense_optimizer, self._embedding_optimizer]
        self._schedulers = [make_scheduler(config.schedule, each, self.total_steps) for each in self._optimizers]
        self.losses, self.clock = Losses(job.embeddings.device), StepClock()
        self.progressive = Progressive(job, config.train.progressive_every)
        self.lrs: dict[str, float] = {}
        self.is_between, self.keeps_buffers = True, False
        self.progress: Mapping[str, Any] | None = None
        self._buffers_before = (-1, dict[str, Tensor]())  # and after which step
        self._batch_weight = 0.0

    @property
    def steps_left(self) -> int | None:
        """Steps that the run has left, at most; None: their number is not known."""
        if self.stopping.is_over:
            return 0
        return None if self.total_steps is None else self.total_steps - self.step

    def batches(self) -> Generator[StepBatch]:
        """Epoch after epoch; raw rows once."""
        yield from self.loader
        while self.loader.num_batches is not None:
            yield from self.loader

    def train_step(self, batch: StepBatch) -> float:
        """Trains on a batch; returns the sum of the losses that the host got to know: on a CPU those of the batch.

        Collective: every rank calls it.
        """
        self._begin_step(batch)
        embeddings = self.job.embeddings(batch.sparse)
        self.clock.lap("rows")
        computed = self.task.compute(self.job, batch, embeddings, self._network)
        self._gradients.sends_early()
        total = self._backward(computed)
        self.clock.lap("network")
        self._end_step()
        return total

    def train_window(self, window: BatchInFlight[StepBatch]) -> float:
        """Trains on a batch by micro-batches; returns the same. Collective: every rank calls it."""
        batch, total = window.item, 0.0
        self._begin_step(batch)
        for part in window:
            embeddings = part.embeddings
            self.clock.lap("rows")
            total += self._backward(self.task.compute(self.job, batch, embeddings, self._network, part.samples))
            self.clock.lap("network")
        self._end_step()
        return total

    @property
    def _where(self) -> str:
        return f"step {self.step + 1} on rank {self.job.mesh.rank}"

    def _begin_step(self, batch: StepBatch) -> None:
        self.clock.lap("data")
        self.task.check_batch(batch, self._where)
        self._batch_weight = self.task.global_weight(self.job, batch, self.step)
        self._gradients.zero()
        self._embedding_optimizer.zero_grad()
        seed_step(self.config.train.seed, self.step, self.job.mesh.rank)
        if self.keeps_buffers:  # the network changes them before the step is done
            buffers = {name: buffer.clone() for name, buffer in saved_buffers(self.job.network).items()}
            self._buffers_before = self.step, buffers
        self.clock.lap("other")

    def _backward(self, computed: Computed) -> float:
        """Adds the gradients of some samples; returns the sum of the losses that the host got to know."""
        reach("loop.backward")
        known = self.losses.add(computed.total, self._where)
        if computed.outputs is not None and computed.labels is not None:
            self.progressive.add(computed.outputs, computed.labels, computed.weights)
        self.local_loss(computed.total).backward()
        return known

    def _end_step(self) -> None:
        """Updates rows and network; rows first: under a pipeline they do so beside the rest."""
        self.lrs = self._current_lrs()
        if most := self.config.train.clip_grad_norm:  # of what all ranks have together: the average comes before
            self._average()
            self._embedding_optimizer.clip_grad_norm_(most, self.job.network.parameters())
        self._embedding_optimizer.step()
        self.clock.lap("update")
        if not most:
            self._average()
        self.is_between = False
        self._dense_optimizer.step()
        for scheduler in self._schedulers:
            scheduler.step()
        self.clock.lap("optimizer")
        self.step += 1

    def _average(self) -> None:
        """Averages the network's gradients; with them ranks learn what others were asked for."""
        self.requests.put(self._gradients.flags)
        self._gradients.average()
        self.requests.take(self._gradients.flags)
        self.clock.lap("all_reduce")

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
        """Takes over what a checkpoint has beside the rows; the loop goes on from its step.

        Raises:
            ConfigurationError: its batches came in another order than those of this run.
        """
        self.load_state_dict(state)
        self.progress = state["progress"]
        self.loader.load_state_dict(state["progress"]["loader"])

    def buffers_before(self) -> Mapping[str, Tensor]:
        """The network's buffers as they were after `step` steps, where another one has begun."""
        step, buffers = self._buffers_before
        return buffers if step == self.step else {}

    def _current_lrs(self) -> dict[str, float]:
        """The learning rates of the next update: of the network and of every group of tables."""
        groups = zip(self.job.embeddings.groups, self._embedding_optimizer.param_groups, strict=True)
        return {
            "lr": self._dense_optimizer.param_groups[0]["lr"],
            **{f"embedding_lr/{group.name}": parameters["lr"] for group, parameters in groups},
        }


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
