"""Stores of records: where rows go with their state that leave fast memory."""

from rowmesh.tables.dynamic.stores.opening import open_records
from rowmesh.tables.dynamic.stores.protocol import RecordStore
from rowmesh.tables.dynamic.stores.retry import Retry
from rowmesh.tables.dynamic.stores.shared import FrozenStore, SharedStore

__all__ = ["FrozenStore", "RecordStore", "Retry", "SharedStore", "open_records"]
