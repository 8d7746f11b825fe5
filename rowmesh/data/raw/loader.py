"""RawLoader: the batches of one rank, from raw rows in the order of their source, read once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from rowmesh.data.codes import map_ids
from rowmesh.data.epochs import check_parts
from rowmesh.data.loader import Batch
from rowmesh.data.prefetch import prefetch as run_ahead
from rowmesh.data.quarantine import BadRows
from rowmesh.data.raw.encoder import sparse_of
from rowmesh.data.raw.ids import ids_of
from rowmesh.data.raw.source import Chunk, Position, Source
from rowmesh.data.reader import Block, check_rows
from rowmesh.data.schema import Schema
from rowmesh.errors import ConfigurationError
from rowmesh.sparse import SparseBatch

LOOK_S = 0.2
"""How often a source that has no rows yet is looked at again."""
Readiness = Literal["ready", "waiting", "over"]
"""Whether there is a batch, or none yet, or none any more."""
_KEPT_POSITIONS = 256  # of the last batches: more than a pipeline reads ahead


class Made(NamedTuple):
    """A batch, the place in the source after it, and how many rows of the source it was made of."""

    batch: Batch
    position: Position
    rows: int


class RawLoader:
    """Iterates over the rows of a source, once, in its order; follows a source that has no end.

    A global batch is `batch_size` consecutive rows of the source, fewer at its end, and cut into contiguous parts, one
    a rank, whose sizes differ by one at most. Rows that cannot be used are part of this count and missing in the batch,
    so that every rank parses its own part alone, and any number of ranks trains on the same global batches. A batch of
    a followed source is made when all its rows are there.

    Dense values that are missing are 0. Ids are those of `ids_of`.

    Where rows are followed, ranks see new ones at different moments; `agree` lets them go on, and end, together.

    Args:
        source: of the rows.
        schema: how to read them.
        batch_size: global, over all ranks.
        rank: which part of each batch to yield.
        world_size: into how many parts each batch is cut.
        seed: of the hash of text.
        multi_hot: by categorical feature: whether rows have lists of ids; default: as the source has them.
        quarantine: where rows go that cannot be used.
        prefetch: how many batches a thread makes ahead; 0 for none.
        agree: of several ranks that follow a source: called with whether this rank has a batch now, by the thread that
            iterates; says what all of them do. It sleeps, where that is to wait.

    Raises:
        ConfigurationError: sizes that cannot work, or dense columns that are to be standardized, whose means are
            not known before the data are read.
    """

    def __init__(
        self,
        source: Source,
        schema: Schema,
        *,
        batch_size: int,
        quarantine: BadRows,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        multi_hot: Sequence[bool] | None = None,
        prefetch: int = 2,
        agree: Callable[[Readiness], Readiness] | None = None,
    ) -> None:
        check_parts(batch_size, rank, world_size)
        if schema.dense and schema.dense_transform == "standardize":
            raise ConfigurationError(
                'dense_transform = "standardize" needs the means of all rows, which raw data are not read for; give '
                'dense_transform = "log1p" or "none" in the schema, or prepare the data'
            )
        self.schema, self.batch_size, self.rank, self.world_size = schema, batch_size, rank, world_size
        self.seed, self.prefetch, self.waited_s = seed, prefetch, 0.0
        if multi_hot is not None and len(multi_hot) != len(schema.categorical):
            raise ConfigurationError(
                f"multi_hot must say of each of the {len(schema.categorical)} categorical features whether it has "
                f"lists, got {len(multi_hot)} values"
            )
        self._multi_hot = multi_hot
        self._source, self.quarantine, self._agree = source, quarantine, agree or _alone
        self._position: Position | None = None
        self.batches = 0
        """How many were yielded, in all runs that this one goes on from."""
        self._positions: deque[tuple[int, Position | None]] = deque([(0, None)], _KEPT_POSITIONS)

    def __iter__(self) -> Iterator[Batch]:
        made = run_ahead(self._make(self._position), self.prefetch)
        try:
            while True:
                item = self._await(made)
                if item is None:
                    return
                self._position, self.batches = item.position, self.batches + 1
                self._positions.append((self.batches, item.position))
                yield item.batch
        finally:
            made.close()

    @property
    def multi_hot(self) -> tuple[bool, ...]:
        """By categorical feature, whether rows have lists of ids; of Parquet files known with the first batch."""
        return self._source.multi_hot if self._multi_hot is None else tuple(self._multi_hot)

    @property
    def num_batches(self) -> None:
        """Unknown: rows are read once, until there are no more."""

    def state_dict(self) -> dict[str, Any]:
        """The place after the last batch that was yielded, and what it means; equal on all ranks."""
        return self.state_after(self.batches)

    def state_after(self, batches: int) -> dict[str, Any]:
        """As `state_dict`, after so many batches in all: of the steps, where batches are read ahead of them."""
        position = dict(self._positions)[batches]
        return {
            "batches": batches,
            "position": None if position is None else dict(position),
            "batch_size": self.batch_size,
            "seed": self.seed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a place, also one saved under another world size.

        Raises:
            ConfigurationError: the place was saved with other batches or another hash.
        """
        for name in ("batch_size", "seed"):
            if state[name] != getattr(self, name):
                raise ConfigurationError(
                    f"the loader's position was saved with {name} = {state[name]}, this run has {getattr(self, name)}: "
                    "batches or ids would be others. Use the same value, or start without the position"
                )
        self._position, self.batches = state["position"], int(state["batches"])
        self._positions = deque([(self.batches, self._position)], _KEPT_POSITIONS)

    def _await(self, made: Iterator[Made | None]) -> Made | None:
        """The next batch, once its rows are there; None at the end."""
        start = time.perf_counter()
        try:
            item, mine = _look(made)
            while (all_do := self._agree(mine)) == "waiting":  # here: a thread that waited could not be ended
                if mine == "waiting":
                    item, mine = _look(made)
            return item if all_do == "ready" else None
        finally:
            self.waited_s += time.perf_counter() - start

    def _make(self, position: Position | None) -> Iterator[Made | None]:
        """Every global batch's part of this rank; None while a source has no rows yet."""
        held: deque[tuple[Chunk, int]] = deque()  # chunks, and how many of their rows are used up
        rows = 0  # that they have left
        for chunk in self._source.chunks(position):
            if chunk is None:
                yield None
                continue
            held.append((chunk, 0))
            rows += len(chunk)
            while rows >= self.batch_size:
                rows -= self.batch_size
                yield self._cut(held, self.batch_size)
        if rows:
            yield self._cut(held, rows)

    def _cut(self, held: deque[tuple[Chunk, int]], size: int) -> Made:
        """Takes a batch off the chunks, of which those that are used up go."""
        low, high = size * self.rank // self.world_size, size * (self.rank + 1) // self.world_size
        blocks: list[Block] = []
        done, position = 0, None
        while done < size:
            chunk, first = held[0]
            count = min(len(chunk) - first, size - done)
            own = max(low - done, 0), min(high - done, count)
            if own[0] < own[1]:
                for table in chunk.tables(first + own[0], first + own[1], self.quarantine):
                    blocks.append(check_rows(table, Path(chunk.name), self.schema, self.quarantine))
            position = chunk.position(first + count)
            done += count
            if first + count == len(chunk):
                held.popleft()
            else:
                held[0] = chunk, first + count
        assert position is not None
        return Made(self._batch(blocks), position, size)

    def _batch(self, blocks: Sequence[Block]) -> Batch:
        schema, count = self.schema, sum(len(block.lines) for block in blocks)
        labels = _joined([block.labels for block in blocks], (len(schema.labels), 0), axis=1)
        dense = np.nan_to_num(_joined([block.dense for block in blocks], (0, len(schema.dense)), axis=0))
        weights = None
        if schema.weight is not None:
            weights = torch.from_numpy(_joined([b.weights for b in blocks if b.weights is not None], (0,), axis=0))
        targets = torch.from_numpy(np.ascontiguousarray(labels[0] if len(labels) == 1 else labels.T))
        sparse = self._sparse(blocks, count)
        if schema.time is not None:
            latest = [int(block.times.max()) for block in blocks if block.times is not None and len(block.times)]
            sparse = replace(sparse, time=max(latest, default=None))
        if schema.score is not None:
            scores = np.concatenate([np.empty(0, np.int64), *(b.scores for b in blocks if b.scores is not None)])
            sparse = replace(sparse, scores=torch.from_numpy(_of_ids(scores, sparse)))
        return Batch(torch.from_numpy(dense), sparse, targets, weights)

    def _sparse(self, blocks: Sequence[Block], count: int) -> SparseBatch:
        columns, multi_hot = [], self.multi_hot
        for number, is_list in enumerate(multi_hot):
            of_blocks = [block.categorical[number] for block in blocks]
            if is_list:
                of_blocks = [
                    pa.nulls(len(c), pa.list_(pa.null())) if pa.types.is_null(c.type) else c for c in of_blocks
                ]
            columns.append([map_ids(column, lambda values: ids_of(values, self.seed)) for column in of_blocks])
        return sparse_of(self.schema.features, columns, count, is_jagged=any(multi_hot))


def _look(made: Iterator[Made | None]) -> tuple[Made | None, Readiness]:
    try:
        item = next(made)
    except StopIteration:
        return None, "over"
    return item, "waiting" if item is None else "ready"


def _alone(mine: Readiness) -> Readiness:
    if mine == "waiting":
        time.sleep(LOOK_S)
    return mine


def _joined(parts: Sequence[NDArray[np.float32]], empty: tuple[int, ...], axis: int) -> NDArray[np.float32]:
    return np.concatenate([np.empty(empty, np.float32), *parts], axis=axis)


def _of_ids(of_rows: NDArray[np.int64], batch: SparseBatch) -> NDArray[np.int64]:
    """A number of each id, given one of each row: ids stand feature by feature, and by row."""
    return np.tile(of_rows, batch.num_features).repeat(np.diff(batch.offsets.numpy()))
