"""Export: the rows of a trained model under the values that users know, for a server.

A table becomes a Parquet file with a line an id, the most frequent first, whatever order its rows were trained in::

    export/
      manifest.json       what was exported
      network.pt          the dense network's `state_dict`
      dense.json          how raw dense values become what the network takes
      tables/C1.parquet   id: int64, the frequency rank; value: of the raw data; count: in training; vector: float[D]
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rowmesh import checkpoint
from rowmesh._support.files.folder import replacing_folder
from rowmesh._support.files.names import file_stem
from rowmesh._support.suggest import hint
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.rows import SavedKnown, SavedRows, as_float
from rowmesh.data import Prepared
from rowmesh.data.bijection import Bijection
from rowmesh.data.progress import Progress, silent
from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.run.finished import FinishedRun
from rowmesh.run.run_folder import write_json

logger = logging.getLogger("rowmesh")
EXPORT = "an export"
NETWORK, DENSE, TABLES = "network.pt", "dense.json", "tables"
CHUNK_BYTES = 1 << 24  # of vectors in memory at a time, and in a group of rows of a file


@dataclass(frozen=True)
class Exported:
    """A table that was written.

    Attributes:
        table: its name.
        num_rows, dim: lines, and length of a vector.
        num_bytes: of the file.
    """

    table: str
    num_rows: int
    dim: int
    num_bytes: int


def export(
    run: Path,
    out: Path,
    *,
    data: Path | None = None,
    tables: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress = silent,
    verify: bool = True,
    log: Callable[[str], object] = logger.info,
) -> list[Exported]:
    """Writes the tables of a finished run by the values of the raw data, and its dense network.

    A dynamic table has a line for each id that it knows. The last line of any other table is the row that rare and
    unseen values share; its value is null, as is the value of the line for missing values, if there is such a line.
    Memory is bounded, whatever the size of the tables.

    Args:
        run: the run's folder.
        out: folder to write; it appears whole or not at all.
        data: the prepared data, where they are no longer where the run was trained on them.
        tables: some of them; default: all.
        overwrite: replace a folder that an earlier export wrote.
        progress: called with what is being written, and the share that is done.
        verify: compare what is read of the model and of the data with their checksums; False reads damaged files too.
        log: receives a line for the model that is the best of its run, and for data that are not verified, with the
            reason; by default rowmesh's log.

    Raises:
        RowmeshError: there is no model, it is damaged, rows of it are not finite, there is no such table, the data are
            not those of the training, or `out` is not free.
    """
    finished = FinishedRun.open(run)
    folder, manifest = finished.folder, finished.manifest
    chosen = _choose(tables, manifest)
    prepared = finished.data(data, verify=verify)
    for line in finished.remarks(prepared):
        log(line)
    request = {"run": str(run.absolute()), "tables": chosen, "steps": manifest.metadata.get("steps")}
    with replacing_folder(out, kind=EXPORT, request=request, overwrite=overwrite) as partial:
        finished.check_meaning(prepared, "rows would stand beside values of others")  # reads all vocabularies
        (partial / TABLES).mkdir()
        torch.save(_network(SavedFiles(folder.model, manifest, verify=verify)), partial / NETWORK)
        write_json(partial / DENSE, _dense(prepared))
        written = []
        for table in chosen:  # one open at a time
            opened, to = (folder.model, manifest, table), (prepared, partial / TABLES, progress)
            if manifest.tables[table].known:
                written.append(_write_known(SavedKnown(*opened, verify=verify), *to))
            else:
                written.append(_write(SavedRows(*opened, verify=verify), *to))
        return written


def _choose(tables: Sequence[str], manifest: checkpoint.Manifest) -> list[str]:
    for name in tables:
        if name not in manifest.tables:
            suggestion = hint(name, manifest.tables) or f"; known: {', '.join(manifest.tables)}"
            raise ConfigurationError(f"the model has no table {name!r}{suggestion}")
    return [name for name in manifest.tables if not tables or name in tables]


def _network(files: SavedFiles) -> dict[str, torch.Tensor]:
    """The network's `state_dict`; raises RowmeshError where there is none, or where numbers are not finite."""
    network = files.dense().get("network")
    if not isinstance(network, dict):
        raise RowmeshError(f"the model in {files.checkpoint} has no network; rowmesh train writes one")
    for name, tensor in network.items():
        if isinstance(tensor, torch.Tensor) and (count := int((~torch.isfinite(tensor)).sum())):
            raise RowmeshError(f"the network in {files.checkpoint}: {count:,} numbers of {name} are not finite")
    return network


