"""ParquetTables: ids with their vectors as Parquet; where the vector is null, the id is gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rowmesh.errors import DataError, StoreError
from rowmesh.publish.target import closed


class ParquetTables:
    """Columns `id` (int64) and `vector` (float32, D of them, or null). Readers hold all rows in memory."""

    suffix = ".parquet"

    def write(self, path: Path, dim: int) -> ParquetWriter:
        """See `TableFormat`."""
        return ParquetWriter(path, dim)

    def read(self, layers: Sequence[Sequence[Path]], dim: int) -> ParquetRows:
        """See `TableFormat`."""
        return ParquetRows([path for layer in layers for path in layer], dim)


class ParquetWriter:
    """See `TableWriter`."""

    def __init__(self, path: Path, dim: int) -> None:
        self._dim, self._type = dim, pa.list_(pa.float32(), dim)
        self._schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("vector", self._type)])
        self._writer = pq.ParquetWriter(path, self._schema)

    def write(self, ids: np.ndarray, vectors: np.ndarray | None) -> None:
        """See `TableWriter`."""
        if vectors is None:
            column = pa.nulls(len(ids), self._type)
        else:
            column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), self._dim)
        self._writer.write_table(pa.table([pa.array(ids), column], schema=self._schema))

    def close(self) -> None:
        """See `TableWriter`."""
        self._writer.close()


class ParquetRows:
    """All rows of the files, in memory; an id is taken from the first file that has it."""

    def __init__(self, paths: Sequence[Path], dim: int) -> None:
        parts = [_load(path, dim) for path in paths]
        ids = np.concatenate([np.empty(0, np.int64), *(part[0] for part in parts)])
        known, first = np.unique(ids, return_index=True)
        is_there = np.concatenate([np.empty(0, bool), *(part[1] for part in parts)])[first]
        vectors = np.concatenate([np.empty((0, dim), np.float32), *(part[2] for part in parts)])[first]
        self._name = str(paths[0]) if paths else "a table without Parquet files"
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


def _load(path: Path, dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, whether each has a vector, and vectors."""
    try:
        table = pq.read_table(path, memory_map=False).combine_chunks()
    except FileNotFoundError as error:
        raise StoreError(f"{path} was removed; refresh") from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    is_there = np.asarray(table["vector"].is_valid())
    vectors = np.zeros((len(table), dim), np.float32)
    vectors[is_there] = table["vector"].drop_null().combine_chunks().flatten().to_numpy().reshape(-1, dim)
    return table["id"].to_numpy(), is_there, vectors
