"""Models of what a user does next: packed events in, the representation after each event out."""

from rowmesh.models.sequence.encoder import KINDS, Kind, SequenceEncoder

__all__ = ["KINDS", "Kind", "SequenceEncoder"]
