"""The profile of events: how often the steps of a training read each row.

A sample is a user, of whom a step reads the latest `max_length` training events. Rows of the items are read as
candidates, too: the full softmax scores all of them, each on one rank; sampled losses score what followed each event,
and negatives, which are drawn for each position, or for all positions of a step.

A row is in a batch where one of its users reads it, however often. Users are drawn independently of each other, and so
are negatives of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rowmesh.data.events import SequenceLoader, Sequences
from rowmesh.data.events.batch import SequenceBatch
from rowmesh.ops.simd import kernel
from rowmesh.placement.batches import BatchCounter
from rowmesh.placement.plan import TableShape
from rowmesh.placement.profile import Floats, Ints, Profile, TableProfile
from rowmesh.placement.request import Request
from rowmesh.run.config import Config, chosen
from rowmesh.run.sequence.batches import Draws
from rowmesh.run.sequence.data import ITEM, SequenceData
from rowmesh.run.sequence.options import SequenceOptions


def profile_events(
    config: Config,
    data: SequenceData,
    shapes: Sequence[TableShape],
    request: Request,
    world_size: int,
    *,
    count_batches: bool = False,
) -> Profile:
    """The profile of the training split's events and, in training, of the items that are scored.

    Neighbouring rows that occur equally often in all splits are one run, with their means.

    Args:
        config: of the run.
        data: its events.
        shapes: of tables that are named after those of the data.
        request: samples of a rank, and whether it trains.
        world_size: ranks that share a step out.
        count_batches: go through the batches of all ranks in the first epoch, and count how many hold each row. A
            smaller last batch is left out. Otherwise batches are those that users are expected to make, of whom an
            epoch draws each once.

    Raises:
        ConfigurationError: a table has another number of rows than the data.
    """
    reads = _Reads.of(config, data, world_size, trains=request.training)
    tables = [reads.profile(shape) for shape in shapes]
    if count_batches:
        pairs = reads.count_batches(tables)
        tables = [replace(table, batches=pairs[table.name]) for table in tables]
    num_users = reads.loader.num_users
    scale = max(num_users / request.batch_size, 1.0)
    tables = [replace(table, batches=table.batches * scale) for table in tables if table.batches is not None]
    return Profile(tuple(tables), num_users, request.batch_size)


@dataclass(frozen=True, eq=False)
class _Reads:
    """What the steps of one epoch read. Its profiles have the share of batches in place of their number."""

    config: Config
    sequences: Sequences
    loader: SequenceLoader
    draws: Draws
    world_size: int
    trains: bool

    @staticmethod
    def of(config: Config, data: SequenceData, world_size: int, *, trains: bool) -> _Reads:
        sequences = replace(data.sequences, raw=None)  # tables have the numbers of items
        options, seed = config.model.sequence, config.train.seed
        loader = SequenceLoader(
            sequences,
            "train",
            batch_size=chosen(config.data.batch_size),
            max_length=options.max_length,
            shuffle=config.data.shuffle,
            seed=seed,
            prefetch=0,
        )
        draws = Draws(options, sequences.popularity("validation"), seed)
        return _Reads(config, sequences, loader, draws, world_size, trains)

    @property
    def options(self) -> SequenceOptions:
        return self.config.model.sequence

    @property
    def users_of_rank(self) -> float:
        """In a step."""
        return min(self.loader.batch_size, self.loader.num_users) / self.world_size

    def profile(self, shape: TableShape) -> TableProfile:
        """Of a table."""
        is_item, loader = shape.name == ITEM, self.loader
        rows = self.sequences.items if is_item else self.sequences.side[shape.name]
        runs = TableProfile.of_counts(shape, np.bincount(rows, minlength=shape.num_rows))
        accesses, readers, latest = (np.zeros(shape.num_rows) for _ in range(3))
        is_scored = is_item and self.trains
        _count(rows, loader.starts, loader.ends, is_scored and self.options.samples, accesses, readers, latest)
        batches = _share_of_batches(readers, loader.num_users, self.users_of_rank)
        if is_scored and self.options.samples and not self.options.shares:
            accesses, batches = self._with_own_negatives(accesses, batches)
        table = replace(runs, accesses=_means(accesses, runs), batches=_means(batches, runs))
        return self._with_shared_candidates(table) if is_scored else table

    def _with_own_negatives(self, accesses: Floats, batches: Floats) -> tuple[Floats, Floats]:
        """With negatives of each position."""
        lengths, users = np.unique(self.loader.ends - self.loader.starts, return_counts=True)
        chances, of_row = np.unique(self.draws.chances, return_inverse=True)
        draws = self.options.num_negatives
        with np.errstate(divide="ignore"):
            logs = np.log1p(-chances)
        missed = np.zeros(len(chances))  # the chance that a user draws none of them
        for length, count in zip(lengths.tolist(), users.tolist(), strict=True):
            missed += np.exp(draws * length * logs) * (count / self.loader.num_users)
        drawn = 1.0 - missed[of_row] ** self.users_of_rank
        return accesses + draws * int(lengths @ users) * chances[of_row], batches + (1.0 - batches) * drawn

    def _with_shared_candidates(self, table: TableProfile) -> TableProfile:
        """With what a step reads once: negatives of all positions on every rank, or all items on one rank each."""
        num_parts = 1 if (parts := self.config.pipeline.micro_batches) == "auto" else parts
        num_steps = num_parts * self.loader.num_users / self.loader.batch_size
        if not self.options.samples:
            return replace(table, accesses=table.accesses + num_steps, is_split=True)
        if not self.options.shares:
            return table
        chances, draws = _means(self.draws.chances, table), self.options.num_negatives
        accesses = table.accesses + num_steps * self.world_size * draws * chances
        with np.errstate(divide="ignore"):
            return replace(table, accesses=accesses, drawn=-np.expm1(draws * np.log1p(-chances)))

    def count_batches(self, tables: Sequence[TableProfile]) -> dict[str, Floats]:
        """By table, the share of the batches of all ranks that hold a row of each run, by its samples alone."""
        counters = {table.name: BatchCounter(table.name, table.starts) for table in tables}
        num_steps = max(self.loader.num_users // self.loader.batch_size, 1)
        for step, batch in zip(range(num_steps), self.loader, strict=False):
            for part in batch.split(self.world_size):
                for name, counter in counters.items():
                    counter.add(self._items(part, step) if name == ITEM else part.side[name].numpy())
        num_batches = num_steps * self.world_size
        return {table.name: counters[table.name].pairs / (table.lengths * num_batches) for table in tables}

    def _items(self, part: SequenceBatch, step: int) -> Ints:
        """The items that a rank's samples read."""
        read = [part.items]
        if self.trains and self.options.samples:
            read.append(part.targets)
            if not self.options.shares:
                read.append(self.draws.ids(part, step, 0).flatten())
        return torch.cat(read).numpy()


