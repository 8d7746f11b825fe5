"""Which rank owns each row, and which ranks hold a copy."""

from rowmesh.placement.address_map import AddressMap, Piece
from rowmesh.placement.plan import Plan, RowRange, TablePlan, TableShape

__all__ = ["AddressMap", "Piece", "Plan", "RowRange", "TablePlan", "TableShape"]
