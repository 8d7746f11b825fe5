"""ClickTask: labels of samples, predicted from dense and categorical features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from rowmesh.data import Batch, Prepared
from rowmesh.embeddings import Embeddings
from rowmesh.tables import TableSpec
from rowmesh.train.advice import advice
from rowmesh.train.checks import check_batch
from rowmesh.train.config import Config, chosen
from rowmesh.train.defaults import choose_defaults
from rowmesh.train.evaluate import evaluate
from rowmesh.train.evaluation import Evaluation
from rowmesh.train.fingerprint import Fingerprint, fingerprint
from rowmesh.train.graphs import Network
from rowmesh.train.job import Job
from rowmesh.train.network_memory import network_bytes
from rowmesh.train.networks import make_network, own_model, takes_vectors
from rowmesh.train.own_model import OwnModel
from rowmesh.train.report import click_data, click_loss, results
from rowmesh.train.splits import check_file, check_split, check_training_splits, training_source, validation_source
from rowmesh.train.stopping import EarlyStopping
from rowmesh.train.targets import Target, is_click, targets_of
from rowmesh.train.task import Computed, StepBatch, TrainingLoader
from rowmesh.train.together import summed


@dataclass(frozen=True, eq=False)
class ClickTask:
    """What every model but those of sequences does.

    Attributes:
        config: of the run.
        data: its samples.
    """

    config: Config
    data: Prepared

    @property
    def targets(self) -> tuple[Target, ...]:
        """One for each label."""
        return self._targets

    @cached_property
    def _targets(self) -> tuple[Target, ...]:
        return targets_of(self.config, self.data)

    @property
    def is_relative(self) -> bool:
        """A log-loss is in nats, another loss of any scale."""
        return not is_click(self.targets)

    def choose_defaults(self) -> tuple[Config, list[str]]:
        """See `rowmesh.train.defaults`."""
        return choose_defaults(self.config, self.data)

    def check(self) -> None:
        """Refuses splits that are not there, and losses that do not fit the labels."""
        check_training_splits(self.config, self.data)
        targets_of(self.config, self.data)

    def make_network(self, tables: Sequence[TableSpec]) -> tuple[nn.Module, OwnModel | None]:
        """DLRM, or a model that takes vectors by feature."""
        if takes_vectors(self.config, tables):
            own = own_model(self.config, self.data, tables)
            return own.network, own
        return make_network(self.config, self.data), None

    def network_bytes(self, world_size: int, *, trains: bool) -> int:
        """See `rowmesh.train.network_memory`."""
        return network_bytes(self.config, self.data, world_size, trains=trains)

    def linear_rows(self) -> int:
        """One a sample."""
        return chosen(self.config.data.batch_size)

    def fingerprint(self) -> Fingerprint:
        """Of vocabularies and dense features."""
        return fingerprint(self.data)

    def check_split(self, key: str, split: str) -> str:
        """See `rowmesh.train.splits`; its file is looked at, too."""
        check_file(self.data, check_split(self.data, key, split))
        return split

    @property
    def tested(self) -> str:
        """The split for it, where there is one."""
        return self.config.data.test if self.config.data.test in self.data.splits else ""

    def loader(self, job: Job, *, validates: bool, is_asked: Callable[[], bool]) -> TrainingLoader:
        """Of the training split, but for what is cut off for validation."""
        return job.loader(
            training_source(self.config, self.data, validates=validates), shuffle=self.config.data.shuffle
        )

    def check_batch(self, batch: StepBatch, where: str) -> None:
        """Refuses values and labels that cannot be."""
        check_batch(as_clicks(batch), self.data.schema, where)

    def global_weight(self, job: Job, batch: StepBatch, step: int) -> float:
        """Σ w over the samples of all ranks; collective where samples have weights, else their number."""
        if as_clicks(batch).weights is not None:
            return summed(job.mesh, batch.weight, "summing the sample weights of all ranks")
        batch_size, validates = chosen(self.config.data.batch_size), chosen(self.config.train.eval_every) > 0
        num_samples = training_source(self.config, self.data, validates=validates).samples
        number = step % -(-num_samples // batch_size)
        return float(min(batch_size, num_samples - number * batch_size))

    def compute(
        self, job: Job, batch: StepBatch, embeddings: Embeddings, network: Network | None, samples: slice | None = None
    ) -> Computed:
        """Logits and their losses."""
        return compute(job, batch, embeddings, network, samples)

    def evaluate(self, job: Job, split: str, on_batch: Callable[[int], None]) -> Evaluation:
        """Every sample once."""
        return evaluate(job, split, on_batch)

    def validate(self, job: Job) -> Evaluation:
        """On the split for it, or what is cut off the training split."""
        source = validation_source(self.config, self.data)
        assert source is not None, "checked before the run"
        return evaluate(job, source)

    def num_evaluation_batches(self, split: str) -> int:
        """As many as hold all samples."""
        return -(-self.data.splits[split].samples // chosen(self.config.data.batch_size))

    def chosen_by(self, loss: float | None) -> dict[str, float | None]:
        """The loss, by its name."""
        return {"validation_log_loss" if is_click(self.targets) else "validation_loss": loss}

    def describe(self, job: Job) -> list[tuple[str, str]]:
        """Splits, features and how dense ones were transformed."""
        return click_data(job.clicks)

    def describe_loss(self, job: Job) -> str:
        """Of what it is the sum."""
        return click_loss(job)

    def results(self, split: str, evaluation: Evaluation) -> list[str]:
        """Beside the base rate and what is planted."""
        return results(split, evaluation, self.data.splits[split])

    def optimum(self, split: str) -> dict[str, float] | None:
        """Of the true probabilities."""
        return self.data.splits[split].optimum

    def advice(self, job: Job, stopping: EarlyStopping, trained_steps: int, evaluation: Evaluation | None) -> list[str]:
        """See `rowmesh.train.advice`."""
        return advice(job, stopping, trained_steps, evaluation)


def compute(
    job: Job, batch: StepBatch, embeddings: Embeddings, network: Network | None, samples: slice | None
) -> Computed:
    """Logits and losses of a batch, or of some of its samples."""
    clicks, part = as_clicks(batch), samples or slice(None)
    weights = None if clicks.weights is None else clicks.weights[part]
    labels, logits = clicks.labels[part], job.predict(clicks.dense[part], embeddings, network)
    return Computed(job.loss(logits, labels, weights), logits, labels, weights)


def as_clicks(batch: StepBatch) -> Batch:
    """The batch, which is of samples with labels."""
    assert isinstance(batch, Batch)
    return batch