def _dense(data: Prepared) -> dict[str, Any]:
    """How dense features were transformed, in the order of the network's inputs; a missing value is 0 afterwards."""
    scales = data.dense_scales
    features = [{"name": name} for name in data.schema.dense]
    if scales is not None:
        features = [{key: getattr(scale, key) for key in ("name", "log1p", "mean", "std")} for scale in scales]
    return {"transform": data.schema.dense_transform, "features": features}


def _write(saved: SavedRows, data: Prepared, folder: Path, progress: Progress) -> Exported:
    path = folder / f"{file_stem(saved.table)}.parquet"
    values, counts = data.vocabulary(saved.table), data.counts(saved.table)
    vector = pa.list_(pa.from_numpy_dtype(as_float(saved.read(range(0))).dtype), saved.dim)
    schema = pa.schema({"id": pa.int64(), "value": values.type, "count": pa.int64(), "vector": vector})
    spoilt, first = 0, ""
    with pq.ParquetWriter(path, schema) as writer:
        for ids, rows, vectors in _by_rank(saved, data.bijection(saved.table), folder):
            if len(found := ids[~np.isfinite(vectors).all(axis=1)]):
                spoilt, first = spoilt + len(found), first or str(found[0])
            known = pa.array(rows, mask=rows >= len(values))  # the last row, of rare values, has none
            columns = [pa.array(ids), values.take(known), pa.array(np.asarray(counts[rows])), _lists(vectors, vector)]
            writer.write_table(pa.table(columns, schema=schema))
            progress(saved.table, (int(ids[-1]) + 1) / saved.num_rows)
    if spoilt:
        raise RowmeshError(
            f"table {saved.table!r}: {spoilt:,} of {saved.num_rows:,} rows are not finite, the first of them that of "
            f"id {first}: nothing is exported; train again with smaller learning rates, or restore the model"
        )
    return Exported(saved.table, saved.num_rows, saved.dim, path.stat().st_size)


def _write_known(saved: SavedKnown, data: Prepared, folder: Path, progress: Progress) -> Exported:
    """Writes the ids that a dynamic table knows; `count` is how often the table has seen each."""
    path, values = folder / f"{file_stem(saved.table)}.parquet", data.vocabulary(saved.table)
    vector = pa.list_(pa.from_numpy_dtype(as_float(torch.empty(0, dtype=saved.dtype)).dtype), saved.dim)
    schema = pa.schema({"id": pa.int64(), "value": values.type, "count": pa.int64(), "vector": vector})
    done = 0
    with pq.ParquetWriter(path, schema) as writer:
        for ids, counts, rows in saved.read(max(CHUNK_BYTES // (4 * saved.dim), 1)):
            vectors = as_float(rows)
            if len(found := ids[~np.isfinite(vectors).all(axis=1)]):
                raise RowmeshError(
                    f"table {saved.table!r}: rows are not finite, the first of them that of id {found[0]}: nothing is "
                    "exported; train again with smaller learning rates, or restore the model"
                )
            named = values.take(pa.array(ids, mask=(ids < 0) | (ids >= len(values))))  # rare values have no name
            writer.write_table(
                pa.table([pa.array(ids), named, pa.array(counts), _lists(vectors, vector)], schema=schema)
            )
            done += len(ids)
            progress(saved.table, done / saved.num_ids)
    return Exported(saved.table, saved.num_ids, saved.dim, path.stat().st_size)


def _by_rank(
    saved: SavedRows, bijection: Bijection, folder: Path
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]]:
    """Ids, their rows and vectors, in order of the ids, some at a time.

    Rows of the span in another order are put into a file of no name first: read by id from the model, each would be
    looked for in all parts of it.
    """
    span, dtype = bijection.span, as_float(saved.read(range(0))).dtype
    size = max(CHUNK_BYTES // (dtype.itemsize * saved.dim), 1)
    for rows in _cut(range(span.start), size):
        yield _same(rows), _same(rows), as_float(saved.read(rows))
    if span:
        with TemporaryFile(dir=folder) as file:
            moved = np.memmap(file, dtype, mode="w+", shape=(len(span), saved.dim))
            for rows in _cut(span, size):
                moved[rows.start - span.start : rows.stop - span.start] = as_float(saved.read(rows))
            for ids in _cut(span, size):
                rows = bijection.rows(_same(ids))
                yield _same(ids), rows, moved[rows - span.start]
            del moved
    for rows in _cut(range(span.stop, saved.num_rows), size):
        yield _same(rows), _same(rows), as_float(saved.read(rows))


def _cut(numbers: range, size: int) -> Iterator[range]:
    """Runs of at most `size`."""
    return (numbers[begin : begin + size] for begin in range(0, len(numbers), size))


def _same(numbers: range) -> npt.NDArray[np.int64]:
    return np.arange(numbers.start, numbers.stop, dtype=np.int64)


def _lists(vectors: npt.NDArray[Any], kind: Any) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), type=kind)
