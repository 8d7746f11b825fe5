"""Rewrite: a prepared data set in a new folder, with the ids of some tables in another order."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from rowmesh._support.files.checksums import Checksums
from rowmesh.data.bijection import Bijection
from rowmesh.data.codes import map_ids
from rowmesh.data.prepared import (
    Prepared,
    bijection_path,
    counts_path,
    split_file,
    vocabulary_path,
    write_vocabulary,
)
from rowmesh.data.progress import Progress
from rowmesh.data.window import SplitFile
from rowmesh.data.writer import SplitWriter

OTHER_FILES = ("quarantine.jsonl",)


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
