"""FolderTarget: generations in a folder, a file or a database a table and rank, and the file `newest.json`."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from rowmesh._support.files.atomic import replacing_file, sync_file, sync_folder
from rowmesh._support.files.checksums import Checksums
from rowmesh._support.files.mark import MARK, is_unmarked, mark, read_mark
from rowmesh._support.files.names import file_stem
from rowmesh.errors import DamagedFileError, DataError, StoreError
from rowmesh.publish.chain import ADVICE, removed
from rowmesh.publish.generation import Generation, Part
from rowmesh.publish.target import PartWriter, Rows

logger = logging.getLogger("rowmesh")
_NEWEST, _MANIFEST, _NETWORK = "newest.json", "manifest.json", "network.pt"
_PLACE, _GENERATION = "published generations", "published generation"
_OWN = re.compile(rf"({re.escape(MARK)}|{re.escape(_MANIFEST)}|{re.escape(_NETWORK)}|.+-\d+\.(parquet|rocksdb))")
"""Names in the folder of a generation; those of files that are being written have more around them."""
_PARTIAL = re.compile(r"\.(.+)\.\d+\.\d+\.partial")


class TableWriter(Protocol):
    """Writes what one rank has of one table, and what that is; ids without vectors are gone."""

    def write(self, ids: np.ndarray, vectors: np.ndarray | None) -> None:
        """Adds ids, int64 `[N]`."""
        ...

    def close(self) -> Mapping[str, Checksums]:
        """Ends the file, and returns what its files are to hold, by their names in the folder of the generation."""
        ...


@dataclass(frozen=True)
class WrittenRows:
    """The rows of one table that one rank wrote.

    Attributes:
        path: of the file or folder.
        about: what is written in it: which rows these are.
        sums: by file name, what is to be in it.
    """

    path: Path
    about: bytes
    sums: Mapping[str, Checksums]


class TableFormat(Protocol):
    """How the rows of one table are kept.

    Attributes:
        suffix: of its files.
    """

    suffix: str

    def write(self, path: Path, dim: int, about: bytes) -> TableWriter:
        """Begins a file, or a folder, which says what it is about."""
        ...

    def read(self, layers: Sequence[Sequence[WrittenRows]], dim: int) -> TableRows:
        """Rows of a table: files of each generation of a chain, the newest first.

        Raises:
            DataError: a file is damaged, missing, or another.
        """
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

    The folder and those of its generations are marked when they are made. A folder without a mark is something else's.

        rowmesh.json             the mark
        newest.json              the pointer
        00000003/rowmesh.json    the mark, which goes last
        00000003/manifest.json   as the pointer was when this was the newest
        00000003/network.pt
        00000003/user-0.parquet  what rank 0 has of table user

    Args:
        folder: made if need be; else it is empty, or was made by this.
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
        self._claim()
        place = self._of(number)
        if os.path.lexists(place) and not self._is_own(place):
            if place.is_symlink() or not place.is_dir() or not is_unmarked(place):
                raise StoreError(
                    f"{place} is in the way of generation {number}, and rowmesh did not publish it; move it elsewhere, "
                    "or publish to another folder"
                )
            shutil.rmtree(place)  # nothing is in it
        self.remove(number)
        place.mkdir()
        mark(place, _GENERATION, number=number)
        sync_folder(self._folder)

    def _claim(self) -> None:
        """Makes the folder, or sees that this did.

        Raises:
            StoreError: something else is in it; says what.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        about = read_mark(Path(os.path.realpath(self._folder)), _PLACE)
        if about is None:
            if not is_unmarked(self._folder):
                others = sorted(path.name for path in self._folder.iterdir())
                raise StoreError(
                    f"{self._folder} holds other things ({', '.join(others[:3])}{', …' if others[3:] else ''}), and "
                    "rowmesh did not make it to publish to; publish to a folder that is new or empty"
                )
            mark(self._folder, _PLACE, rows=self._format.suffix[1:])
        elif about.get("rows") != self._format.suffix[1:]:
            raise StoreError(
                f"{self._folder} has generations as {about.get('rows')}, not {self._format.suffix[1:]}; publish to "
                "another folder"
            )

    def _is_own(self, place: Path) -> bool:
        about = read_mark(place, _GENERATION)
        return about is not None and self._of(about.get("number", 0)).name == place.name

    def part(self, number: int, part: int, tables: dict[str, int]) -> PartWriter:
        """See `Target`."""
        about = {table: _about(number, table, part) for table in tables}
        return _Part(self._format, lambda table: self._path(number, table, part), tables, about)

    def write_network(self, number: int, state: bytes) -> None:
        """See `Target`."""
        with replacing_file(self._of(number) / _NETWORK) as file:
            file.write(state)

    def publish(self, generation: Generation) -> None:
        """See `Target`."""
        place = self._of(generation.number)
        sync_folder(place)
        for path in (place / _MANIFEST, self._folder / _NEWEST):
            with replacing_file(path) as file:
                file.write(generation.to_json())

    def numbers(self) -> list[int]:
        """See `Target`."""
        if not self._folder.is_dir():
            return []
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdecimal() and self._is_own(path))

    def remove(self, number: int) -> None:
        """See `Target`."""
        place = self._of(number)
        if not self._is_own(place):
            return
        try:
            (place / _MANIFEST).unlink(missing_ok=True)  # first, so that what is left is no generation
            others = []
            for path in sorted(place.iterdir()):
                if not _is_own_name(path.name):
                    others.append(path.name)
                elif path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != MARK:
                    path.unlink()
            (place / MARK).unlink()  # last: what a crash leaves is still known for what it is
            if others:
                logger.warning("%s stays: rowmesh did not write %s", place, ", ".join(others))
            else:
                place.rmdir()
        except OSError as error:
            raise StoreError(f"generation {number} of {self.name} cannot be removed: {error}") from error

    def network(self, number: int) -> bytes:
        """See `Target`."""
        state = _read(self._of(number) / _NETWORK)
        if state is None:
            raise self._missing(number, self._of(number) / _NETWORK)
        return state

    def network_place(self, number: int) -> str:
        """See `Target`."""
        return str(self._of(number) / _NETWORK)

    def open_rows(self, chain: Sequence[Generation]) -> Rows:
        """See `Target`."""
        tables: dict[str, TableRows] = {}
        try:
            for name, table in chain[0].tables.items():
                layers = [self._layer(generation, name) for generation in chain]
                tables[name] = self._format.read(layers, table.dim)
            self._check_there(chain)
        except (OSError, DataError, StoreError):
            _Rows(tables).close()
            self._check_there(chain)  # files that are missing are no damage where their generation was removed
            raise
        except BaseException:
            _Rows(tables).close()
            raise
        return _Rows(tables)

    def _check_there(self, chain: Sequence[Generation]) -> None:
        for generation in chain:
            if self.manifest(generation.number) is None:
                raise removed(generation.number, self.name)

    def _missing(self, number: int, path: Path) -> Exception:
        if self.manifest(number) is None:
            return removed(number, self.name)
        return DamagedFileError(f"{path} is missing; {ADVICE}")

    def close(self) -> None:
        """Holds nothing."""

    def _of(self, number: int) -> Path:
        return self._folder / f"{number:08d}"

    def _path(self, number: int, table: str, part: int) -> Path:
        return self._of(number) / f"{file_stem(table)}-{part}{self._format.suffix}"

    def _layer(self, generation: Generation, table: str) -> list[WrittenRows]:
        found, number = [], generation.number
        for part, files in enumerate(generation.parts):
            path = self._path(number, table, part)
            try:
                sums = {
                    name: Checksums.from_json(each)
                    for name, each in files.items()
                    if name == path.name or name.startswith(f"{path.name}/")
                }
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"generation {number} of {self.name}: no checksums of {path.name} ({error})") from None
            if sums:  # a rank that had nothing to write has no file
                found.append(WrittenRows(path, _about(number, table, part), sums))
        names = {name.partition("/")[0] for files in generation.parts for name in files}
        if others := sorted(name for name in names if not name.endswith(self._format.suffix)):
            raise DataError(f"generation {number} of {self.name} has {others[0]}, and no files {self._format.suffix}")
        return found


