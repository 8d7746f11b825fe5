"""Which rank owns each row, and which ranks hold a copy."""

from rowmesh.placement.dealt import DealtPlacement
from rowmesh.placement.plan import Plan, RowRange, TablePlan, TableShape

__all__ = ["DealtPlacement", "Plan", "RowRange", "TablePlan", "TableShape"]
