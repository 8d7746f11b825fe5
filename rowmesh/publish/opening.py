"""A target by its URL."""

from __future__ import annotations

from pathlib import Path

from rowmesh._support import extras
from rowmesh._support.files.places import local_path
from rowmesh.errors import ConfigurationError
from rowmesh.publish.folder import FolderTarget
from rowmesh.publish.parquet import ParquetTables
from rowmesh.publish.redis import RedisTarget
from rowmesh.publish.rocksdb import RocksTables
from rowmesh.publish.target import Target
from rowmesh.tables.dynamic.stores import Retry
from rowmesh.tables.dynamic.stores.opening import REDIS
from rowmesh.tables.dynamic.stores.redis_connection import RedisConnection
from rowmesh.tables.dynamic.stores.rocksdb import rocksdict

_FORMATS = {"parquet": ParquetTables, "rocksdb": RocksTables}


def open_target(url: str, *, retry: Retry | None = None) -> Target:
    """Where generations are published, and read from.

    Args:
        url: `parquet:FOLDER`, `rocksdb:FOLDER`, or the URL of a Redis server (`redis://…`, `rediss://…` for TLS).
        retry: for a server that goes away; by default for 30 s.

    Raises:
        ConfigurationError: the URL is none of these, or a package is not installed.
        StoreError: the server does not answer; names it.

    Example:
        >>> open_target("parquet:published").name
        'folder published'
    """
    kind, place = split_url(url)
    if kind == "redis":
        return RedisTarget(RedisConnection(url, retry))
    return FolderTarget(Path(place), _FORMATS[kind]())


def check_installed(url: str) -> None:
    """Raises ConfigurationError where a target needs a package that is not installed."""
    kind, _ = split_url(url)
    if kind == "redis":
        extras.load("redis", "redis", "Redis is used")
    if kind == "rocksdb":
        rocksdict()


def split_url(url: str) -> tuple[str, str]:
    """The kind of a target, and its folder; of a server "redis" and the URL.

    Raises:
        ConfigurationError: the URL is none of those that there are.

    >>> split_url("parquet:published"), split_url("redis://localhost/1")
    (('parquet', 'published'), ('redis', 'redis://localhost/1'))
    """
    if url.startswith(REDIS):
        return "redis", url
    kind, _, place = url.partition(":")
    if kind not in _FORMATS or not place:
        raise ConfigurationError(
            f"{url.split('@')[-1]!r} is nowhere to publish to; there are parquet:FOLDER, rocksdb:FOLDER, and "
            "redis://HOST:PORT/DATABASE or rediss://… for TLS"
        )
    local_path(place, f"the folder of {kind}:")
    return kind, place