def _about(number: int, table: str, part: int) -> bytes:
    """The metadata of a file of rows, which say whose rows it has."""
    return json.dumps({"generation": number, "table": table, "part": part}).encode()


def _is_own_name(name: str) -> bool:
    partial = _PARTIAL.fullmatch(name)
    return _OWN.fullmatch(name if partial is None else partial[1]) is not None


class _Part:
    """Writers of the tables of a part, made when they are needed."""

    def __init__(
        self,
        table_format: TableFormat,
        path_of: Callable[[str], Path],
        tables: Mapping[str, int],
        about: Mapping[str, bytes],
    ) -> None:
        self._format, self._path_of, self._tables, self._about = table_format, path_of, tables, about
        self._writers: dict[str, TableWriter] = {}

    def rows(self, table: str, ids: np.ndarray, vectors: np.ndarray) -> None:
        self._writer(table).write(ids, vectors)

    def deleted(self, table: str, ids: np.ndarray) -> None:
        self._writer(table).write(ids, None)

    def _writer(self, table: str) -> TableWriter:
        if table not in self._writers:
            path = self._path_of(table)
            self._writers[table] = self._format.write(path, self._tables[table], self._about[table])
        return self._writers[table]

    def close(self) -> Part:
        sums: dict[str, Checksums] = {}
        for table, writer in self._writers.items():
            sums |= writer.close()
            _sync(self._path_of(table))  # here: another host cannot wait for what this one has not sent
        return {name: each.to_json() for name, each in sums.items()}


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
