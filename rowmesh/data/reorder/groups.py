"""Groups: ids that occur together in the training split: those of a batch, or of a bag where samples have several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rowmesh.data.prepared import Prepared, Table
from rowmesh.data.window import SplitFile

MOST_HELD_OUT = 256
LEAST_APART = 10


@dataclass(frozen=True, eq=False)
class Column:
    """The ids of one table, batch by batch; batches end where blocks of the data do.

    Every tenth batch, or fewer where there are many, is *held out*: it makes no groups, and judges the new order.

    Attributes:
        data: a prepared data set.
        table: whose ids.
        batch_size: samples of a batch.
    """

    data: Prepared
    table: Table
    batch_size: int

    @property
    def num_batches(self) -> int:
        """The number of batches in the training split."""
        full, rest = divmod(self.data.splits["train"].samples, self.data.block_samples)
        return full * -(-self.data.block_samples // self.batch_size) - (-rest // self.batch_size)

    @property
    def stride(self) -> int:
        """The last of so many batches is held out."""
        return max(LEAST_APART, -(-self.num_batches // MOST_HELD_OUT))

    def groups(self) -> Iterator[tuple[int, NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]]:
        """Block by block: number of the first batch, ids, and where each group of them begins and ends."""
        number = 0
        for ids, samples, batches in self._blocks():
            kept = (number + np.arange(len(batches) - 1)) % self.stride != self.stride - 1
            if self.table.multi_hot:
                kept = np.repeat(kept, np.diff(batches))
                yield number, ids, samples[:-1][kept], samples[1:][kept]
            else:
                yield number, ids, batches[:-1][kept], batches[1:][kept]
            number += len(batches) - 1

    def held_out(self) -> list[NDArray[np.int32]]:
        """The ids of each batch that is held out."""
        found, number = [], 0
        for ids, samples, batches in self._blocks():
            first = -(number + 1) % self.stride
            for batch in range(first, len(batches) - 1, self.stride):
                found.append(ids[samples[batches[batch]] : samples[batches[batch + 1]]].copy())
            number += len(batches) - 1
        return found

    def _blocks(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]]:
        """Ids, where those of each sample begin, and with which sample each batch begins; both have an end."""
        column = self.data.features.index(self.table.name) - len(self.data.features)
        file = SplitFile(self.data, "train")
        for block in range(file.num_blocks):
            values = file.block(block).columns[column]
            size = len(values)
            batches = np.append(np.arange(0, size, self.batch_size, dtype=np.int64), size)
            if self.table.multi_hot:
                yield values.values.to_numpy(), values.offsets.to_numpy().astype(np.int64), batches
            else:
                yield values.to_numpy(), np.arange(size + 1, dtype=np.int64), batches


def count_prefixes(batches: Sequence[NDArray[np.int32]], prefix_rows: int) -> NDArray[np.int64]:
    """How many distinct prefixes each batch of rows reads.

    >>> count_prefixes([np.array([0, 1, 9]), np.array([5])], prefix_rows=4).tolist()
    [2, 1]
    """
    return np.array([len(np.unique(rows // prefix_rows)) for rows in batches], np.int64)
