"""reorder: a prepared data set again, with ids that occur together next to each other."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import rowmesh
from rowmesh._support.files.checksums import Checksums
from rowmesh._support.files.folder import replacing_folder
from rowmesh._support.files.manifest import Manifest
from rowmesh.data.bijection import Bijection
from rowmesh.data.codes import map_ids
from rowmesh.data.prepared import (
    PREPARED,
    Prepared,
    Table,
    bijection_path,
    counts_path,
    split_file,
    vocabulary_path,
    write_vocabulary,
)
from rowmesh.data.progress import Progress, silent
from rowmesh.data.reorder.communities import load_louvain
from rowmesh.data.reorder.options import ReorderOptions
from rowmesh.data.reorder.order import TableOrder, find_order
from rowmesh.data.window import SplitFile
from rowmesh.data.writer import SplitWriter
from rowmesh.errors import ConfigurationError, DataError

MIN_ROWS = 10_000
OTHER_FILES = ("quarantine.jsonl",)


def reorder(
    data: str | Path | Prepared,
    out: Path,
    *,
    tables: Sequence[str] = (),
    min_rows: int = MIN_ROWS,
    options: ReorderOptions | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Prepared:
    """Writes a prepared data set with other row numbers; the output folder appears whole or not at all.

    Row 0 … of a table stay its most frequent ids, in order of frequency. The ids after them are put in order
    of communities: ids that occur together in batches (or bags) of the training split get neighbouring rows, so that a
    tensor-train table computes fewer prefixes a batch. A table keeps its order where no other makes held out batches
    read 2 % fewer, or there are fewer than 40 batches. The last row still stands for all rare ids. Counts and the
    values of rows follow.

    Memory: `max_ids` · 256 bytes and about 100 bytes an edge, whatever the number of ids; and the values of one table.

    Args:
        data: what `rowmesh data prepare` wrote; it is not changed, unless it is `out`.
        out: the folder to write.
        tables: names; by default all of `min_rows` rows or more.
        min_rows: see `tables`.
        options: see `ReorderOptions`.
        overwrite: replace a folder that is not empty.
        progress: receives how far it is.

    Raises:
        ConfigurationError: no table is large enough, or scikit-network is missing.
        DataError: no prepared folder, no such table, no training split, or the data are reordered already.
        RowmeshError: the output folder is in use or not empty, or the disk is full.
    """
    source, options = data if isinstance(data, Prepared) else Prepared.open(data), options or ReorderOptions()
    chosen = choose_tables(source, tables, min_rows)
    load_louvain()
    request = reorder_request(source, chosen, options)
    target, sums = Path(out).absolute(), {}
    with replacing_folder(target, kind=PREPARED, request=request, overwrite=overwrite, checksums=sums) as folder:
        orders = {table.name: find_order(source, table, options, progress) for table in chosen}
        bijections = {name: order.bijection for name, order in orders.items() if len(order.bijection.span)}
        sums.update(rewrite(source, bijections, folder, progress))
        reordering = {"options": asdict(options), "tables": {name: _facts(order) for name, order in orders.items()}}
        replace(source, folder=folder, reordering=reordering, rowmesh_version=rowmesh.__version__).save()
    return Prepared.open(out)


def choose_tables(data: Prepared, names: Sequence[str], min_rows: int = MIN_ROWS) -> tuple[Table, ...]:
    """The tables of some names, each once; without names those of `min_rows` rows or more.

    Raises:
        ConfigurationError: there are none.
        DataError: there is no such table, no training split, or the data are reordered already.
    """
    data.split_path("train")
    if data.reordering:
        done = ", ".join(data.reordering["tables"])
        raise DataError(f"{data.folder} is reordered already (tables {done}); reorder the data that it was made of")
    if shared := [name for name in data.features if data.schema.table_of(name) != name]:
        raise DataError(
            f"{data.folder} cannot be reordered: {', '.join(shared)} share the vocabulary of another feature, which "
            "reordering does not follow yet; prepare the data with a vocabulary for each"
        )
    if names:
        return tuple(data.table(name) for name in dict.fromkeys(names))
    chosen = tuple(table for table in data.tables if table.num_rows >= min_rows)
    if not chosen:
        largest = max(data.tables, key=lambda table: table.num_rows)
        raise ConfigurationError(
            f"no table of {data.folder} has {min_rows:,} rows, the largest ({largest.name}) has {largest.num_rows:,}; "
            "name tables, or lower min_rows"
        )
    return chosen


def reorder_request(data: Prepared, tables: Sequence[Table], options: ReorderOptions) -> dict[str, Any]:
    """The inputs that the output depends on.

    Raises:
        DataError: the folder does not say what it was made of.
    """
    manifest = Manifest.read(data.folder)
    if manifest is None:
        raise DataError(f"{data.folder} has no manifest, so that nothing says what it was made of; prepare it again")
    return {
        "reordered": {
            "data": dict(manifest.request),
            "tables": [table.name for table in tables],
            "options": asdict(options),
        }
    }


def _facts(order: TableOrder) -> Mapping[str, Any]:
    """All that is known of an order but the order, for the metadata."""
    facts = {field.name: getattr(order, field.name) for field in fields(order) if field.name != "bijection"}
    return {"first": order.bijection.first, "num_ids": len(order.bijection.span), **facts}


def rewrite(
    data: Prepared, bijections: Mapping[str, Bijection], folder: Path, progress: Progress
) -> dict[str, Checksums]:
    """Writes all but the metadata; returns the checksums of the splits.

    Args:
        data: what is read.
        bijections: of the tables that change.
        folder: where to write.
        progress: receives every block.
    """
    for name in ("counts", "vocabulary", "bijection"):
        (folder / name).mkdir()
    for name in data.features:
        _rewrite_table(data, name, bijections.get(name, Bijection()), folder)
    for name in OTHER_FILES:
        if (data.folder / name).exists():
            shutil.copyfile(data.folder / name, folder / name)
    return {
        split_file(split): _rewrite_split(data, split, bijections, folder / split_file(split), progress)
        for split in data.splits
    }


def _rewrite_table(data: Prepared, name: str, bijection: Bijection, folder: Path) -> None:
    for path in (counts_path, vocabulary_path):
        with path(folder, name).open("wb") as file:
            data.files.open(str(path(Path(), name))).copy_to(file)
    if not len(bijection.span):
        return
    span = slice(bijection.span.start, bijection.span.stop)
    order = bijection.rank_of_row
    counts = np.load(counts_path(folder, name), mmap_mode="r+")
    counts[span] = counts[order]
    counts.flush()
    values = data.vocabulary(name)
    parts = [values[: span.start], values.take(pa.array(order)), values[span.stop :]]
    write_vocabulary(vocabulary_path(folder, name), pa.concat_arrays(parts))
    bijection.save(bijection_path(folder, name))


def _rewrite_split(
    data: Prepared, split: str, bijections: Mapping[str, Bijection], path: Path, progress: Progress
) -> Checksums:
    file = SplitFile(data, split)
    with SplitWriter(path, file.schema, data.block_samples) as writer:
        for block in range(file.num_blocks):
            writer.write(_mapped(file.block(block), bijections))
            progress(f"writing {split}", (block + 1) / file.num_blocks)
    return writer.checksums


def _mapped(batch: pa.RecordBatch, bijections: Mapping[str, Bijection]) -> list[pa.Array]:
    columns = batch.columns
    for name, bijection in bijections.items():
        index = batch.schema.get_field_index(name)
        columns[index] = map_ids(columns[index], lambda ids, to_rows=bijection.rows: to_rows(ids.to_numpy()))
    return columns
