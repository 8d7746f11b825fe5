"""The dense networks of clicks: DLRM over tables of one dim, or a model that takes vectors by feature."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rowmesh.data.data_set import DataSet
from rowmesh.errors import ConfigurationError
from rowmesh.models import DLRM
from rowmesh.run.config import Config
from rowmesh.run.own_model import OwnModel, make_own
from rowmesh.run.tables import table_specs
from rowmesh.run.targets import targets_of
from rowmesh.tables import TableSpec


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
