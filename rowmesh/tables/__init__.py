"""Specs of tables, groups of tables that travel together, and stores of rows."""

from rowmesh.tables.backing import BackingStore, MemoryStore
from rowmesh.tables.cached import CachedArena, PinnedRows
from rowmesh.tables.dense import DenseArena
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.file_store import FileStore
from rowmesh.tables.group import TableGroup, fuse
from rowmesh.tables.initializer import Constant, Initializer, Normal, Uniform
from rowmesh.tables.row_store import RowStore
from rowmesh.tables.spec import TableSpec
from rowmesh.tables.tensor_train import TensorTrain, TensorTrainShape
from rowmesh.tables.tiers import Tiers

__all__ = [
    "BackingStore",
    "CachedArena",
    "Constant",
    "DenseArena",
    "Dynamic",
    "FileStore",
    "Initializer",
    "MemoryStore",
    "Normal",
    "PinnedRows",
    "RowStore",
    "TableGroup",
    "TableSpec",
    "TensorTrain",
    "TensorTrainShape",
    "Tiers",
    "Uniform",
    "fuse",
]
