"""Loader: the batches of one rank, in a reproducible order, from data of any size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.data.epochs import EpochLoader
from rowmesh.data.prefetch import prefetch as run_ahead
from rowmesh.data.prepared import Prepared
from rowmesh.data.window import SplitFile, Window, gather_bags, gather_columns, gather_rows, window_of
from rowmesh.errors import ConfigurationError, DataError
from rowmesh.sparse import SparseBatch, take


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples for one step on one rank.

    Attributes:
        dense: float32 `[B, number of dense features]`.
        sparse: the ids of B samples.
        labels: float32 `[B]`; or `[B, L]` where the data have several labels. Each is 0 or 1, or any finite number, as
            the schema says.
        weights: float32 `[B]`, how much each sample counts, 0 or more; None where all count alike.
    """

    dense: Tensor
    sparse: SparseBatch
    labels: Tensor
    weights: Tensor | None = None

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self.labels)

    @property
    def weight(self) -> float:
        """Σ w; B where all count alike."""
        return len(self.labels) if self.weights is None else float(self.weights.double().sum())

    def take(self, samples: Tensor) -> Batch:
        """The given samples (int64), in their order."""
        weights = None if self.weights is None else self.weights[samples]
        return Batch(self.dense[samples], take(self.sparse, samples), self.labels[samples], weights)


