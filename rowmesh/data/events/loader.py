"""SequenceLoader: the batches of one rank, in a reproducible order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rowmesh.data.epochs import EpochLoader
from rowmesh.data.events.balance import balance
from rowmesh.data.events.batch import SequenceBatch, spans
from rowmesh.data.events.sequences import Sequences, SplitName
from rowmesh.errors import ConfigurationError, DataError


class SequenceLoader(EpochLoader[SequenceBatch]):
    """Iterates over the users of one split.

    A global batch is `batch_size` users; which, depends on the seed and the epoch alone. Its users are shared out over
    ranks so that all have about as many ids (`balance`), which changes with the world size: what does not is the batch.
    The last batch may be smaller and leave ranks without users (B = 0).

    Iterating yields what is left of the epoch; the next iteration is the next epoch. Leaving a loop early keeps the
    position.

    Args:
        sequences: what `prepare_events` wrote.
        split: "train" predicts the item after every training event but the last; "validation" and "test" the first
            held-out item, from all events before it.
        batch_size: users, over all ranks.
        max_length: events of a user; older ones are cut off (see `num_cut_events`).
        rank: which part of each batch to yield.
        world_size: over how many ranks each batch is shared out.
        shuffle: whether epochs permute the users.
        seed: of the permutations.
        prefetch: how many batches a thread makes ahead; 0 for none.

    Raises:
        ConfigurationError: sizes that cannot work.
        DataError: the split predicts nothing.
    """

    def __init__(
        self,
        sequences: Sequences,
        split: SplitName,
        *,
        batch_size: int,
        max_length: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        prefetch: int = 2,
    ) -> None:
        super().__init__(batch_size, rank, world_size, prefetch)
        if max_length < 1:
            raise ConfigurationError(f"max_length must be 1 or more, got {max_length}")
        self.sequences, self.split, self.max_length = sequences, split, max_length
        self.shuffle, self.seed = shuffle, seed
        self._users = sequences.users(split)
        if not len(self._users):
            raise DataError(
                f"{sequences.folder}: split {split!r} predicts nothing (split by {sequences.schema.split.by!r}); "
                "prepare the data with another split"
            )
        self.ends = (sequences.train_ends - 1 if split == "train" else sequences.targets(split))[self._users]
        """Where the events that are read of each user end; the first that is predicted follows."""
        whole = sequences.offsets[self._users]
        self.starts = np.maximum(whole, self.ends - max_length)
        """Where they begin."""
        self.num_cut_events = int((self.starts - whole).sum())
        """Events of an epoch that are not read, because their users have more than `max_length`."""

    @property
    def num_users(self) -> int:
        """Users of an epoch, over all ranks."""
        return len(self._users)

    @property
    def num_batches(self) -> int:
        """Batches an epoch, the same on every rank."""
        return -(-self.num_users // self.batch_size)

    def _identity(self) -> dict[str, Any]:
        return {
            "split": self.split,
            "num_users": self.num_users,
            "batch_size": self.batch_size,
            "max_length": self.max_length,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def _make(self, epoch: int, first_batch: int) -> Iterator[SequenceBatch]:
        order = np.arange(self.num_users)
        if self.shuffle:
            np.random.default_rng([self.seed, epoch]).shuffle(order)
        for start in range(first_batch * self.batch_size, self.num_users, self.batch_size):
            chosen = order[start : start + self.batch_size]
            lengths = self.ends[chosen] - self.starts[chosen]
            yield self._gather(chosen[balance(lengths, self.world_size)[self.rank]])

    def _gather(self, chosen: NDArray[np.int64]) -> SequenceBatch:
        data = self.sequences
        events, offsets = spans(self.starts[chosen], self.ends[chosen])
        targets = data.item_ids(data.items[events + 1])
        if self.split != "train":
            is_last = np.zeros(len(events), np.bool_)
            is_last[offsets[1:] - 1] = True
            targets[~is_last] = -1
        return SequenceBatch(
            users=torch.from_numpy(self._users[chosen]),
            offsets=torch.from_numpy(offsets),
            items=torch.from_numpy(data.item_ids(data.items[events])),
            times=torch.from_numpy(data.times[events]),
            request_times=torch.from_numpy(data.times[events + 1]),
            targets=torch.from_numpy(targets),
            side={name: torch.from_numpy(rows[events].astype(np.int64)) for name, rows in data.side.items()},
        )
