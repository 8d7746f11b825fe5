"""RedisRecords: records in Redis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from rowmesh.errors import DamagedFileError, StoreError
from rowmesh.tables.dynamic.stores.lease import Lease
from rowmesh.tables.dynamic.stores.protocol import check_batch, fill, keys_of, rows_of
from rowmesh.tables.dynamic.stores.redis_connection import RedisConnection
from rowmesh.tables.dynamic.stores.sums import RowSums

_CHUNK = 4096  # records a pipeline


class RedisRecords:
    """Records of one table in Redis, a hash a shard; see `RecordStore`.

    Its keys are its own: other processes, and other runs on the same server, have others. They go when it is closed, or
    when another one is made after this process has ended; see `Lease`. With every call the lease is read: a server that
    was started again without its data is an error, and not a table without records. The server's own configuration
    says whether it keeps what it has acknowledged: `appendonly yes` with `appendfsync always` loses nothing.

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
        """No-op: the configuration of the server says what it does with its disk."""

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
