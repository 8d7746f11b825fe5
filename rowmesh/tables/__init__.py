"""What a table is, which tables travel together, and how rows are stored."""

from rowmesh.tables.arena import DenseArena
from rowmesh.tables.group import TableGroup, fuse
from rowmesh.tables.initializer import Constant, Initializer, Normal, Uniform
from rowmesh.tables.spec import TableSpec

__all__ = [
    "Constant",
    "DenseArena",
    "Initializer",
    "Normal",
    "TableGroup",
    "TableSpec",
    "Uniform",
    "fuse",
]
