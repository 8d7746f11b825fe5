"""RedisStream: rows of a stream of Redis, a field a column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rowmesh._support import extras
from rowmesh.data.quarantine import BadRows
from rowmesh.data.raw.source import Chunk, Position
from rowmesh.data.schema import Schema
from rowmesh.data.source import RawTable
from rowmesh.errors import ConfigurationError, DataError

CHUNK_ENTRIES = 4096
_START = "0-0"


class RedisStream:
    """The entries of a stream, in its order: a field is a column, as a text file has it; a field that is not there is
    empty.

    Entries stay in the stream: every rank reads them, and a run that is resumed does so again. Trim it (`XTRIM`) no
    further than the oldest position that is to be resumed from or that a rank has read up to; that is checked. Without
    `follow` nothing may be added meanwhile: the end is where each rank finds it.

    Args:
        url: of the server, `redis://[user:password@]host:port/database`, or `rediss://` for TLS.
        key: of the stream.
        schema: how to read entries; of text.
        follow: whether to wait for more entries at its end.

    Raises:
        ConfigurationError: the package redis is not installed, or the URL cannot be used.

    Example (not run)::

        source = RedisStream("redis://localhost:6379/0", "clicks", schema, follow=True)
    """

    def __init__(self, url: str, key: str, schema: Schema, *, follow: bool = False) -> None:
        redis = extras.load("redis", "redis", "streams are read")
        self._errors: tuple[type[Exception], ...] = (redis.RedisError,)
        try:
            self._client: Any = redis.Redis.from_url(url)
        except ValueError as error:
            raise ConfigurationError(f"the URL of stream {key!r} cannot be used: {error}") from error
        self.key, self.schema, self.follow = key, schema, follow

    @property
    def multi_hot(self) -> tuple[bool, ...]:
        """By categorical feature, whether rows have lists: where the schema has a separator."""
        return self.schema.separated

    def chunks(self, position: Position | None) -> Iterator[Chunk | None]:
        """Chunks of entries; see `Source.chunks`."""
        last, row = (_START, 0) if position is None else (str(position["entry"]), int(position["row"]))
        while True:
            entries = self._after(last)
            if entries:
                chunk = _Entries(self.key, self.schema, entries, row)
                last, row = entries[-1][0].decode(), row + len(entries)
                yield chunk
            elif self.follow:
                yield None
            else:
                return

    def _after(self, last: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Entries after the last that was read, which is read again: where it is gone, so may be some after it."""
        if last == _START:
            return self._call("xrange", self.key, "-", "+", CHUNK_ENTRIES)
        found = self._call("xrange", self.key, last, "+", CHUNK_ENTRIES + 1)
        if not found or found[0][0].decode() != last:
            raise DataError(
                f"the position is after entry {last} of stream {self.key!r}, which is not there any more: entries that "
                "follow it may be gone too. Start without the position, and trim streams later"
            )
        return found[1:]

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def _call(self, command: str, *arguments: object) -> Any:
        try:
            return getattr(self._client, command)(*arguments)
        except self._errors as error:
            raise DataError(f"stream {self.key!r} cannot be read: {error}") from error


class _Entries:
    """Some entries of a stream."""

    def __init__(self, key: str, schema: Schema, entries: Sequence[tuple[bytes, dict[bytes, bytes]]], row: int) -> None:
        self.name, self._schema, self._entries, self._row = f"stream {key}", schema, entries, row

    def __len__(self) -> int:
        return len(self._entries)

    def tables(self, first: int, end: int, quarantine: BadRows) -> Iterator[RawTable]:
        """See `Chunk`."""
        entries = self._entries[first:end]
        columns = {
            name: pa.array([fields.get(name.encode(), b"") for _, fields in entries], pa.binary())
            for name in self._schema.source_columns
        }
        lines = np.arange(self._row + first + 1, self._row + end + 1)
        yield RawTable(pa.table(columns), lines, lambda row: _shown(entries[row]), self._row + end)

    def position(self, rows: int) -> Position:
        """See `Chunk`."""
        return {"entry": self._entries[rows - 1][0].decode(), "row": self._row + rows}


def _shown(entry: tuple[bytes, dict[bytes, bytes]]) -> str:
    fields = {name.decode("utf-8", "replace"): value.decode("utf-8", "replace") for name, value in entry[1].items()}
    return json.dumps({"entry": entry[0].decode(), **fields})
