"""Initial values of rows: a counter-based function of (table key, row, element)."""

from rowmesh.ops.initialize.cpu import STREAM, initialize, initialize_slots

__all__ = ["STREAM", "initialize", "initialize_slots"]
