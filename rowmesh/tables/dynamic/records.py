"""Records: what a dynamic table knows on this rank, as arrays to be saved.

A logical shard is the same whatever the number of ranks; so is what is saved of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.dynamic_index.cpu import ID, SEEN
from rowmesh.tables import TableSpec
from rowmesh.tables.dense import DenseArena
from rowmesh.tables.dynamic.layout import rules_of
from rowmesh.tables.dynamic.shards import DynamicShards
from rowmesh.tables.dynamic.stored_changes import StoredChanges

OF_IDS = ("ids", "counts", "last_steps", "scores")
OF_CANDIDATES = ("candidate_ids", "candidate_counts")
TIMES, NOW = "last_times", "now"
"""The times of last steps, and by shard that of the latest event so far, where ids live for some seconds."""
SIZES, SKETCH, REMOVED = "shards", "sketch", "removed"
"""int64 `[S, 4]`: how many ids and candidates each shard has, its step and its window; the sketches of shards, where
there are such. In an increment `SIZES` is `[S, 6]`, with how many ids are gone, and how many the shard knows in all;
and `REMOVED` has the ids that are gone."""


class KnownBefore(NamedTuple):
    """Which ids a table knew at an earlier boundary between two steps.

    Attributes:
        frames: in which they were, ascending.
        ids: the id in each.
        step: how many batches were opened for training by then.
        stored: what changes among demoted ids since then; None where there never are any.
    """

    frames: np.ndarray
    ids: np.ndarray
    step: int
    stored: StoredChanges | None = None

    def close(self) -> None:
        """Stops noting changes; may be called again."""
        if self.stored is not None:
            self.stored.close()


class KnownCopy:
    """Copies of what the shards of this rank know at one boundary between two steps, without rows.

    Making one copies 24 or 32 bytes an id; they are put in order when they are first read, perhaps by another thread.

    Args:
        shards: of this rank.
        frames: of the ids that are wanted.
        removed: ids that are gone, in any order; None: all ids are wanted.
    """

    def __init__(self, shards: DynamicShards, frames: np.ndarray, removed: np.ndarray | None = None) -> None:
        self.frames, self._shards, self._removed = frames, shards, removed
        self._records = shards.records_of(frames)
        self._counted = [shards.counted_in(shard) for shard in shards.shards]
        self._clock, self._num_known = shards.clock, shards.num_known
        clock = shards.expiry.clock
        self._now, self._times = clock.now, clock.times_of(self._records[:, SEEN] - 1)

    @cached_property
    def _order(self) -> tuple[np.ndarray, np.ndarray]:
        """That by shard and id, and how many ids each shard has."""
        return self._ordered(self._records[:, ID])

    def _ordered(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        of_shards = self._shards.shards_of(ids)
        return np.lexsort((ids, of_shards)), np.bincount(of_shards, minlength=len(self._counted))

    @property
    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """All, kind by kind, shard by shard."""
        order, sizes = self._order
        columns = [sizes, [len(ids) for _, ids, _ in self._counted]]
        columns += [np.full(len(sizes), number) for number in self._clock]
        if self._removed is not None:
            of_removed, num_removed = self._ordered(self._removed)
            columns += [num_removed, self._num_known]
            yield REMOVED, self._removed[of_removed]
        yield SIZES, np.stack([np.asarray(column, np.int64) for column in columns], axis=1)
        found = self._shards.columns(self._records[order])
        for kind in OF_IDS:
            yield kind, found[kind]
        for place, kind in enumerate(OF_CANDIDATES, start=1):
            yield kind, np.concatenate([each[place] for each in self._counted])
        if self._shards.rules.ttl_seconds:
            yield TIMES, self._times[order]
            yield NOW, np.full(len(sizes), self._now)
        if self._shards.rules.sketch_width:
            yield SKETCH, np.stack([sketch for sketch, _, _ in self._counted])

    @property
    def placed(self) -> tuple[np.ndarray, np.ndarray]:
        """The ids as in `arrays`, and their frames."""
        order, _ = self._order
        return self._records[order, ID], self.frames[order]


class ShardRows:
    """The rows and states of some ids: copies, made when they are asked for.

    Attributes:
        rows: int64 `[n]`, the ids.
        slots: int64 `[n]`, where their rows are in the arena.
    """

    def __init__(self, arena: DenseArena, ids: np.ndarray, slots: np.ndarray) -> None:
        self.rows, self.slots, self._arena = ids, slots, arena
        self._slots = torch.from_numpy(slots).to(arena.device)

    @property
    def values(self) -> Tensor:
        """`[n, D]`, in the host's memory."""
        return self._arena.rows[self._slots].cpu()

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Optimizer state by name."""
        return {name: tensor[self._slots].cpu() for name, tensor in self._arena.state.items()}

    def replace(self, values: Tensor) -> None:
        """Sets the values, `[n, D]`, and leaves the states."""
        self._arena.rows[self._slots] = values.to(self._arena.device)

    def forget(self) -> None:
        """No-op: nothing is kept."""


def facts_of(table: TableSpec) -> dict[str, int | str]:
    """The rules on which what a table knows depends, in plain values; two tables with other ones know other ids."""
    rules = rules_of(table)
    names = ("capacity", "admit_after", "sketch_width", "sketch_depth", "window_steps", "eviction", "decay_steps")
    facts = {"shards": rules.num_shards, **{name: getattr(rules, name) for name in (*names, "ttl_steps")}}
    if rules.ttl_seconds:
        facts["ttl_seconds"] = rules.ttl_seconds
    if rules.mode == "demote":
        facts |= {"mode": rules.mode, "store_capacity": rules.store_capacity or 0}
    return facts
