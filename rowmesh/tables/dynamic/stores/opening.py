"""A store of records by its URL."""

from __future__ import annotations

import os

from rowmesh._support.files.names import file_stem
from rowmesh._support.files.places import local_path
from rowmesh.errors import ConfigurationError
from rowmesh.tables.dynamic.stores.protocol import RecordStore
from rowmesh.tables.dynamic.stores.redis import RedisRecords
from rowmesh.tables.dynamic.stores.redis_connection import RedisConnection
from rowmesh.tables.dynamic.stores.retry import Retry
from rowmesh.tables.dynamic.stores.rocksdb import RocksRecords
from rowmesh.tables.dynamic.stores.slots import file_records, memory_records

REDIS = ("redis://", "rediss://", "unix://")
_FORMS = "memory, file:FOLDER, rocksdb:FOLDER, redis://HOST:PORT/DATABASE or rediss://… for TLS"


def open_records(
    url: str,
    table: str,
    record_bytes: int,
    *,
    max_records: int | None,
    rank: int = 0,
    retry: Retry | None = None,
) -> RecordStore:
    """Opens the store of a table's records on a rank.

    Args:
        url: `memory`, `file:FOLDER`, `rocksdb:FOLDER` (each rank and table has a place of its own in the folder), or
            the URL of a Redis server, where each rank of each run has keys of its own, which go when the store is
            closed. `$NAME` stands for the variable NAME of the environment.
        table: its name.
        record_bytes: of a record.
        max_records: that memory or a file holds at most; None: any number, but in a file.
        rank: of this process.
        retry: for a store that goes away; by default for 30 s.

    Raises:
        ConfigurationError: the URL is none of these, or a package is not installed.
        StoreError: the store does not answer; names it.

    Example:
        >>> open_records("memory", "user", 64, max_records=1000).record_bytes
        64
    """
    if record_bytes < 1 or (max_records is not None and max_records < 1):
        raise ConfigurationError(
            f"records of table {table!r} need 1 byte or more and room for 1 or more, got {record_bytes} and "
            f"{max_records}"
        )
    url = os.path.expandvars(url)
    if url == "memory":
        return memory_records(table, max_records, record_bytes)
    if url.startswith(REDIS):
        return RedisRecords(table, RedisConnection(url, retry), record_bytes)
    kind, _, place = url.partition(":")
    if kind not in ("file", "rocksdb") or not place:
        raise ConfigurationError(f"{url.split('@')[-1]!r} is no store of records; there are {_FORMS}")
    path = local_path(place, f"the folder of {kind}:") / f"{file_stem(table)}-{rank}"
    if kind == "rocksdb":
        return RocksRecords(table, path, record_bytes, retry=retry)
    if max_records is None:
        raise ConfigurationError(f"records of table {table!r} in a file need a stated room: give store_capacity")
    path.parent.mkdir(parents=True, exist_ok=True)
    return file_records(table, path, max_records, record_bytes)
