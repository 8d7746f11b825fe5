"""RedisTarget: generations in Redis, and the key that names the newest."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import numpy as np

from rowmesh.dynamic.stores.redis import RedisConnection
from rowmesh.errors import StoreError
from rowmesh.publish.generation import Generation
from rowmesh.publish.rocksdb import keys_of, take, values_of
from rowmesh.publish.target import PartWriter, Rows, closed

_CHUNK = 4096  # rows a command


class RedisTarget:
    """Generations in Redis. See `Target`.

        PREFIX:newest           what the newest generation is
        PREFIX:numbers          a set: all that are there
        PREFIX:3:manifest       as `newest` was when this was the newest; removed first
        PREFIX:3:keys           a set: the hashes of rows
        PREFIX:3:network
        PREFIX:3:rows:user      a hash: eight bytes of the id, the highest first → float32, none where it is gone

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

    def publish(self, number: int, manifest: bytes) -> None:
        """See `Target`."""

        def both(client: Any) -> None:
            with client.pipeline(transaction=True) as pipe:
                pipe.set(self.key(number, "manifest"), manifest)
                pipe.set(f"{self._prefix}:newest", manifest)
                pipe.execute()

        self._connection.call(both)

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
            raise StoreError(f"generation {number} of {self.name} was removed; refresh")
        return state

    def open_rows(self, generation: Generation) -> Rows:
        """See `Target`."""
        rows = _Rows(self, self._connection, generation)
        rows.check([self.manifest(number) for number in generation.chain])
        return rows

    def close(self) -> None:
        """Closes the connections."""
        self._connection.close()

    def key(self, number: int, name: str) -> str:
        """Of something of a generation."""
        return f"{self._prefix}:{number}:{name}"

    def rows_key(self, number: int, table: str) -> str:
        """Of the rows of a table."""
        return self.key(number, f"rows:{quote(table, safe='')}")


class _Part:
    """See `PartWriter`; the ranks write into the same hashes."""

    def __init__(self, target: RedisTarget, connection: RedisConnection, number: int) -> None:
        self._target, self._connection, self._number = target, connection, number

    def rows(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> None:
        self._write(table, keys_of(ids), values_of(ids, vectors))

    def deleted(self, table: str, ids: np.ndarray) -> None:
        self._write(table, keys_of(ids), values_of(ids, None))

    def _write(self, table: str, keys: list[bytes], values: list[bytes]) -> None:
        name = self._target.rows_key(self._number, table)
        self._connection.call(lambda client: client.sadd(self._target.key(self._number, "keys"), name))
        for first in range(0, len(keys), _CHUNK):
            end = first + _CHUNK
            rows = dict(zip(keys[first:end], values[first:end], strict=True))
            self._connection.call(lambda client, rows=rows: client.hset(name, mapping=rows))

    def close(self) -> None:
        """All is acknowledged."""


class _Rows:
    """Rows of a chain; asked of the server when they are looked up."""

    def __init__(self, target: RedisTarget, connection: RedisConnection, generation: Generation) -> None:
        self._target, self._connection, self._generation = target, connection, generation
        self._is_closed = False

    def look_up(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        if self._is_closed:
            raise closed(f"generation {self._generation.number} of {self._target.name}")
        found, keys = np.zeros(len(ids), bool), keys_of(ids)
        for first in range(0, len(ids), _CHUNK):
            end = first + _CHUNK
            self._look_up(table, keys[first:end], vectors[first:end], found[first:end])
        return found

    def _look_up(self, table: str, keys: list[bytes], vectors: np.ndarray, found: np.ndarray) -> None:
        chain = self._generation.chain

        def fill_in(pipe: Any) -> None:
            for number in chain:
                pipe.hmget(self._target.rows_key(number, table), keys)
            for number in chain:
                pipe.get(self._target.key(number, "manifest"))

        answers = self._connection.pipeline(fill_in)
        self.check(answers[len(chain) :])
        places = np.arange(len(keys))
        for values in answers[: len(chain)]:
            places = take([values[place] for place in places.tolist()], places, vectors, found)

    def check(self, manifests: list[bytes | None]) -> None:
        """Raises where a generation is gone: what it does not have any more would read as unknown."""
        for number, manifest in zip(self._generation.chain, manifests, strict=True):
            if manifest is None:
                raise StoreError(f"generation {number} of {self._target.name} was removed; refresh")

    def close(self) -> None:
        """The connection is the target's."""
        self._is_closed = True
