"""ParquetTables: ids with their vectors as Parquet; where the vector is null, the id is gone."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmesh._support.files.checksums import Checksums, ChecksumWriter
from rowmesh._support.files.verified import VerifiedFile
from rowmesh.errors import DamagedFileError, DataError
from rowmesh.publish.chain import ADVICE
from rowmesh.publish.folder import WrittenRows
from rowmesh.publish.target import closed

_ABOUT = b"rowmesh"
"""A key of the file's metadata, which says whose rows it has."""


class ParquetTables:
    """Columns `id` (int64) and `vector` (float32, D of them, or null). Readers hold all rows in memory."""

    suffix = ".parquet"

    def write(self, path: Path, dim: int, about: bytes) -> ParquetWriter:
        """See `TableFormat`."""
        return ParquetWriter(path, dim, about)

    def read(self, layers: Sequence[Sequence[WrittenRows]], dim: int) -> ParquetRows:
        """See `TableFormat`."""
        return ParquetRows([written for layer in layers for written in layer], dim)


class ParquetWriter:
    """See `TableWriter`."""

    def __init__(self, path: Path, dim: int, about: bytes) -> None:
        self._name, self._dim, self._type = path.name, dim, pa.list_(pa.float32(), dim)
        fields = [pa.field("id", pa.int64(), nullable=False), pa.field("vector", self._type)]
        self._schema = pa.schema(fields, metadata={_ABOUT: about})
        self._file = ChecksumWriter(path.open("wb"))
        try:
            self._writer = pq.ParquetWriter(pa.PythonFile(self._file, mode="w"), self._schema)
        except BaseException:
            self._file.close()
            raise

    def write(self, ids: np.ndarray, vectors: np.ndarray | None) -> None:
        """See `TableWriter`."""
        if vectors is None:
            column = pa.nulls(len(ids), self._type)
        else:
            column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), self._dim)
        self._writer.write_table(pa.table([pa.array(ids), column], schema=self._schema))

    def close(self) -> Mapping[str, Checksums]:
        """See `TableWriter`."""
        try:
            self._writer.close()
        finally:
            self._file.close()
        return {self._name: self._file.checksums()}


class ParquetRows:
    """All rows of the files, in memory; an id is taken from the first file that has it."""

    def __init__(self, written: Sequence[WrittenRows], dim: int) -> None:
        parts = [_load(each, dim) for each in written]
        ids = np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)])
        known, first = np.unique(ids, return_index=True)
        is_there = np.concatenate([np.empty(0, bool), *(part[1] for part in parts)])[first]
        vectors = np.concatenate([np.empty((0, dim), np.float32), *(part[2] for part in parts)])[first]
        self._name = str(written[0].path) if written else "a table without Parquet files"
        self._rows: tuple[np.ndarray, np.ndarray, np.ndarray] | None = known, is_there, vectors

    def look_up(self, ids: np.ndarray, vectors: np.ndarray) -> np.ndarray:
        """See `Rows.look_up`."""
        if self._rows is None:
            raise closed(self._name)
        known, is_there, kept = self._rows
        places = np.searchsorted(known, ids)
        found = places < len(known)
        found[found] = known[places[found]] == ids[found]
        found[found] = is_there[places[found]]
        vectors[found] = kept[places[found]]
        return found

    def close(self) -> None:
        """Frees the memory."""
        self._rows = None


def _load(written: WrittenRows, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, whether each has a vector, and vectors; copies."""
    path = written.path
    try:
        file = VerifiedFile(path, os.open(path, os.O_RDONLY), written.sums[path.name], ADVICE)
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing; {ADVICE}") from None
    try:
        table = pq.read_table(pa.BufferReader(pa.py_buffer(file.read()))).combine_chunks()
        about = (table.schema.metadata or {}).get(_ABOUT)
        if about != written.about:
            raise DamagedFileError(f"{path} has other rows than {written.about.decode()}; {ADVICE}")
        is_there = np.asarray(table["vector"].is_valid())
        vectors = np.zeros((len(table), dim), np.float32)
        vectors[is_there] = table["vector"].drop_null().combine_chunks().flatten().to_numpy().reshape(-1, dim)
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read: {error}") from error
    return table["id"].to_numpy().copy(), is_there, vectors
