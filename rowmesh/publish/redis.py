"""RedisTarget: generations in Redis, and the key that names the newest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from rowmesh.errors import DamagedFileError, StoreError
from rowmesh.publish.chain import ADVICE, removed
from rowmesh.publish.generation import Generation, Part
from rowmesh.publish.rocksdb import keys_of, take, values_of
from rowmesh.publish.target import PartWriter, Rows, closed
from rowmesh.tables.dynamic.stores.redis_connection import RedisConnection
from rowmesh.tables.dynamic.stores.sums import RowSums

_CHUNK = 4096  # rows a command


class RedisTarget:
    """Generations in Redis. See `Target`.

        PREFIX:newest           what the newest generation is
        PREFIX:numbers          a set: all that are there
        PREFIX:3:manifest       as `newest` was when this was the newest; removed first
        PREFIX:3:keys           a set: the hashes of rows
        PREFIX:3:network
        PREFIX:3:rows:user      a hash: eight bytes of the id, the highest first → float32, none where it is gone, and
                                eight bytes of checksum

    Args:
        connection: to the server; owned from here on.
        prefix: of all keys.
    """

    def __init__(self, connection: RedisConnection, prefix: str = "rowmesh-published") -> None:
        self.name = f"{connection.name}, keys {prefix}"
        self._connection, self._prefix = connection, prefix

    def newest(self) -> bytes | None:
        """See `Target`."""
        return self._connection.call(lambda client: client.get(f"{self._prefix}:newest"))

    def manifest(self, number: int) -> bytes | None:
        """See `Target`."""
        return self._connection.call(lambda client: client.get(self.key(number, "manifest")))

    def begin(self, number: int) -> None:
        """See `Target`."""
        self.remove(number)
        self._connection.call(lambda client: client.sadd(f"{self._prefix}:numbers", number))

    def part(self, number: int, part: int, tables: dict[str, int]) -> PartWriter:
        """See `Target`."""
        return _Part(self, self._connection, number)

    def write_network(self, number: int, state: bytes) -> None:
        """See `Target`."""
        self._connection.call(lambda client: client.set(self.key(number, "network"), state))

    def publish(self, generation: Generation) -> None:
        """See `Target`."""
        self._check_all(generation)
        manifest = generation.to_json()

        def both(client: Any) -> None:
            with client.pipeline(transaction=True) as pipe:
                pipe.set(self.key(generation.number, "manifest"), manifest)
                pipe.set(f"{self._prefix}:newest", manifest)
                pipe.execute()

        self._connection.call(both)

    def _check_all(self, generation: Generation) -> None:
        """Raises where the server has not as many rows as the ranks have written."""
        written = rows_by_table(generation)
        keys = {table: self.rows_key(generation.number, table) for table in written}

        def count(pipe: Any) -> None:
            for key in keys.values():
                pipe.hlen(key)

        counts = self._connection.pipeline(count)
        for (table, wanted), found in zip(written.items(), counts, strict=True):
            if found != wanted:
                raise StoreError(
                    f"{self.name} has {found:,} rows of table {table!r} in generation {generation.number}, and "
                    f"{wanted:,} were written: the server has lost some, or an id was published twice"
                )

    def numbers(self) -> list[int]:
        """See `Target`."""
        return sorted(map(int, self._connection.call(lambda client: client.smembers(f"{self._prefix}:numbers"))))

    def remove(self, number: int) -> None:
        """See `Target`."""
        names = [self.key(number, name) for name in ("manifest", "network", "keys")]
        self._connection.call(lambda client: client.delete(names[0]))  # readers look for it after what they read
        hashes = self._connection.call(lambda client: client.smembers(names[2]))
        self._connection.call(lambda client: client.unlink(*hashes, *names))
        self._connection.call(lambda client: client.srem(f"{self._prefix}:numbers", number))

    def network(self, number: int) -> bytes:
        """See `Target`."""
        state = self._connection.call(lambda client: client.get(self.key(number, "network")))
        if state is None:
            if self.manifest(number) is None:
                raise removed(number, self.name)
            raise DamagedFileError(f"{self.name}: the network of generation {number} is missing; {ADVICE}")
        return state

    def network_place(self, number: int) -> str:
        """See `Target`."""
        return f"{self.key(number, 'network')} of {self.name}"

    def open_rows(self, chain: Sequence[Generation]) -> Rows:
        """See `Target`."""
        rows = _Rows(self, self._connection, chain)
        for table in chain[0].tables:
            rows.look_up(table, np.empty(0, np.int64), np.empty((0, chain[0].tables[table].dim), np.float32))
        return rows

    def close(self) -> None:
        """Closes the connections."""
        self._connection.close()

    def key(self, number: int, name: str) -> str:
        """The key of a named part of a generation."""
        return f"{self._prefix}:{number}:{name}"

    def rows_key(self, number: int, table: str) -> str:
        """The key of a table's rows in a generation."""
        return self.key(number, f"rows:{quote(table, safe='')}")


