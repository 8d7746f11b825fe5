"""Windows: some blocks of a split in memory, and batches gathered from them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmesh._support.faults import reach
from rowmesh._support.files.verified import PositionedReader
from rowmesh.data.prepared import Prepared, arrow_schema, split_file
from rowmesh.data.schema import Schema
from rowmesh.errors import DataError
from rowmesh.ops.compiled import compiled


@dataclass(frozen=True, eq=False)
class Bags:
    """The lists of one multi-hot feature: bag i is `ids[offsets[i]:offsets[i + 1]]`."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Window:
    """Samples of some blocks, column by column.

    Attributes:
        labels: float32 `[L, n]`.
        weights: float32 `[n]`; None where samples have none.
        dense: float32 `[number of dense features, n]`.
        ids: int32 `[number of one-hot features, n]`.
        bags: one for each multi-hot feature.
    """

    labels: NDArray[np.float32]
    weights: NDArray[np.float32] | None
    dense: NDArray[np.float32]
    ids: NDArray[np.int32]
    bags: tuple[Bags, ...]


def window_of(batches: Sequence[pa.RecordBatch], schema: Schema, multi_hot: Sequence[bool]) -> Window:
    """A copy of the samples of some record batches, whose columns are those of `arrow_schema`."""
    columns = list(zip(*(batch.columns for batch in batches), strict=True))
    num_labels, first = len(schema.labels), schema.num_targets
    num_dense = len(schema.dense)
    features = list(zip(multi_hot, columns[first + num_dense :], strict=True))
    num_samples = sum(batch.num_rows for batch in batches)
    return Window(
        labels=_stack(columns[:num_labels], num_samples, np.float32),
        weights=_stack(columns[num_labels:first], num_samples, np.float32)[0] if first > num_labels else None,
        dense=_stack(columns[first : first + num_dense], num_samples, np.float32),
        ids=_stack([parts for is_list, parts in features if not is_list], num_samples, np.int32),
        bags=tuple(_bags(parts) for is_list, parts in features if is_list),
    )


