"""FolderTarget: generations in a folder, a file or a database a table and rank, and the file `newest.json`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import numpy as np

from rowmesh.errors import DataError, StoreError
from rowmesh.files.atomic import replacing_file, sync_file, sync_folder
from rowmesh.publish.generation import Generation
from rowmesh.publish.target import PartWriter, Rows

_NEWEST, _MANIFEST, _NETWORK = "newest.json", "manifest.json", "network.pt"


class TableWriter(Protocol):
    """Writes what one rank has of one table; ids without vectors are gone."""

    def write(self, ids: np.ndarray, vectors: np.ndarray | None) -> None:
        """Adds ids, int64 `[N]`."""
        ...

    def close(self) -> None:
        """Ends the file."""
        ...


class TableFormat(Protocol):
    """How the rows of one table are kept.

    Attributes:
        suffix: of its files.
    """

    suffix: str

    def write(self, path: Path, dim: int) -> TableWriter:
        """Begins a file, or a folder."""
        ...

    def read(self, layers: Sequence[Sequence[Path]], dim: int) -> TableRows:
        """Rows of a table: files of each generation of a chain, the newest first."""
        ...


class TableRows(Protocol):
    """Rows of one table; see `Rows`."""

    def look_up(self, ids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """See `Rows.look_up`."""
        ...

    def close(self) -> None:
        """See `Rows.close`."""
        ...


class FolderTarget:
    """Generations in a folder that the publishing ranks and the readers see. See `Target`.

        newest.json              the pointer
        00000003/manifest.json   as the pointer was when this was the newest
        00000003/network.pt
        00000003/user-0.parquet  what rank 0 has of table user

    Args:
        folder: made if need be.
        table_format: of rows.
    """

    def __init__(self, folder: Path, table_format: TableFormat) -> None:
        self.name = f"folder {folder}"
        self._folder, self._format = folder, table_format

    def newest(self) -> bytes | None:
        """See `Target`."""
        return _read(self._folder / _NEWEST)

    def manifest(self, number: int) -> bytes | None:
        """See `Target`."""
        return _read(self._of(number) / _MANIFEST)

    def begin(self, number: int) -> None:
        """See `Target`."""
        self.remove(number)
        self._of(number).mkdir(parents=True)
        sync_folder(self._folder)

    def part(self, number: int, part: int, tables: dict[str, int]) -> PartWriter:
        """See `Target`."""
        return _Part(self._format, lambda table: self._path(number, table, part), tables)

    def write_network(self, number: int, state: bytes) -> None:
        """See `Target`."""
        with replacing_file(self._of(number) / _NETWORK) as file:
            file.write(state)

    def publish(self, number: int, manifest: bytes) -> None:
        """See `Target`."""
        sync_folder(self._of(number))
        for path in (self._of(number) / _MANIFEST, self._folder / _NEWEST):
            with replacing_file(path) as file:
                file.write(manifest)

    def numbers(self) -> list[int]:
        """See `Target`."""
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal() and path.is_dir())

    def remove(self, number: int) -> None:
        """See `Target`."""
        folder = self._of(number)
        try:
            (folder / _MANIFEST).unlink(missing_ok=True)  # first, so that what is left is no generation
            if folder.exists():
                shutil.rmtree(folder)
        except OSError as error:
            raise StoreError(f"generation {number} of {self.name} cannot be removed: {error}") from error

    def network(self, number: int) -> bytes:
        """See `Target`."""
        state = _read(self._of(number) / _NETWORK)
        if state is None:
            raise StoreError(f"generation {number} of {self.name} was removed; refresh")
        return state

    def open_rows(self, generation: Generation) -> Rows:
        """See `Target`."""
        chain = list(zip(generation.chain, generation.num_parts, strict=True))
        tables: dict[str, TableRows] = {}
        try:
            for name, table in generation.tables.items():
                layers = [self._layer(number, name, parts) for number, parts in chain]
                tables[name] = self._format.read(layers, table.dim)
            if missing := [number for number in generation.chain if self.manifest(number) is None]:
                raise StoreError(f"generation {missing[0]} of {self.name} was removed; refresh")
        except BaseException:
            _Rows(tables).close()
            raise
        return _Rows(tables)

    def close(self) -> None:
        """Holds nothing."""

    def _of(self, number: int) -> Path:
        return self._folder / f"{number:08d}"

    def _path(self, number: int, table: str, part: int) -> Path:
        return self._of(number) / f"{quote(table, safe='')}-{part}{self._format.suffix}"

    def _layer(self, number: int, table: str, parts: int) -> list[Path]:
        paths = [self._path(number, table, part) for part in range(parts)]
        return [path for path in paths if path.exists()]  # a rank that had nothing to write has no file


class _Part:
    """Writers of the tables of a part, made when they are needed."""

    def __init__(self, table_format: TableFormat, path_of: Callable[[str], Path], tables: dict[str, int]) -> None:
        self._format, self._path_of, self._tables = table_format, path_of, tables
        self._writers: dict[str, TableWriter] = {}

    def rows(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> None:
        self._writer(table).write(ids, vectors)

    def deleted(self, table: str, ids: np.ndarray) -> None:
        self._writer(table).write(ids, None)

    def _writer(self, table: str) -> TableWriter:
        if table not in self._writers:
            self._writers[table] = self._format.write(self._path_of(table), self._tables[table])
        return self._writers[table]

    def close(self) -> None:
        for table, writer in self._writers.items():
            writer.close()
            _sync(self._path_of(table))  # here: another host cannot wait for what this one has not sent


class _Rows:
    """The rows of several tables."""

    def __init__(self, tables: dict[str, TableRows]) -> None:
        self._tables = tables

    def look_up(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        return self._tables[table].look_up(ids, vectors)

    def close(self) -> None:
        for table in self._tables.values():
            table.close()


def _sync(path: Path) -> None:
    if path.is_file():
        sync_file(path)
    for root, _, files in os.walk(path):
        for name in files:
            sync_file(Path(root) / name)
        sync_folder(Path(root))


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
