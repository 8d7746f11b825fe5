"""RocksTables: ids with their vectors in databases of RocksDB, which are not changed after they were published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rowmesh._support.files.checksums import Checksums, checksums_of, verify_bytes
from rowmesh.errors import DamagedFileError, StoreError
from rowmesh.publish.chain import ADVICE
from rowmesh.publish.folder import WrittenRows
from rowmesh.publish.target import closed
from rowmesh.tables.dynamic.stores.protocol import rows_of
from rowmesh.tables.dynamic.stores.rocksdb import options_of, rocksdict

_ABOUT = b"rowmesh"
"""A key of another length than those of rows, which says whose rows the database has."""
_LEFT_OUT = ("LOCK", "LOG", "IDENTITY", "rocksdict-")  # which say nothing of rows, or are written by readers too
_ROWS = ".sst"  # whose blocks RocksDB compares with checksums of its own, when it reads them


class RocksTables:
    """Key: the id, eight bytes, the highest first. Value: D float32, the lowest byte first; none where the id is gone.

    Readers hold no rows but what RocksDB caches.
    """

    suffix = ".rocksdb"

    def write(self, path: Path, dim: int, about: bytes) -> RocksWriter:
        """See `TableFormat`."""
        return RocksWriter(path, about)

    def read(self, layers: Sequence[Sequence[WrittenRows]], dim: int) -> RocksRows:
        """See `TableFormat`."""
        return RocksRows([written for layer in layers for written in layer])


def keys_of(ids: np.ndarray) -> list[bytes]:
    """Eight bytes an id, as RocksDB and Redis have it."""
    return rows_of(ids.astype(">i8")[:, None])


def values_of(ids: np.ndarray, vectors: np.ndarray | None) -> list[bytes]:
    """D float32 an id, the lowest byte first; nothing where an id is gone."""
    return [b""] * len(ids) if vectors is None else rows_of(vectors.astype("<f4"))


def take(values: Sequence[bytes | None], places: np.ndarray, vectors: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Fills in what a generation has of some ids; returns the places of those that it does not know."""
    rows = [place for place, value in zip(places.tolist(), values, strict=True) if value]
    if rows:
        vectors[rows] = np.frombuffer(b"".join(value for value in values if value), "<f4").reshape(len(rows), -1)
        found[rows] = True
    return places[[value is None for value in values]]


class RocksWriter:
    """See `TableWriter`."""

    def __init__(self, path: Path, about: bytes) -> None:
        self._rocks, self._path = rocksdict(), path
        self._database: Any = self._call(lambda: self._rocks.Rdict(str(path), options_of(self._rocks)))
        self._options = self._rocks.WriteOptions()
        self._options.disable_wal = True  # `close` writes all
        self._put({_ABOUT: about})

    def write(self, ids: np.ndarray, vectors: np.ndarray | None) -> None:
        """See `TableWriter`."""
        self._put(dict(zip(keys_of(ids), values_of(ids, vectors), strict=True)))

    def _put(self, values: Mapping[bytes, bytes]) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for key, value in values.items():
            batch.put(key, value)
        self._call(lambda: self._database.write(batch, self._options))

    def close(self) -> Mapping[str, Checksums]:
        """See `TableWriter`."""
        self._call(self._database.flush)
        self._call(self._database.close)
        files = [path for path in self._path.iterdir() if not path.name.startswith(_LEFT_OUT)]
        return {f"{self._path.name}/{path.name}": checksums_of(path) for path in sorted(files)}

    def _call(self, operation: Any) -> Any:
        try:
            return operation()
        except Exception as error:  # the package raises this base alone
            raise StoreError(f"RocksDB {self._path} cannot be written: {error}") from error


class RocksRows:
    """Rows in several databases; an id is taken from the first that has it."""

    def __init__(self, written: Sequence[WrittenRows]) -> None:
        rocks = rocksdict()
        self._name = f"RocksDB {written[0].path}" if written else "a table without databases of RocksDB"
        self._databases: list[tuple[Path, Any]] = []
        self._is_closed = False
        for each in written:
            path = each.path
            _verify(each)
            options = options_of(rocks)
            options.create_if_missing(False)
            try:
                database = rocks.Rdict(str(path), options, access_type=rocks.AccessType.read_only())
            except Exception as error:  # the package raises this base alone
                self.close()
                raise StoreError(f"RocksDB {path} cannot be opened: {error}; was it removed?") from error
            self._databases.append((path, database))
            if database.get(_ABOUT) != each.about:
                self.close()
                raise DamagedFileError(f"{path} has other rows than {each.about.decode()}; {ADVICE}")

    def look_up(self, ids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """See `Rows.look_up`."""
        if self._is_closed:
            raise closed(self._name)
        found, places, keys = np.zeros(len(ids), bool), np.arange(len(ids)), keys_of(ids)
        for path, database in self._databases:
            if not len(places):
                break
            try:
                values = database.get([keys[place] for place in places.tolist()])
            except Exception as error:  # the package raises this base alone
                raise StoreError(f"RocksDB {path} cannot be read: {error}") from error
            places = take(values, places, vectors, found)
        return found

    def close(self) -> None:
        """Closes the databases."""
        self._is_closed = True
        for _, database in self._databases:  # they stay in the list: a look-up that is late fails
            with suppress(Exception):
                database.close()


def _verify(written: WrittenRows) -> None:
    """Compares a database with what was written, before RocksDB sees it: it may hang on a damaged one.

    Files of rows are compared by their sizes, and block by block by RocksDB when they are read.
    """
    for name, expected in written.sums.items():
        path = written.path.parent / name
        try:
            data = b"" if name.endswith(_ROWS) else path.read_bytes()
            size = path.stat().st_size
        except FileNotFoundError:
            raise DamagedFileError(f"{path} is missing; {ADVICE}") from None
        if size != expected.size_bytes:
            raise DamagedFileError(f"{path} has {size:,} bytes where {expected.size_bytes:,} were written; {ADVICE}")
        if not name.endswith(_ROWS):
            verify_bytes(data, expected, str(path), ADVICE)
