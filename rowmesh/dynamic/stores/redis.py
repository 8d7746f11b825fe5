"""RedisRecords: records in Redis, and the connection that publishing uses too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from rowmesh import extras
from rowmesh.dynamic.stores.lease import Lease
from rowmesh.dynamic.stores.protocol import check_batch, fill, keys_of, rows_of
from rowmesh.dynamic.stores.retry import Retry
from rowmesh.dynamic.stores.sums import RowSums
from rowmesh.errors import ConfigurationError, DamagedFileError, StoreError
from rowmesh.files.secrets import HIDDEN

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
        if self._password == HIDDEN:
            raise ConfigurationError(
                f"{self.name}: the password stands as {HIDDEN} where it was written down; give the URL again, with the "
                "password in a variable of the environment: redis://:$NAME@…"
            )
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

    def once(self, operation: Callable[[Any], None]) -> None:
        """Runs what need not succeed, with a client; errors are those of the package."""
        operation(self._client)

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

    Its keys are its own: other processes, and other runs on the same server, have others. They go when it is closed, or
    when another one is made after this process has ended; see `Lease`. With every call the lease is read: a server that
    was started again without its data is an error, and not a table without records. What the server does with what it
    has acknowledged is its own configuration: `appendonly yes` with `appendfsync always` loses nothing.

    Behind each record is its checksum, so that one that is damaged, or is another's, is an error that names the id.

    Args:
        table: its name.
        connection: to the server; owned from here on.
        record_bytes: of a record.
    """

    def __init__(self, table: str, connection: RedisConnection, record_bytes: int) -> None:
        self.record_bytes, self._connection = record_bytes, connection
        self._lease, self._sums = Lease(connection), RowSums(table)
        self._base = f"{self._lease.prefix}:{quote(table, safe='')}"  # no colon, so that no key is another table's
        self._name, self._is_closed = f"{connection.name}, keys {self._base}", False

    def get(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> np.ndarray:
        """See `RecordStore.get`."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        found = np.zeros(len(ids), bool)
        for chunk in _chunks(shards):
            groups = _by_shard(shards, ids, chunk)
            answers = self._pipeline(lambda pipe, groups=groups: [pipe.hmget(self._key(s), f) for s, f in groups])
            got = np.empty((len(chunk), self.record_bytes), np.uint8)
            stored = [value for answer in answers for value in answer]
            there = fill(self._verified(keys_of(shards[chunk], ids[chunk]), stored), got, self._name)
            records[chunk[there]] = got[there]
            found[chunk] = there
        return found

    def put(self, shards: np.ndarray, ids: np.ndarray, records: np.ndarray) -> None:
        """See `RecordStore.put`."""
        check_batch(self._name, shards, ids, records.shape, self.record_bytes)
        for chunk in _chunks(shards):
            values = iter(self._sums.add(keys_of(shards[chunk], ids[chunk]), rows_of(records[chunk])))
            groups = [
                (shard, dict(zip(fields, values, strict=False))) for shard, fields in _by_shard(shards, ids, chunk)
            ]
            self._pipeline(
                lambda pipe, groups=groups: [pipe.hset(self._key(s), mapping=m) for s, m in groups],
                [self._key(shard) for shard, _ in groups],
            )

    def _verified(self, keys: Sequence[bytes], stored: Sequence[bytes | None]) -> list[bytes | None]:
        try:
            return self._sums.take(
                keys, stored, self._name, "resume from a checkpoint, and look at the server's memory"
            )
        except DamagedFileError as error:
            raise StoreError(str(error)) from error

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
        """See `RecordStore.close`; removes the records."""
        if not self._is_closed:
            self._is_closed = True
            self._lease.release()
            self._connection.close()

    def _key(self, shard: int) -> str:
        return f"{self._base}:{shard}"

    def _pipeline(self, fill_in: Callable[[Any], Any], keys: Sequence[str] = ()) -> list[Any]:
        """Sends commands; `keys` are those that they may make."""
        num_more = 0

        def leased(pipe: Any) -> None:
            nonlocal num_more
            pipe.get(self._lease.prefix)
            before = len(pipe)
            self._lease.note(pipe, keys)
            num_more = len(pipe) - before
            fill_in(pipe)

        holder, *answers = self._connection.pipeline(leased)
        if holder != self._lease.holder:
            raise StoreError(
                f"{self._name}: the server answers and has lost its records, or its lease has run out, as it was "
                "silent for hours; resume from a checkpoint, and let the server keep what it acknowledges "
                "(appendonly yes)"
            )
        self._lease.noted(keys)
        return answers[num_more:]


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
