"""Job: the pieces of a run that training and evaluation share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rowmesh.collection import EmbeddingCollection
from rowmesh.data import Batch, Loader
from rowmesh.data.data_set import DataSet
from rowmesh.data.quarantine import NoBadRows
from rowmesh.data.raw import RawData, RawLoader
from rowmesh.embeddings import Embeddings
from rowmesh.errors import ConfigurationError
from rowmesh.linear_layers import FastLinear, fast_linear
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.models import DLRM
from rowmesh.ops.linear import Choices
from rowmesh.ops.transfer import upload
from rowmesh.tables import TableSpec, Tiers
from rowmesh.train.config import Config, chosen
from rowmesh.train.device import use_device
from rowmesh.train.graphs import Network
from rowmesh.train.own_model import OwnModel, make_own
from rowmesh.train.placement import Placement
from rowmesh.train.precision import check_precision, computing_in
from rowmesh.train.raw import Following, prepared
from rowmesh.train.splits import Part, training_source
from rowmesh.train.tables import table_specs
from rowmesh.train.targets import Target, targets_of, total_loss


@dataclass(frozen=True, eq=False)
class Job:
    """A run, set up: made from a configuration, a data set and a mesh.

    Attributes:
        config: the resolved configuration.
        mesh: the ranks.
        data: the data set, prepared or raw.
        embeddings: the tables.
        network: the dense network, the same on every rank.
        placement: which ranks hold each row, and why.
        linear: how the network's linear layers are computed.
        own: the network and its loss, where it takes vectors by feature: all but DLRM over tables of one dim.
        targets: what it predicts, one for each label.
    """

    config: Config
    mesh: Mesh
    data: DataSet
    embeddings: EmbeddingCollection
    network: nn.Module
    placement: Placement
    linear: FastLinear
    own: OwnModel | None = None
    targets: tuple[Target, ...] = (Target("label"),)

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
        dense = upload(dense, embeddings.values.device).to(embeddings.values.dtype)
        with self.linear(), computing_in(self.config.train.precision):
            if self.own is not None:
                logits = self.own.logits(dense, embeddings)
            else:
                logits = (network or self.network)(dense, embeddings.stacked())
        return logits.to(embeddings.values.dtype)

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        """The sum of the losses of some samples, each times its weight: of logits and labels `[B]` or `[B, L]`."""
        labels = upload(labels, logits.device).to(logits.dtype)
        if weights is not None:
            weights = upload(weights, logits.device).to(logits.dtype)
        if self.own is not None:
            return self.own.loss(logits, labels, weights)
        return total_loss(self.targets, logits, labels, weights)

    def training_loader(self, *, validates: bool, is_asked: Callable[[], bool]) -> Loader | RawLoader:
        """Iterates over what of the training samples belongs to this rank. Collective, where raw rows are followed.

        Args:
            validates: whether some samples are held out, where there is no split for validation.
            is_asked: whether this rank was asked to end the run, while it waits for rows.
        """
        if not isinstance(self.data, RawData):
            source = training_source(self.config, prepared(self.data, "training"), validates=validates)
            return self.loader(source, shuffle=self.config.data.shuffle)
        return self._raw_loader(self.data, Following(self.mesh, is_asked) if self.data.follow else None)

    def evaluation_loader(self, samples: str | Part) -> Loader | RawLoader:
        """Iterates over what belongs to this rank of a split, or of raw rows in a folder or file."""
        if isinstance(self.data, RawData):
            return self._raw_loader(self.data, location=str(samples))
        return self.loader(samples)

    def _raw_loader(self, data: RawData, agree: Following | None = None, *, location: str = "") -> RawLoader:
        return RawLoader(
            data.source(location),
            data.schema,
            batch_size=chosen(self.config.data.batch_size),
            quarantine=NoBadRows(),
            rank=self.mesh.rank,
            world_size=self.mesh.world_size,
            seed=data.hash_seed,
            multi_hot=data.multi_hot,
            agree=agree,
        )

    def loader(self, samples: str | Part, *, shuffle: bool = False) -> Loader:
        """Iterates over what of a split, or of a part of one, belongs to this rank."""
        part = samples if isinstance(samples, Part) else None
        return Loader(
            prepared(self.data, "a split"),
            part.split if part else str(samples),
            span=part.span if part else None,
            batch_size=chosen(self.config.data.batch_size),
            rank=self.mesh.rank,
            world_size=self.mesh.world_size,
            shuffle=shuffle,
            seed=self.config.train.seed,
        )


def build(config: Config, mesh: Mesh, data: DataSet, placement: Placement, *, trains: bool = True) -> Job:
    """Makes the tables and the network for a data set.

    Collective and blocking: every rank calls it, with the same configuration. For training it measures how linear
    layers are computed best; a model that was trained says so itself.

    Raises:
        ConfigurationError: tables, sizes or a placement that cannot work.
    """
    tables = table_specs(config.tables, data)
    check_precision(config.train.precision, config.train.device, tables)
    seed, device = config.train.seed, use_device(config)
    torch.manual_seed(seed)
    dtype = network_dtype(tables)
    targets = targets_of(config, data)
    own = own_model(config, data, tables) if takes_vectors(config, tables) else None
    network = own.network if own else make_network(config, data).to(dtype)
    transport = config.parallel.transport
    synchronization = Synchronization(config.parallel.synchronization, config.parallel.sync_every)
    embeddings = EmbeddingCollection(
        tables,
        mesh=mesh,
        seed=seed,
        transport=transport,
        plan=placement.plan,
        synchronization=synchronization,
        tiers=_tiers(config),
        device=device,
        wire_dtype=torch.bfloat16 if config.parallel.wire_dtype == "bfloat16" else None,
    )
    network = network.to(embeddings.device)
    linear = _linear(config, mesh, network) if trains else FastLinear(Choices(), "by torch")
    return Job(config, mesh, data, embeddings, network, placement, linear, own, targets)


def _linear(config: Config, mesh: Mesh, network: nn.Module) -> FastLinear:
    if config.train.precision == "bfloat16":
        return FastLinear(Choices(), "in bfloat16, by torch; rows, parameters and optimizer state are not")
    return fast_linear(network, chosen(config.data.batch_size), mesh=mesh, use=config.train.linear)


def takes_vectors(config: Config, tables: Sequence[TableSpec]) -> bool:
    """Whether the network takes vectors by feature, as all but DLRM over tables of one dim do."""
    return not config.model.is_dlrm or len({table.dim for table in tables}) > 1


def own_model(config: Config, data: DataSet, tables: Sequence[TableSpec]) -> OwnModel:
    """A model that takes vectors by feature, for a data set."""
    targets, weighted = targets_of(config, data), data.schema.weight is not None
    dtype = network_dtype(tables)
    return make_own(config.model, tables, data.num_dense, dtype, targets, weighted=weighted)


def make_network(config: Config, data: DataSet) -> DLRM:
    """DLRM for a data set whose tables have one dim, in torch's usual precision."""
    tables = table_specs(config.tables, data)
    return DLRM(
        num_dense=data.num_dense,
        num_features=sum(len(table.features) for table in tables),
        dim=tables[0].dim,
        bottom=config.model.bottom,
        top=config.model.top,
        num_labels=len(data.schema.labels),
    )


def _tiers(config: Config) -> Tiers:
    tiers = config.tiers
    return Tiers(
        fast_share=tiers.fast_share,
        fast_rows=tiers.fast_rows,
        folder=Path(tiers.folder) if tiers.folder else None,
        threads=tiers.threads,
        direct=tiers.direct,
        verify=config.pipeline.verify,
        timeout_s=config.parallel.timeout_s,
    )


def network_dtype(tables: Sequence[TableSpec]) -> torch.dtype:
    """float64 where all tables are, else float32 (bfloat16 rows are pooled in float32).

    Raises:
        ConfigurationError: some tables are float64 and some are not.
    """
    double = [table.name for table in tables if table.dtype == torch.float64]
    if 0 < len(double) < len(tables):
        raise ConfigurationError(
            f"tables {', '.join(double)} are float64 and others are not; the network needs one precision"
        )
    return torch.float64 if double else torch.float32
