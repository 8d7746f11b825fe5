"""RedisRecords: records in Redis, and the connection that publishing uses too."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import numpy as np

from rowmesh import extras
from rowmesh.dynamic.stores.protocol import check_batch, fill, rows_of
from rowmesh.dynamic.stores.retry import Retry
from rowmesh.errors import ConfigurationError, StoreError

_CHUNK = 4096  # records a pipeline
_TIMEOUT_S = 10.0  # for a connection, and for an answer


class RedisConnection:
    """A client whose calls are retried, and whose errors name the server without its password.

    Args:
        url: of the server, `redis://[user:password@]host:port/database`, or `rediss://` for TLS; with the parameters
            that the package redis knows (`?ssl_ca_certs=…`).
        retry: for what may pass: a connection that is refused or lost, a server that loads its data or is replaced.

    Attributes:
        name: of the server, for errors.

    Raises:
        ConfigurationError: the package redis is not installed, the URL cannot be used, or the server throws keys away
            when its memory is full.
        StoreError: the server does not answer.
    """

    def __init__(self, url: str, retry: Retry | None = None) -> None:
        self._redis = extras.load("redis", "redis", "Redis is used")
        backoff = extras.load("redis.backoff", "redis", "Redis is used")
        retries = extras.load("redis.retry", "redis", "Redis is used")
        once = retries.Retry(backoff.NoBackoff(), 0)  # trying again is done here
        timeouts = {"socket_timeout": _TIMEOUT_S, "socket_connect_timeout": _TIMEOUT_S}
        try:
            self._client: Any = self._redis.Redis.from_url(url, retry=once, **timeouts)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"the URL of a Redis server cannot be used: {error}") from error
        options = self._client.connection_pool.connection_kwargs
        place = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        self.name = f"Redis {place}/{options.get('db', 0)}"
        self._retry, self._password = retry or Retry(), options.get("password")
        self._check_policy()

    def _check_policy(self) -> None:
        try:
            memory = self.call(lambda client: client.info("memory"))
        except StoreError as error:
            if isinstance(error.__cause__, self._redis.exceptions.NoPermissionError):
                return  # a user who may not ask
            raise
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory", 0) and policy != "noeviction":
            raise ConfigurationError(
                f"{self.name} throws keys away when its memory is full (maxmemory-policy {policy}), and records would "
                "be lost; set maxmemory-policy to noeviction, or take another server"
            )

    def call(self, operation: Callable[[Any], Any]) -> Any:
        """Runs what may be repeated, with a client.

        Raises:
            StoreError: the server does not answer, or refuses; names it.
        """
        try:
            return self._retry(lambda: operation(self._client), self._may_pass, self.name)
        except StoreError as error:
            raise StoreError(self._without_password(str(error))) from error.__cause__
        except self._redis.RedisError as error:
            raise StoreError(self._without_password(f"{self.name} refused: {error}")) from error

    def pipeline(self, fill_in: Callable[[Any], None]) -> list[Any]:
        """Sends commands together, which may be repeated; returns the answers."""

        def run(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipe:
                fill_in(pipe)
                return pipe.execute()

        return self.call(run)

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _may_pass(self, error: Exception) -> bool:
        away = (self._redis.ConnectionError, self._redis.TimeoutError, self._redis.exceptions.ReadOnlyError)
        return isinstance(error, away) and not isinstance(error, self._redis.AuthenticationError)

    def _without_password(self, text: str) -> str:
        return text.replace(self._password, "***") if self._password else text


class RedisRecords:
    """Records of one table in Redis, a hash a shard; see `RecordStore`.

    With every call a mark is read that was written at the beginning: a server that was started again without its data
    is an error, and not a table without records. What the server does with what it has acknowledged is its own
    configuration: `appendonly yes` with `appendfsync always` loses nothing.

    Args:
        table: its name.
        connection: to the server; owned from here on.
        record_bytes: of a record.
        prefix: of all keys, which begin with `PREFIX:TABLE`.

    Raises:
        ConfigurationError: there are records of another size under these keys.
    """

    def __init__(self, table: str, connection: RedisConnection, record_bytes: int, *, prefix: str = "rowmesh") -> None:
        self.record_bytes, self._connection = record_bytes, connection
        self._name = f"{connection.name}, keys {prefix}:{table}"
        self._base = f"{prefix}:{quote(table, safe='')}"  # no colon, so that no key is another table's
        new = f"{record_bytes} {uuid.uuid4().hex}".encode()

        def mark(pipe: Any) -> None:
            pipe.set(self._base, new, nx=True)
            pipe.get(self._base)

        self._mark: bytes = connection.pipeline(mark)[1]
        if self._mark.split()[0] != new.split()[0]:
            raise ConfigurationError(
                f"{self._name} has records of {self._mark.split()[0].decode()} bytes, not {record_bytes}; take another "
                "prefix, or remove them"
            )

    def get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """See `RecordStore.get`."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        found = np.zeros(len(ids), bool)
        for chunk in _chunks(shards):
            groups = _by_shard(shards, ids, chunk)
            answers = self._pipeline(lambda pipe, groups=groups: [pipe.hmget(self._key(s), f) for s, f in groups])
            got = np.empty((len(chunk), self.record_bytes), np.uint8)
            there = fill([value for answer in answers for value in answer], got, self._name)
            records[chunk[there]] = got[there]
            found[chunk] = there
        return found

    def put(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> None:
        """See `RecordStore.put`."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        for chunk in _chunks(shards):
            values = iter(rows_of(records[chunk]))
            groups = [
                (shard, dict(zip(fields, values, strict=False))) for shard, fields in _by_shard(shards, ids, chunk)
            ]
            self._pipeline(lambda pipe, groups=groups: [pipe.hset(self._key(s), mapping=m) for s, m in groups])

    def delete(self, shards: np.ndarray, ids: np.ndarray) -> None:
        """See `RecordStore.delete`."""
        check_batch(self._name, shards, ids, None, 0)
        for chunk in _chunks(shards):
            groups = _by_shard(shards, ids, chunk)
            self._pipeline(lambda pipe, groups=groups: [pipe.hdel(self._key(s), *f) for s, f in groups])

    def ids_in(self, shard: int) -> np.ndarray:
        """See `RecordStore.ids_in`."""
        found, cursor = set[bytes](), 0
        while True:
            [answer] = self._pipeline(lambda pipe, at=cursor: pipe.hscan(self._key(shard), at, count=_CHUNK))
            cursor, values = answer
            found |= values.keys()
            if cursor == 0:
                return np.sort(np.frombuffer(b"".join(found), ">i8").astype(np.int64))

    def clear(self, shards: range) -> None:
        """See `RecordStore.clear`."""
        self._pipeline(lambda pipe: pipe.unlink(*map(self._key, shards)) if shards else None)

    def flush(self) -> None:
        """What the server does with its disk is its own configuration."""

    def close(self) -> None:
        """See `RecordStore.close`."""
        self._connection.close()

    def _key(self, shard: int) -> str:
        return f"{self._base}:{shard}"

    def _pipeline(self, fill_in: Callable[[Any], Any]) -> list[Any]:
        def marked(pipe: Any) -> None:
            pipe.get(self._base)
            fill_in(pipe)

        mark, *answers = self._connection.pipeline(marked)
        if mark != self._mark:
            raise StoreError(
                f"{self._name}: the server answers and has lost its records, or another run has begun them anew; "
                "resume from a checkpoint, and let the server keep what it acknowledges (appendonly yes)"
            )
        return answers


def _chunks(shards: np.ndarray) -> list[np.ndarray]:
    """Positions in the order of shards, some at a time."""
    order = np.argsort(shards, kind="stable")
    return [order[first : first + _CHUNK] for first in range(0, len(order), _CHUNK)]


def _by_shard(shards: np.ndarray, ids: np.ndarray, chunk: np.ndarray) -> list[tuple[int, list[bytes]]]:
    """The fields of each shard: ids as eight bytes; `chunk` is in the order of shards."""
    own, starts = np.unique(shards[chunk], return_index=True)
    fields = rows_of(ids[chunk].astype(">i8")[:, None])
    ends = [*starts[1:].tolist(), len(chunk)]
    return [(shard, fields[first:end]) for shard, first, end in zip(own.tolist(), starts.tolist(), ends, strict=True)]
