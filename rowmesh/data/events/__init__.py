"""Events: what users did, and when; and the sequences of items that a sequence model reads."""

from rowmesh.data.events.loader import SequenceLoader
from rowmesh.data.events.prepare import prepare_events
from rowmesh.data.events.schema import EventSchema, find_event_schema
from rowmesh.data.events.sequences import Sequences

__all__ = ["EventSchema", "SequenceLoader", "Sequences", "find_event_schema", "prepare_events"]
