"""Which rank owns each row."""

from rowmesh.placement.dealt import DealtPlacement

__all__ = ["DealtPlacement"]
