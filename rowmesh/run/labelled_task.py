"""LabelledTask: what prepared and raw samples with labels have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from torch import nn

from rowmesh.collection.outputs import Embeddings
from rowmesh.data import Batch, Prepared
from rowmesh.data.raw import RawData
from rowmesh.ops.linear import Shape
from rowmesh.run.checks import check_batch
from rowmesh.run.config import Config, chosen
from rowmesh.run.graphs import Network
from rowmesh.run.job import Job
from rowmesh.run.network_memory import network_bytes
from rowmesh.run.networks import make_network, own_model, takes_vectors
from rowmesh.run.own_model import OwnModel
from rowmesh.run.report import click_loss
from rowmesh.run.targets import Target, is_click, targets_of
from rowmesh.run.task import Computed, StepBatch
from rowmesh.tables import TableSpec

Data = TypeVar("Data", Prepared, RawData)


@dataclass(frozen=True, eq=False)
class LabelledTask(Generic[Data]):
    """The part of a task that labels, dense and categorical features decide, wherever samples come from.

    Attributes:
        config: of the run.
        data: its samples.
    """

    config: Config
    data: Data

    @property
    def targets(self) -> tuple[Target, ...]:
        """Targets, one for each label."""
        return self._targets

    @cached_property
    def _targets(self) -> tuple[Target, ...]:
        return targets_of(self.config, self.data)

    @property
    def is_relative(self) -> bool:
        """A log-loss is in nats, another loss of any scale."""
        return not is_click(self.targets)

    def make_network(self, tables: Sequence[TableSpec]) -> tuple[nn.Module, OwnModel | None]:
        """DLRM, or a model that takes vectors by feature."""
        if takes_vectors(self.config, tables):
            own = own_model(self.config, self.data, tables)
            return own.network, own
        return make_network(self.config, self.data), None

    def network_bytes(self, world_size: int, *, trains: bool) -> int:
        """See `rowmesh.run.network_memory`."""
        return network_bytes(self.config, self.data, world_size, trains=trains)

    @property
    def has_times(self) -> bool:
        """Prepared data have none."""
        return False

    @property
    def has_scores(self) -> bool:
        """Prepared data have none."""
        return False

    def linear_rows(self) -> int:
        """Rows, one for each sample of a step."""
        return chosen(self.config.data.batch_size)

    @property
    def linear_rows_vary(self) -> bool:
        """Batches have one size."""
        return False

    def score_shapes(self) -> list[Shape]:
        """None."""
        return []

    def check_batch(self, batch: StepBatch, where: str) -> None:
        """Refuses values and labels that cannot be."""
        check_batch(as_clicks(batch), self.data.schema, where)

    def compute(
        self, job: Job, batch: StepBatch, embeddings: Embeddings, network: Network | None, samples: slice | None = None
    ) -> Computed:
        """Logits and losses of a batch, or of some of its samples."""
        clicks, part = as_clicks(batch), samples or slice(None)
        weights = None if clicks.weights is None else clicks.weights[part]
        labels, logits = clicks.labels[part], job.predict(clicks.dense[part], embeddings, network)
        return Computed(job.loss(logits, labels, weights), logits, labels, weights)

    def describe_loss(self, job: Job) -> str:
        """The terms of the loss; see `click_loss`."""
        return click_loss(job)


def as_clicks(batch: StepBatch) -> Batch:
    """The batch, which is of samples with labels."""
    assert isinstance(batch, Batch)
    return batch