def _share_of_batches(readers: Floats, num_users: int, size: float) -> Floats:
    """The chance that one of so many readers is among `size` users, drawn without replacement.

    That is hypergeometric, 1 − Π (1 − b / (N − j)) over readers j, or with both changed about; all factors count as
    the one in the middle.

    >>> _share_of_batches(np.array([0.0, 1.0, 2.0, 10.0]), 10, 5).round(3).tolist()  # exactly 0, 1/2, 7/9, 1
    [0.0, 0.5, 0.776, 1.0]
    """
    fewer, more = np.minimum(readers, size), np.maximum(readers, size)
    share = np.minimum(more / (num_users - (fewer - 1) / 2), 1.0)
    with np.errstate(divide="ignore"):
        return -np.expm1(fewer * np.log1p(-share))


def _means(values: Floats, runs: TableProfile) -> Floats:
    return np.add.reduceat(values, runs.starts[:-1]) / runs.lengths


@kernel
def _count(rows, starts, ends, reads_targets, accesses, users, latest):  # pragma: no cover - compiled
    """Counts the reads of each row, and the users who read it; all three are 0 before."""
    for user in range(len(starts)):
        for event in range(starts[user], ends[user] + (1 if reads_targets else 0)):
            row = rows[event]
            if event < ends[user]:
                accesses[row] += 1
            if reads_targets and event > starts[user]:
                accesses[row] += 1
            if latest[row] != user + 1:
                latest[row] = user + 1
                users[row] += 1
