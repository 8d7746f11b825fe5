"""The training loop: an ordinary one, on every rank alike."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from rowmesh.data import Batch
from rowmesh.mesh.waiting import gather_objects
from rowmesh.observe import MemoryGauge
from rowmesh.optim import EmbeddingOptimizer
from rowmesh.train.checks import check_batch, check_loss, naming_lost_peers
from rowmesh.train.config import OptimizerConfig
from rowmesh.train.drift import configured_drift
from rowmesh.train.evaluate import evaluate
from rowmesh.train.gradients import SharedGradients
from rowmesh.train.job import Job
from rowmesh.train.run_folder import RunFolder
from rowmesh.train.run_log import RunLog
from rowmesh.train.schedule import make_scheduler


@dataclass
class Interval:
    """Sums on this rank since the last line of the log."""

    loss: float = 0.0
    samples: int = 0
    steps: int = 0
    waited_s: float = 0.0
    started_s: float = field(default_factory=time.perf_counter)


class Trainer:
    """Trains a job for the configured steps.

    Attributes:
        step: steps done.
        total_steps: steps of the run.

    Args:
        job: what to train.
    """

    def __init__(self, job: Job) -> None:
        config = job.config
        self.job, self.config, self.step = job, config, 0
        self._loader = job.loader(config.data.train, shuffle=config.data.shuffle)
        epochs = config.train.epochs * self._loader.num_batches
        self.total_steps = min(config.train.steps or epochs, epochs)
        self._gradients = SharedGradients(job.network, job.mesh)
        self._dense_optimizer = make_optimizer(config.optimizer, job.network)
        self._embedding_optimizer = EmbeddingOptimizer(job.embeddings)
        self._optimizers: list[Optimizer] = [self._dense_optimizer, self._embedding_optimizer]
        self._memory = MemoryGauge()
        self._lrs: dict[str, float] = {}
        self._schedulers = [make_scheduler(config.schedule, each, self.total_steps) for each in self._optimizers]

    def run(self, run: RunFolder) -> None:
        """Trains, evaluating on the validation split now and then. Collective: every rank calls it."""
        with (
            RunLog(self.job, run, self.total_steps) as log,
            naming_lost_peers(self.job.mesh, "training"),
            configured_drift(self.job) as drift,
        ):
            interval = Interval()
            for batch in self._batches():
                interval.loss += self.train_step(batch)
                interval.samples += len(batch.labels)
                interval.steps += 1
                log.step(self.step)
                if drift is not None and (text := drift.after_step(batch.sparse)):
                    log.progress.say(f"drift after step {self.step}: {text}")
                if self._is_due(self.config.train.log_every):
                    self._log(log, interval)
                    interval = Interval(waited_s=-self._loader.waited_s)
                if self.config.train.eval_every and self._is_due(self.config.train.eval_every):
                    interval.started_s += self._validate(log)

    def train_step(self, batch: Batch) -> float:
        """One step; returns the sum of the losses of this rank's samples. Collective: every rank calls it."""
        where = f"step {self.step + 1} on rank {self.job.mesh.rank}"
        check_batch(batch, self.job.data.schema.dense, where)
        logits = self.job.logits(batch)
        total = F.binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype), reduction="sum")
        check_loss(total, where)
        self._gradients.zero()
        self._embedding_optimizer.zero_grad()
        self.local_loss(total).backward()
        self._gradients.average()
        self._lrs = self._current_lrs()
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        self.step += 1
        return float(total.detach())

    def local_loss(self, total: Tensor) -> Tensor:
        """What a rank differentiates: gradients are averaged over ranks, whose parts may differ in size."""
        number = self.step % self._loader.num_batches
        rest = self._loader.num_samples - number * self._loader.batch_size
        return total * (self.job.mesh.world_size / min(self._loader.batch_size, rest))

    def state_dict(self) -> dict[str, object]:
        """The dense network and the optimizers' own state, for a checkpoint beside the rows."""
        return {
            "network": self.job.network.state_dict(),
            "dense_optimizer": self._dense_optimizer.state_dict(),
            "embedding_optimizer": self._embedding_optimizer.state_dict(),
            "step": self.step,
        }

    def _batches(self) -> Iterator[Batch]:
        while self.step < self.total_steps:
            for batch in self._loader:
                yield batch
                if self.step == self.total_steps:
                    return

    def _is_due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.total_steps

    def _log(self, log: RunLog, interval: Interval) -> None:
        """Sums an interval over ranks and writes it."""
        elapsed_s = time.perf_counter() - interval.started_s
        waited_s = interval.waited_s + self._loader.waited_s
        own = (interval.loss, interval.samples, self._memory.read(), waited_s)
        everyone = gather_objects(self.job.mesh, own, "summing the losses of all ranks")
        loss, samples, memory_bytes, all_waited_s = map(sum, zip(*everyone, strict=True))
        log.interval(
            self.step,
            loss=loss / samples,
            samples_per_s=samples / elapsed_s,
            memory_bytes=int(memory_bytes),
            waited_for_data_share=all_waited_s / (self.job.mesh.world_size * elapsed_s),
            **self._lrs,
        )

    def _current_lrs(self) -> dict[str, float]:
        """The learning rates of the next update: of the network and of every group of tables."""
        groups = zip(self.job.embeddings.groups, self._embedding_optimizer.param_groups, strict=True)
        return {
            "lr": self._dense_optimizer.param_groups[0]["lr"],
            **{f"embedding_lr/{group.name}": parameters["lr"] for group, parameters in groups},
        }

    def _validate(self, log: RunLog) -> float:
        """Evaluates the validation split; returns how long it took."""
        started_s = time.perf_counter()
        split = self.config.data.validation
        metrics = evaluate(self.job, split)
        log.evaluation(self.step, split, metrics.as_record())
        scores = f"AUC {metrics.auc:.5f}, log-loss {metrics.log_loss:.5f}"
        log.progress.say(f"{split} after step {self.step}: {scores}")
        return time.perf_counter() - started_s


def make_optimizer(config: OptimizerConfig, network: torch.nn.Module) -> Optimizer:
    """The optimizer of the dense network."""
    parameters, lr, weight_decay = network.parameters(), config.lr, config.weight_decay
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=config.momentum, weight_decay=weight_decay)
    if config.name == "adagrad":
        return torch.optim.Adagrad(parameters, lr, weight_decay=weight_decay)
    return torch.optim.Adam(parameters, lr, weight_decay=weight_decay)
