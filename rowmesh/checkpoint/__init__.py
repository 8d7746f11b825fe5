"""Checkpoints by (table, row): written by any number of ranks, read by any other number."""

from rowmesh.checkpoint.manifest import CheckpointError, CheckpointWriteError, Manifest
from rowmesh.checkpoint.read import load, read_manifest
from rowmesh.checkpoint.write import save

__all__ = ["CheckpointError", "CheckpointWriteError", "Manifest", "load", "read_manifest", "save"]