def rows_by_table(generation: Generation) -> Counter[str]:
    """How many rows the ranks wrote of each table, those that are gone included."""
    return sum((Counter(part) for part in generation.parts), Counter[str]())


def sums_of(number: int, table: str) -> RowSums:
    """Checksums of the rows of a table in a generation."""
    return RowSums(f"{number}:{table}")


class _Part:
    """See `PartWriter`; the ranks write into the same hashes."""

    def __init__(self, target: RedisTarget, connection: RedisConnection, number: int) -> None:
        self._target, self._connection, self._number = target, connection, number
        self._counts = Counter[str]()

    def rows(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> None:
        self._write(table, keys_of(ids), values_of(ids, vectors))

    def deleted(self, table: str, ids: np.ndarray) -> None:
        self._write(table, keys_of(ids), values_of(ids, None))

    def _write(self, table: str, keys: list[bytes], values: list[bytes]) -> None:
        name, sums = self._target.rows_key(self._number, table), sums_of(self._number, table)
        self._connection.call(lambda client: client.sadd(self._target.key(self._number, "keys"), name))
        for first in range(0, len(keys), _CHUNK):
            some = slice(first, first + _CHUNK)
            rows = dict(zip(keys[some], sums.add(keys[some], values[some]), strict=True))
            self._connection.call(lambda client, rows=rows: client.hset(name, mapping=rows))
        self._counts[table] += len(keys)

    def close(self) -> Part:
        """All is acknowledged."""
        return dict(self._counts)


class _Rows:
    """Rows of a chain; asked of the server when they are looked up."""

    def __init__(self, target: RedisTarget, connection: RedisConnection, chain: Sequence[Generation]) -> None:
        self._target, self._connection, self._chain = target, connection, chain
        self._counts = {generation.number: rows_by_table(generation) for generation in chain}
        self._is_closed = False

    def look_up(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        if self._is_closed:
            raise closed(f"generation {self._chain[0].number} of {self._target.name}")
        found, keys = np.zeros(len(ids), bool), keys_of(ids)
        for first in range(0, max(len(ids), 1), _CHUNK):
            end = first + _CHUNK
            self._look_up(table, keys[first:end], vectors[first:end], found[first:end])
        return found

    def _look_up(self, table: str, keys: list[bytes], vectors: np.ndarray, found: np.ndarray) -> None:
        numbers = [generation.number for generation in self._chain]

        def fill_in(pipe: Any) -> None:
            for number in numbers:
                pipe.exists(self._target.key(number, "manifest"))
                pipe.hlen(self._target.rows_key(number, table))
                if keys:
                    pipe.hmget(self._target.rows_key(number, table), keys)

        answers = self._connection.pipeline(fill_in)
        step = len(answers) // len(numbers)
        if gone := [number for number, is_there in zip(numbers, answers[::step], strict=True) if not is_there]:
            raise removed(gone[0], self._target.name)  # what it does not have any more would read as unknown
        for number, num_rows in zip(numbers, answers[1::step], strict=True):
            if num_rows != self._counts[number][table]:
                raise DamagedFileError(
                    f"{self._target.name} has {num_rows:,} rows of table {table!r} in generation {number} where "
                    f"{self._counts[number][table]:,} were written; {ADVICE}"
                )
        if not keys:
            return
        places = np.arange(len(keys))
        for number, values in zip(numbers, answers[2::step], strict=True):
            own, wanted = [keys[place] for place in places.tolist()], [values[place] for place in places.tolist()]
            name = f"{self._target.name}: table {table!r} in generation {number}"
            places = take(sums_of(number, table).take(own, wanted, name, ADVICE), places, vectors, found)

    def close(self) -> None:
        """The connection is the target's."""
        self._is_closed = True
