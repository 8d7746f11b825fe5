"""Data: from raw files or a planted model to batches."""

from rowmesh.data.inputs import DataSource
from rowmesh.data.loader import Batch, Loader
from rowmesh.data.planted import PlantedConfig
from rowmesh.data.prepare import prepare
from rowmesh.data.prepared import Prepared
from rowmesh.data.reorder import ReorderOptions, reorder
from rowmesh.data.schema import Schema
from rowmesh.data.splits import Splitter
from rowmesh.data.synthetic import synthesize

__all__ = [
    "Batch",
    "DataSource",
    "Loader",
    "PlantedConfig",
    "Prepared",
    "ReorderOptions",
    "Schema",
    "Splitter",
    "prepare",
    "reorder",
    "synthesize",
]