class SplitFile:
    """The Arrow file of one split, mapped, and verified as it is read.

    Record batches are checked before they are handed out: their columns, their numbers of rows, the bounds of lists,
    and that ids are rows of their tables. So the code that follows cannot read or write out of bounds.

    Args:
        prepared: the data set.
        split: of it.
        span: the samples that windows are made of, by position; default: all.

    Raises:
        DataError: the file cannot be read as Arrow, or is not of this data set.
    """

    def __init__(self, prepared: Prepared, split: str, span: range | None = None) -> None:
        self.path = prepared.split_path(split)
        self._tables, self._schema = prepared.tables, prepared.schema
        self._num_samples, self._block_samples = prepared.splits[split].samples, prepared.block_samples
        self._span = range(self._num_samples) if span is None else span
        self._file = prepared.files.open(split_file(split))
        self._source = PositionedReader(self._file)
        self._lock = threading.Lock()  # of the reader's position
        self._source.copies = True  # the index of record batches, which is used without being read again
        with self._reading():
            self._reader = pa.ipc.open_file(pa.PythonFile(self._source, mode="r"))
            self.schema = self._reader.schema
            self.num_blocks = self._reader.num_record_batches
        self._source.copies = False
        self._check_file(arrow_schema(prepared.schema, [table.multi_hot for table in prepared.tables]))
        self._checked = np.full(self.num_blocks, -1, np.int32)
        """The generation of the file in which each record batch was checked; −1 before the first check."""

    def window(self, blocks: Sequence[int] | NDArray[np.integer]) -> Window:
        """Copies some blocks into memory, one sequential read for each; of them only the samples of the span."""
        reach("data.window", self.path)
        batches = [self._within_span(self.block(int(block)), int(block)) for block in blocks]
        return window_of(batches, self._schema, [table.multi_hot for table in self._tables])

    def block(self, number: int) -> pa.RecordBatch:
        """A record batch of the mapped file, checked.

        Raises:
            DataError: the record batch is not what preparation writes; names the feature.
            DamagedFileError: the file is not what was written.
        """
        with self._lock, self._reading():
            batch = self._reader.get_batch(number)
        if self._checked[number] != self._file.generation:
            self._check(batch, number)
            self._checked[number] = self._file.generation
        return batch

    def _within_span(self, batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
        first = number * self._block_samples
        start, stop = max(self._span.start - first, 0), min(self._span.stop - first, batch.num_rows)
        return batch.slice(start, stop - start)

    def _size(self, block: int) -> int:
        return min(self._num_samples - block * self._block_samples, self._block_samples)

    def _check(self, batch: pa.RecordBatch, number: int) -> None:
        """Refuses what copying would trust."""
        where = f"record batch {number}"
        with self._reading():
            batch.validate()  # that buffers are as long as they should be
        if batch.num_rows != self._size(number):
            raise self._refusal(f"{where} has {batch.num_rows:,} samples, not {self._size(number):,}")
        for name, column in zip(self.schema.names, batch.columns, strict=True):
            if column.null_count:
                raise self._refusal(f"{where}: {name!r} has {column.null_count:,} missing values")
        for table, column in zip(self._tables, batch.columns[-len(self._tables) :], strict=True):
            if table.multi_hot:
                self._check_lists(f"{where}, feature {table.name!r}", column)
            ids = column.values if table.multi_hot else column
            self._check_ids(f"{where}, feature {table.name!r}", ids.to_numpy(), table.num_rows)

    def _check_file(self, expected: pa.Schema) -> None:
        found = self.schema
        if found.names != expected.names or not all(map(_is_alike, found.types, expected.types)):
            raise self._refusal(f"its columns are not those of the data set: {_shown(found)}")
        num_blocks = -(-self._num_samples // self._block_samples)
        if self.num_blocks != num_blocks:
            raise self._refusal(
                f"has {self.num_blocks:,} record batches, not {num_blocks:,} for {self._num_samples:,} samples"
            )

    def _check_lists(self, where: str, column: pa.ListArray) -> None:
        offsets, num_ids = column.offsets.to_numpy(), len(column.values)
        if column.values.null_count:
            raise self._refusal(f"{where}: lists have missing ids")
        if offsets[0] < 0 or offsets[-1] > num_ids or (offsets[1:] < offsets[:-1]).any():
            raise self._refusal(f"{where}: the bounds of its lists do not rise from 0 to {num_ids:,}")

    def _check_ids(self, where: str, ids: NDArray[np.int32], num_rows: int) -> None:
        if len(ids) and int(ids.view(np.uint32).max()) >= num_rows:  # ids below 0 are large then
            wrong = ids[(ids < 0) | (ids >= num_rows)]
            raise self._refusal(
                f"{where}: {len(wrong):,} ids are no rows of its table, the first of them {wrong[0]}; rows are 0 to "
                f"{num_rows - 1:,}"
            )

    def _refusal(self, what: str) -> DataError:
        return DataError(f"{self.path}: {what}; prepare the data again")

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.path}: cannot be read as Arrow ({error}); prepare the data again") from error


def _is_alike(found: pa.DataType, expected: pa.DataType) -> bool:
    """Whether two types are the same, whatever the items of lists are called."""
    if pa.types.is_list(found) and pa.types.is_list(expected):
        return found.value_type == expected.value_type
    return found == expected


def _shown(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in list(schema)[:5]) + (", …" if len(schema) > 5 else "")


def _stack(columns: Sequence[Sequence[pa.Array]], num_samples: int, dtype: type) -> NDArray:
    """The parts of each column back to back: `[number of columns, num_samples]`."""
    out = np.empty((len(columns), num_samples), dtype)
    for row, parts in zip(out, columns, strict=True):
        np.concatenate([part.to_numpy() for part in parts], out=row)
    return out


def _bags(parts: Sequence[pa.ListArray]) -> Bags:
    bounds = [part.offsets.to_numpy() for part in parts]
    lengths = np.concatenate([np.diff(each) for each in bounds])
    offsets = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])
    ids = [part.values.to_numpy()[each[0] : each[-1]] for part, each in zip(parts, bounds, strict=True)]
    return Bags(np.concatenate(ids), offsets)


@compiled(nogil=True)
def gather_columns(columns, samples, out):  # pragma: no cover - compiled
    """`out[f, b] = columns[f, samples[b]]`."""
    for f in range(columns.shape[0]):
        for b in range(len(samples)):
            out[f, b] = columns[f, samples[b]]


@compiled(nogil=True)
def gather_rows(columns, samples, out):  # pragma: no cover - compiled
    """`out[b, f] = columns[f, samples[b]]`."""
    for f in range(columns.shape[0]):
        for b in range(len(samples)):
            out[b, f] = columns[f, samples[b]]


@compiled(nogil=True)
def gather_bags(ids, offsets, samples, out_starts, out):  # pragma: no cover - compiled
    """Copies the bag of each sample to where it starts in `out`."""
    for b in range(len(samples)):
        start = offsets[samples[b]]
        for i in range(offsets[samples[b] + 1] - start):
            out[out_starts[b] + i] = ids[start + i]
