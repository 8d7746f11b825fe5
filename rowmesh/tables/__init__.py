"""What a table is, which tables travel together, and how rows are stored."""

from rowmesh.tables.arena import DenseArena
from rowmesh.tables.backing import BackingStore, MemoryStore
from rowmesh.tables.file_store import FileStore
from rowmesh.tables.group import TableGroup, fuse
from rowmesh.tables.initializer import Constant, Initializer, Normal, Uniform
from rowmesh.tables.leased_rows import Lease
from rowmesh.tables.spec import TableSpec
from rowmesh.tables.tensor_train import TensorTrain, TensorTrainShape
from rowmesh.tables.tiered import TieredArena
from rowmesh.tables.tiers import Tiers

__all__ = [
    "BackingStore",
    "Constant",
    "DenseArena",
    "FileStore",
    "Initializer",
    "Lease",
    "MemoryStore",
    "Normal",
    "TableGroup",
    "TableSpec",
    "TensorTrain",
    "TensorTrainShape",
    "TieredArena",
    "Tiers",
    "Uniform",
    "fuse",
]
