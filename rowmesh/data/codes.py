"""The first steps of preparation: rows with provisional codes, and how codes become ranks.

A code is an id's order of first appearance in its column. Ranks need the counts of the whole training
split, so rows are written once with codes and read back when the ranks are known; the raw files, which are
slow to parse, are read once.
"""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmesh.data.prepared import BLOCK_SAMPLES, arrow_schema
from rowmesh.data.progress import Progress
from rowmesh.data.quarantine import Quarantine
from rowmesh.data.reader import Block, dense_dtype, read_blocks, total_size
from rowmesh.data.schema import Schema
from rowmesh.data.vocabulary import Vocabulary
from rowmesh.data.writer import SplitWriter
from rowmesh.errors import DataError


@dataclass(frozen=True)
class CodedRows:
    """Rows on disk whose ids are codes."""

    path: Path
    num_samples: int

    def batches(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Record batches with the position of their first row, memory-mapped."""
        start = 0
        with pa.memory_map(str(self.path)) as file:
            reader = pa.ipc.open_file(file)
            for i in range(reader.num_record_batches):
                batch = reader.get_batch(i)
                yield start, batch
                start += batch.num_rows


class Coder:
    """Reads raw files and writes their rows with codes; holds the vocabulary of every column; several may share one."""

    def __init__(self, schema: Schema, multi_hot: Sequence[bool], quarantine: Quarantine, progress: Progress) -> None:
        self.schema, self.multi_hot = schema, multi_hot
        distinct = {feature.table: Vocabulary(feature.table) for feature in schema.categorical}
        self.vocabularies = tuple(distinct[feature.table] for feature in schema.categorical)
        self._quarantine = quarantine
        self._progress = progress

    def write(self, files: Sequence[Path], path: Path) -> CodedRows:
        """Writes the rows of some files, in order.

        Raises:
            DataError: there is no usable row, or whatever reading raises.
        """
        dense = pa.from_numpy_dtype(dense_dtype(self.schema))
        with SplitWriter(path, arrow_schema(self.schema, self.multi_hot, dense=dense), BLOCK_SAMPLES) as writer:
            for columns in self._blocks(files):
                writer.write(columns)
        if writer.num_samples == 0:
            names = ", ".join(str(file) for file in files)
            bad = self._quarantine.num_bad_rows
            why = f"; {bad} bad rows, {self._quarantine.first()}\nCheck the schema" if bad else ": nothing in them"
            raise DataError(f"no usable rows in {names}{why}")
        return CodedRows(path, writer.num_samples)

    def _blocks(self, files: Sequence[Path]) -> Iterator[list[pa.Array]]:
        sizes = [total_size(file, self.schema) for file in files]
        done = 0
        for file, size in zip(files, sizes, strict=True):
            for block in read_blocks(file, self.schema, self._quarantine):
                yield self._encode(file, block)
                self._progress("reading", (done + block.position) / sum(sizes))
            done += size

    def _encode(self, file: Path, block: Block) -> list[pa.Array]:
        try:
            return encode_block(block, self.multi_hot, [vocabulary.encode for vocabulary in self.vocabularies])
        except DataError as error:
            raise DataError(f"{file}: {error}") from error


def encode_block(
    block: Block, multi_hot: Sequence[bool], encodings: Sequence[Callable[[pa.Array], NDArray[np.integer]]]
) -> list[pa.Array]:
    """The columns of `arrow_schema` for checked rows, with a number for each id.

    Args:
        block: the rows.
        multi_hot: which categorical features hold lists.
        encodings: the number of each of some raw ids, by categorical feature.
    """
    weights = [] if block.weights is None else [pa.array(block.weights)]
    columns = [*map(pa.array, block.labels), *weights, *(pa.array(column) for column in block.dense.T)]
    for encode, is_list, ids in zip(encodings, multi_hot, block.categorical, strict=True):
        if is_list and pa.types.is_null(ids.type):
            ids = pa.nulls(len(ids), pa.list_(pa.null()))
        columns.append(map_ids(ids, encode))
    return columns


def map_ids(ids: pa.Array, function: Callable[[pa.Array], NDArray[np.integer]]) -> pa.Array:
    """Applies a function to the ids of a column, or of its lists; a null list becomes an empty one."""
    if not pa.types.is_nested(ids.type):
        return pa.array(function(ids))
    lengths = pc.fill_null(pc.list_value_length(ids), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([np.zeros(1, np.int32), lengths.cumsum(dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(function(ids.flatten())))


@dataclass(frozen=True)
class Ranking:
    """How the codes of one column become rows.

    Attributes:
        row_of_code: int32 `[number of codes]`; every rare code has the last row.
        code_of_row: the code of every row but the rare one.
        counts: int64 `[num_rows]`, occurrences in the training split.
    """

    row_of_code: NDArray[np.int32]
    code_of_row: NDArray[np.int64]
    counts: NDArray[np.int64]

    @staticmethod
    def from_counts(counts: NDArray[np.int64], min_count: int) -> Ranking:
        """Ranks codes by count, most frequent first, equal counts by code.

        >>> Ranking.from_counts(np.array([1, 5, 9, 5]), min_count=2).row_of_code.tolist()
        [3, 1, 0, 2]
        """
        order = np.argsort(-counts, kind="stable")
        kept = order[: int((counts >= min_count).sum())]
        row_of_code = np.full(len(counts), len(kept), np.int32)
        row_of_code[kept] = np.arange(len(kept), dtype=np.int32)
        rare = counts.sum() - counts[kept].sum()
        return Ranking(row_of_code, kept, np.append(counts[kept], rare))

    @property
    def num_rows(self) -> int:
        """Rows of the table, the rare row included."""
        return len(self.counts)


def flat_ids(column: pa.Array) -> NDArray[np.int32]:
    """The ids of a prepared column, those of all its lists one after the other."""
    return (column.flatten() if pa.types.is_nested(column.type) else column).to_numpy()
