"""Checkpoints by (table, row): written by any number of ranks, read by any other number."""

from rowmesh.checkpoint.chain import read_manifest
from rowmesh.checkpoint.manifest import Manifest
from rowmesh.checkpoint.read import load
from rowmesh.checkpoint.write import save
from rowmesh.errors import CheckpointError, CheckpointWriteError

__all__ = ["CheckpointError", "CheckpointWriteError", "Manifest", "load", "read_manifest", "save"]
