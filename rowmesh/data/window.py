"""Windows: some blocks of a split in memory, and batches gathered from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmesh.data.prepared import Prepared
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
        labels: float32 `[n]`.
        dense: float32 `[number of dense features, n]`.
        ids: int32 `[number of one-hot features, n]`.
        bags: one for each multi-hot feature.
    """

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    ids: NDArray[np.int32]
    bags: tuple[Bags, ...]


class SplitFile:
    """The memory-mapped Arrow file of one split."""

    def __init__(self, prepared: Prepared, split: str) -> None:
        path = prepared.split_path(split)
        self._num_dense = prepared.num_dense
        self._multi_hot = [table.multi_hot for table in prepared.tables]
        self._map, self._reader = _open(path)

    def window(self, blocks: Sequence[int] | NDArray[np.integer]) -> Window:
        """Copies some blocks into memory, one sequential read for each."""
        batches = [self._reader.get_batch(int(block)) for block in blocks]
        first_feature = 1 + self._num_dense
        columns = list(zip(*(batch.columns for batch in batches), strict=True))
        features = list(zip(self._multi_hot, columns[first_feature:], strict=True))
        num_samples = sum(batch.num_rows for batch in batches)
        return Window(
            labels=_stack(columns[:1], num_samples, np.float32)[0],
            dense=_stack(columns[1:first_feature], num_samples, np.float32),
            ids=_stack([parts for is_list, parts in features if not is_list], num_samples, np.int32),
            bags=tuple(_bags(parts) for is_list, parts in features if is_list),
        )


def _open(path: Path) -> tuple[pa.MemoryMappedFile, pa.ipc.RecordBatchFileReader]:
    try:
        file = pa.memory_map(str(path))
        return file, pa.ipc.open_file(file)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: cannot be read as Arrow ({error}); prepare the data again") from error


def _stack(columns: Sequence[Sequence[pa.Array]], num_samples: int, dtype: type) -> NDArray:
    """The parts of each column back to back: `[number of columns, num_samples]`."""
    out = np.empty((len(columns), num_samples), dtype)
    for row, parts in zip(out, columns, strict=True):
        np.concatenate([part.to_numpy() for part in parts], out=row)
    return out


def _bags(parts: Sequence[pa.ListArray]) -> Bags:
    lengths = [np.diff(part.offsets.to_numpy()) for part in parts]
    offsets = np.concatenate([[0], np.concatenate(lengths).cumsum(dtype=np.int64)])
    return Bags(np.concatenate([part.flatten().to_numpy() for part in parts]), offsets)


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
