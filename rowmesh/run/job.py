"""Job: the tables and the network of a run, set up on its ranks, with which a task computes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.outputs import Embeddings
from rowmesh.data import Batch, Loader, Prepared, Schema
from rowmesh.data.raw import RawData
from rowmesh.mesh import Mesh
from rowmesh.models.linear_layers import FastLinear
from rowmesh.ops.transfer import upload
from rowmesh.run.config import Config, chosen
from rowmesh.run.graphs import Network
from rowmesh.run.own_model import OwnModel
from rowmesh.run.placement import Placement
from rowmesh.run.precision import computing_in
from rowmesh.run.splits import Part
from rowmesh.run.table_data import TableData
from rowmesh.run.targets import Target, total_loss


@dataclass(frozen=True, eq=False)
class Job:
    """A run, set up: made of a task on a mesh by `rowmesh.run.build`.

    Attributes:
        config: the resolved configuration.
        mesh: the ranks.
        data: what is read.
        targets: what is predicted, one for each label; none of sequences.
        embeddings: the tables.
        network: the dense network, the same on every rank.
        placement: which ranks hold each row, and why.
        linear: how the network's linear layers are computed.
        own: the network and its loss, where it takes vectors by feature: all but DLRM over tables of one dim.
    """

    config: Config
    mesh: Mesh
    data: TableData
    targets: tuple[Target, ...]
    embeddings: EmbeddingCollection
    network: nn.Module
    placement: Placement
    linear: FastLinear
    own: OwnModel | None = None

    @property
    def clicks(self) -> Prepared:
        """The data, where they are samples with labels."""
        assert isinstance(self.data, Prepared)
        return self.data

    @property
    def schema(self) -> Schema:
        """The schema of samples with labels, prepared or raw."""
        assert isinstance(self.data, Prepared | RawData)
        return self.data.schema

    def logits(self, batch: Batch) -> Tensor:
        """Logits `[B]`, or `[B, L]` of several labels, of this rank's samples. Collective: every rank calls it."""
        return self.predict(batch.dense, self.embeddings(batch.sparse))

    def predict(self, dense: Tensor, embeddings: Embeddings, network: Network | None = None) -> Tensor:
        """Logits `[B]`, or `[B, L]` of several labels.

        Args:
            dense: `[B, …]`, their dense features.
            embeddings: their vectors.
            network: what computes them in place of the network, where that is DLRM over tables of one dim.
        """
        dense = upload(dense, embeddings.device).to(embeddings.dtype)
        with self.linear(), computing_in(self.config.train.precision):
            if self.own is not None:
                logits = self.own.logits(dense, embeddings)
            else:
                logits = (network or self.network)(dense, embeddings.stacked())
        return logits.to(embeddings.dtype)

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The sum of the losses of some samples, each times its weight: of logits and labels `[B]` or `[B, L]`."""
        labels = upload(labels, logits.device).to(logits.dtype)
        if weights is not None:
            weights = upload(weights, logits.device).to(logits.dtype)
        if self.own is not None:
            return self.own.loss(logits, labels, weights)
        return total_loss(self.targets, logits, labels, weights)

    def loader(self, samples: str | Part, *, shuffle: bool = False) -> Loader:
        """Iterates over what of a split, or of a part of one, belongs to this rank."""
        part = samples if isinstance(samples, Part) else None
        return Loader(
            self.clicks,
            part.split if part else str(samples),
            span=part.span if part else None,
            batch_size=chosen(self.config.data.batch_size),
            rank=self.mesh.rank,
            world_size=self.mesh.world_size,
            shuffle=shuffle,
            seed=self.config.train.seed,
        )