class Loader(EpochLoader[Batch]):
    """Iterates over one split of a prepared data set.

    Every global batch is cut into contiguous parts, one a rank, whose sizes differ by one at most: ranks of
    any world size train on the same global batches in the same order. The last batch may be smaller and
    leave ranks without samples (B = 0).

    Iterating yields what is left of the epoch; the next iteration is the next epoch. Leaving a loop early
    keeps the position (`reset` forgets it).

    Args:
        folder: what `rowmesh data prepare` wrote, or the opened Prepared.
        split: "train", "validation" or "test".
        span: which samples of it, by position; default: all.
        batch_size: global, over all ranks.
        rank: which part of each batch to yield.
        world_size: into how many parts each batch is cut.
        shuffle: see `EpochOrder`.
        seed: of the shuffle.
        drop_last: leave out the last batch where it is smaller.
        prefetch: how many batches a thread makes ahead, while another one reads the next window; 0 for none.
        window_blocks: how many blocks (of `Prepared.block_samples`) are shuffled together; two such windows
            are held in memory.

    Raises:
        ConfigurationError: sizes that cannot work.
        DataError: not a prepared folder, no such split, or one without samples.
    """

    def __init__(
        self,
        folder: str | Path | Prepared,
        split: str,
        *,
        batch_size: int,
        span: range | None = None,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        prefetch: int = 2,
        window_blocks: int = 16,
    ) -> None:
        super().__init__(batch_size, rank, world_size, prefetch)
        if window_blocks < 1:
            raise ConfigurationError(f"window_blocks must be 1 or more, got {window_blocks}")
        self.prepared = folder if isinstance(folder, Prepared) else Prepared.open(folder)
        self.split = split
        self.prepared.split_path(split)  # which refuses a split that does not exist
        total = self.prepared.splits[split].samples
        self.span = range(total) if span is None else span
        if self.span.step != 1 or not 0 <= self.span.start <= self.span.stop <= total:
            raise ConfigurationError(f"span {span} is no run of the {total:,} samples of split {split!r}")
        if self.num_samples == 0:
            raise DataError(f"{self.prepared.folder}: split {split!r} has no samples; prepare the data again")
        self._file = SplitFile(self.prepared, split, self.span)
        self.shuffle, self.seed, self.drop_last, self.window_blocks = shuffle, seed, drop_last, window_blocks

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, over all ranks."""
        return len(self.span)

    @property
    def num_batches(self) -> int:
        """Batches an epoch, the same on every rank."""
        full, rest = divmod(self.num_samples, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def _identity(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "window_blocks": self.window_blocks,
            **({"first_sample": self.span.start} if self.span.start else {}),
        }

    def _make(self, epoch: int, first_batch: int) -> Iterator[Batch]:
        order = EpochOrder(
            self.num_samples,
            self.prepared.block_samples,
            self.window_blocks,
            shuffle=self.shuffle,
            seed=self.seed,
            epoch=epoch,
            first_sample=self.span.start,
        )
        windows = run_ahead(_windows(self._file, order, self._parts(first_batch)), 1 if self.prefetch else 0)
        with contextlib.closing(windows):
            pieces = _Pieces(windows)
            for low, high in self._parts(first_batch):
                yield _gather(pieces.between(low, high), high - low, self.prepared)

    def _parts(self, first_batch: int) -> Iterator[tuple[int, int]]:
        """The positions of the epoch that are this rank's part of each batch."""
        for start in range(first_batch * self.batch_size, self.num_batches * self.batch_size, self.batch_size):
            size = min(self.batch_size, self.num_samples - start)
            yield start + size * self.rank // self.world_size, start + size * (self.rank + 1) // self.world_size


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A window in memory, and which of its samples each position of the epoch from `first` to `end` visits."""

    first: int
    end: int
    window: Window
    permutation: NDArray[np.int32]


def _windows(file: SplitFile, order: EpochOrder, parts: Iterator[tuple[int, int]]) -> Iterator[_Loaded]:
    """Reads the windows that the parts visit, in order."""
    done = -1
    for low, high in parts:
        last = order.window_of(high - 1) if high > low else done
        for number in range(max(done + 1, order.window_of(low)), last + 1):
            first, end = order.bounds[number : number + 2].tolist()
            yield _Loaded(first, end, file.window(order.blocks(number)), order.permutation(number))
            done = number


Piece = tuple[Window, NDArray[np.int32]]


class _Pieces:
    """Cuts parts of an epoch into pieces of windows; holds one window at a time."""

    def __init__(self, windows: Iterator[_Loaded]) -> None:
        self._windows = windows
        self._held: _Loaded | None = None

    def between(self, low: int, high: int) -> Iterator[Piece]:
        """Windows and the samples of each that the positions `low` to `high` visit; they only ever rise."""
        while low < high:
            while self._held is None or self._held.end <= low:
                self._held = None  # frees the old window: taking the next starts the reading of one more
                self._held = next(self._windows)
            stop = min(high, self._held.end)
            samples = self._held.permutation[low - self._held.first : stop - self._held.first]
            yield self._held.window, samples
            low = stop


def to_batch(samples: pa.RecordBatch, prepared: Prepared) -> Batch:
    """The batch of all samples of a record batch, in their order; its columns are those of `arrow_schema`."""
    window = window_of([samples], prepared.schema, [table.multi_hot for table in prepared.tables])
    return _gather(iter([(window, np.arange(samples.num_rows, dtype=np.int32))]), samples.num_rows, prepared)


def _gather(pieces: Iterator[Piece], num_samples: int, prepared: Prepared) -> Batch:
    num_one_hot = sum(not table.multi_hot for table in prepared.tables)
    labels = np.empty((num_samples, len(prepared.schema.labels)), np.float32)
    weights = None if prepared.schema.weight is None else np.empty(num_samples, np.float32)
    dense = np.empty((num_samples, prepared.num_dense), np.float32)
    ids = np.empty((num_one_hot, num_samples), np.int64)
    bags: list[list[tuple[NDArray[np.int64], NDArray[np.int64]]]] = []
    done = 0
    for window, samples in pieces:
        part = slice(done, done + len(samples))
        gather_rows(window.labels, samples, labels[part])
        if weights is not None and window.weights is not None:
            weights[part] = window.weights[samples]
        gather_rows(window.dense, samples, dense[part])
        gather_columns(window.ids, samples, ids[:, part])
        bags.append([_take_bags(column.ids, column.offsets, samples) for column in window.bags])
        done = part.stop
        del window  # which may be the last reference to it
    if num_one_hot == len(prepared.tables):
        sparse = SparseBatch.from_dense(prepared.features, torch.from_numpy(ids))
    else:
        sparse = _jagged(ids, bags, num_samples, prepared)
    targets = torch.from_numpy(labels[:, 0] if labels.shape[1] == 1 else labels)
    return Batch(torch.from_numpy(dense), sparse, targets, None if weights is None else torch.from_numpy(weights))


def _take_bags(
    ids: NDArray[np.int32], offsets: NDArray[np.int64], samples: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids of some bags back to back, and the bags' lengths."""
    lengths = offsets[samples + 1] - offsets[samples]
    ends = lengths.cumsum()
    out = np.empty(int(ends[-1]) if len(ends) else 0, np.int64)
    gather_bags(ids, offsets, samples, ends - lengths, out)
    return out, lengths


