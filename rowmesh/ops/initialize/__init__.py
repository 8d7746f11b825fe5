"""Initial values of rows: a counter-based function of (table key, row, element)."""

from rowmesh.ops.initialize.cpu import initialize

__all__ = ["initialize"]
