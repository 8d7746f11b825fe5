"""Rewrite: a prepared data set in a new folder, with the ids of some tables in another order."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from rowmesh.data.bijection import Bijection
from rowmesh.data.codes import map_ids
from rowmesh.data.prepared import Prepared, bijection_path, counts_path, vocabulary_path, write_vocabulary
from rowmesh.data.progress import Progress
from rowmesh.data.writer import SplitWriter

OTHER_FILES = ("quarantine.jsonl",)


def rewrite(data: Prepared, bijections: Mapping[str, Bijection], folder: Path, progress: Progress) -> None:
    """Writes all but the metadata.

    Args:
        data: what is read.
        bijections: of the tables that change.
        folder: where to write.
        progress: told about every block.
    """
    for name in ("counts", "vocabulary", "bijection"):
        (folder / name).mkdir()
    for name in data.features:
        _rewrite_table(data, name, bijections.get(name, Bijection()), folder)
    for split in data.splits:
        _rewrite_split(data, split, bijections, folder / f"{split}.arrow", progress)
    for name in OTHER_FILES:
        if (data.folder / name).exists():
            shutil.copyfile(data.folder / name, folder / name)


def _rewrite_table(data: Prepared, name: str, bijection: Bijection, folder: Path) -> None:
    if not len(bijection.span):
        shutil.copyfile(counts_path(data.folder, name), counts_path(folder, name))
        shutil.copyfile(vocabulary_path(data.folder, name), vocabulary_path(folder, name))
        return
    span = slice(bijection.span.start, bijection.span.stop)
    order = bijection.rank_of_row
    shutil.copyfile(counts_path(data.folder, name), counts_path(folder, name))
    counts = np.load(counts_path(folder, name), mmap_mode="r+")
    counts[span] = counts[order]
    counts.flush()
    values = data.vocabulary(name)
    parts = [values[: span.start], values.take(pa.array(order)), values[span.stop :]]
    write_vocabulary(vocabulary_path(folder, name), pa.concat_arrays(parts))
    bijection.save(bijection_path(folder, name))


def _rewrite_split(
    data: Prepared, split: str, bijections: Mapping[str, Bijection], path: Path, progress: Progress
) -> None:
    with pa.memory_map(str(data.split_path(split))) as file:
        reader = pa.ipc.open_file(file)
        with SplitWriter(path, reader.schema, data.block_samples) as writer:
            for block in range(reader.num_record_batches):
                writer.write(_mapped(reader.get_batch(block), bijections))
                progress(f"writing {split}", (block + 1) / reader.num_record_batches)


def _mapped(batch: pa.RecordBatch, bijections: Mapping[str, Bijection]) -> list[pa.Array]:
    columns = batch.columns
    for name, bijection in bijections.items():
        index = batch.schema.get_field_index(name)
        columns[index] = map_ids(columns[index], lambda ids, to_rows=bijection.rows: to_rows(ids.to_numpy()))
    return columns