def _jagged(
    ids: NDArray[np.int64],
    bags: list[list[tuple[NDArray[np.int64], NDArray[np.int64]]]],
    num_samples: int,
    prepared: Prepared,
) -> SparseBatch:
    """A batch in which some features have bags of any size; `bags` is by piece, then by feature."""
    one_hot, multi_hot = iter(ids), iter(list(zip(*bags, strict=True)))
    ones = np.ones(num_samples, np.int64)
    all_ids, all_lengths = [], []
    for table in prepared.tables:
        if table.multi_hot:
            for part_ids, lengths in next(multi_hot, ()):
                all_ids.append(part_ids)
                all_lengths.append(lengths)
        else:
            all_ids.append(next(one_hot))
            all_lengths.append(ones)
    offsets = np.concatenate([np.zeros(1, np.int64), *all_lengths]).cumsum()
    return SparseBatch(
        features=prepared.features,
        ids=torch.from_numpy(np.concatenate([np.empty(0, np.int64), *all_ids])),
        batch_size=num_samples,
        jagged_offsets=torch.from_numpy(offsets),
    )


class EpochOrder:
    """The order of one epoch, a function of its arguments alone.

    The split is a sequence of blocks (record batches). A shuffled epoch permutes the blocks, takes `window_blocks` of
    them at a time and permutes the samples of each such window. Reading stays sequential within a block, and memory is
    one window, however large the data set (the order of the blocks takes 8 bytes for every block).

    Args:
        num_samples: that are visited.
        block_samples: of every block of the split but the last.
        window_blocks: how many blocks are shuffled together.
        shuffle: whether to shuffle at all.
        seed, epoch: choose the permutation.
        first_sample: of the split that is visited, where not all are.
    """

    def __init__(
        self,
        num_samples: int,
        block_samples: int,
        window_blocks: int,
        *,
        shuffle: bool,
        seed: int,
        epoch: int,
        first_sample: int = 0,
    ) -> None:
        end = first_sample + num_samples
        first_block = first_sample // block_samples
        num_blocks = -(-end // block_samples) - first_block
        self.shuffle, self.seed, self.epoch = shuffle, seed, epoch
        self._blocks = np.arange(num_blocks)
        if shuffle:
            self._blocks = np.random.default_rng([seed, epoch]).permutation(num_blocks)
        self._blocks = self._blocks + first_block
        starts = self._blocks * block_samples
        sizes = np.minimum(starts + block_samples, end) - np.maximum(starts, first_sample)
        self._window_blocks = window_blocks
        ends = sizes.cumsum()[window_blocks - 1 :: window_blocks]
        self.bounds = np.unique(np.concatenate([[0], ends, [num_samples]]))
        """Window i holds the positions `bounds[i]` to `bounds[i + 1]` of the epoch."""

    def window_of(self, position: int) -> int:
        """The window that holds a position of the epoch."""
        return int(np.searchsorted(self.bounds, position, side="right")) - 1

    def blocks(self, window: int) -> NDArray[np.int64]:
        """The blocks of a window, in order."""
        return self._blocks[window * self._window_blocks : (window + 1) * self._window_blocks]

    def permutation(self, window: int) -> NDArray[np.int32]:
        """Which sample of the window, its blocks one after the other, each of its positions visits."""
        samples = np.arange(self.bounds[window + 1] - self.bounds[window], dtype=np.int32)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch, window, 1]).shuffle(samples)
        return samples
