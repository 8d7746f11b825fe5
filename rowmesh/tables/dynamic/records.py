"""Records: what a dynamic table knows on this rank, as arrays to be saved, and from such arrays again.

A logical shard is the same whatever the number of ranks; so is what is saved of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.dynamic_index.cpu import ID, SEEN
from rowmesh.tables import TableSpec
from rowmesh.tables.dense import DenseArena
from rowmesh.tables.dynamic import demoted_records
from rowmesh.tables.dynamic.demoted import Demoted
from rowmesh.tables.dynamic.demoted_records import DemotedRecords, DemotedRows
from rowmesh.tables.dynamic.layout import rules_of
from rowmesh.tables.dynamic.owned import OwnedTable
from rowmesh.tables.dynamic.saved_shards import SavedShards
from rowmesh.tables.dynamic.shards import DynamicShards
from rowmesh.tables.dynamic.state import NONE, ShardState
from rowmesh.tables.dynamic.stored_changes import StoredChanges, Touched

OF_IDS = ("ids", "counts", "last_steps", "scores")
OF_CANDIDATES = ("candidate_ids", "candidate_counts")
TIMES, NOW = "last_times", "now"
"""The times of last steps, and by shard that of the latest event so far, where ids live for some seconds."""
SIZES, SKETCH, REMOVED = "shards", "sketch", "removed"
"""int64 `[S, 4]`: how many ids and candidates each shard has, its step and its window; the sketches of shards, where
there are such. In an increment `SIZES` is `[S, 6]`, with how many ids are gone, and how many the shard knows in all;
and `REMOVED` has the ids that are gone."""
CHUNK_ROWS = 1 << 14
"""Rows that are copied at a time."""


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
        """What changes from now on is not noted; may be called again."""
        if self.stored is not None:
            self.stored.close()


class KnownCopy:
    """What the shards of this rank know at one boundary between two steps, without rows: copies.

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

    def forget(self) -> None:
        """No-op: nothing is kept."""


class Records:
    """Of one table on one rank that has some of its shards.

    Args:
        table: as `framed` gives it.
        owned: what this rank has of it.
        arena: where the rows are.
        step: how many batches were opened for training.
        is_first: whether this is the replica that is saved.

    Attributes:
        shards: which ones.
        arena: where the rows are.
        seed: of the rows from which ids start.
    """

    def __init__(
        self, table: TableSpec, owned: OwnedTable, arena: DenseArena, *, step: int = 0, is_first: bool = True
    ) -> None:
        self._table, self._owned, self.arena, self.shards = table, owned, arena, owned.shards.shards
        self.step, self.is_first, self.seed = step, is_first, owned.seed

    def slots(self, frames: np.ndarray) -> np.ndarray:
        """Where in the arena frames are."""
        return self._owned.slots(frames)

    # Between two steps: what is known now, and what of it changed

    def note(self) -> KnownBefore:
        """What is known now, to be compared with later; it is to be closed.

        Raises:
            StoreError: the store of demoted ids does not answer; names it.
        """
        demoted, shards = self._owned.flush(), self._owned.shards
        frames = shards.known_frames
        return KnownBefore(
            frames, shards.column_of(frames, ID), self.step, None if demoted is None else demoted.watch()
        )

    def known(self) -> KnownCopy:
        """All that is known now."""
        return KnownCopy(self._owned.shards, self._owned.shards.known_frames)

    def changed(self, before: KnownBefore, marks: np.ndarray) -> KnownCopy:
        """What of it changed, and which ids are gone.

        A batch changes no more than the ids that it has, and those that it evicts. Rows may be updated later than their
        ids were seen, which marks tell.

        Args:
            before: since when.
            marks: uint8 by slot of the arena: 0 where a row was not updated since.
        """
        shards = self._owned.shards
        frames = shards.known_frames
        is_changed = (shards.column_of(frames, SEEN) - 1 > before.step) | (marks[self.slots(frames)] != 0)
        moved = np.flatnonzero(shards.column_of(before.frames, ID) != before.ids)
        left = before.ids[np.union1d(moved, np.flatnonzero(~np.isin(before.frames, frames, assume_unique=True)))]
        return KnownCopy(shards, frames[is_changed], left[shards.find(left) < 0])

    # What is saved at once

    @cached_property
    def _known(self) -> KnownCopy:
        return self.known()

    @property
    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """All but rows and their states, kind by kind, shard by shard."""
        yield from self._known.arrays
        if self._demoted is not None:
            yield from self._demoted.arrays

    @property
    def rows(self) -> list[ShardRows]:
        """The rows in the order of the ids."""
        ids, frames = self._known.placed
        slots = self.slots(frames)
        cuts = [slice(first, first + CHUNK_ROWS) for first in range(0, max(len(ids), 1), CHUNK_ROWS)]
        return [ShardRows(self.arena, ids[cut], slots[cut]) for cut in cuts]

    @cached_property
    def _demoted(self) -> DemotedRecords | None:
        return self.demoted()

    def demoted(self, before: KnownBefore | None = None) -> DemotedRecords | None:
        """What is demoted now, or what of it changed, until the next step; None where nothing ever is.

        Args:
            before: since when; None: all.

        Raises:
            StoreError: the store does not answer; names it.
        """
        demoted = self._owned.flush()
        if demoted is None:
            return None
        touched = _touched(demoted, before)
        return DemotedRecords(demoted.stored(touched), None, touched)

    def freeze_demoted(self, before: KnownBefore | None = None) -> DemotedRecords | None:
        """The same, to be written while steps go on, until it is closed."""
        demoted = self._owned.flush()
        if demoted is None:
            return None
        touched = _touched(demoted, before)
        return DemotedRecords(*demoted.freeze(touched), touched)

    @property
    def demoted_rows(self) -> Sequence[DemotedRows]:
        """The records of demoted ids, with their facts; none where ids are not demoted."""
        return [] if self._demoted is None else self._demoted.rows

    def load(self, parts: Sequence[SavedShards], states: Sequence[str]) -> None:
        """Replaces everything by what was saved.

        Args:
            parts: of the table; each shard is in one of them.
            states: of the optimizer, to be read too; others begin as those of new rows.
        """
        found = {shard: part for part in parts for shard in part.shards if shard in self.shards}
        places = {}
        saved = [self._state(shard, found[shard], places) for shard in self.shards]
        for shard, state, slots in zip(self.shards, saved, self._owned.load(saved), strict=True):
            if not len(slots):
                continue
            self._owned.start(slots, state.ids)
            read, at = found[shard].read, places[shard]
            rows = {name: read(name, at) for name in ("values", *states)}
            self.arena.write_rows(slots, rows.pop("values"), rows)
        if (demoted := self._owned.flush()) is not None:
            demoted_records.load(demoted, parts, states)

    def _state(self, shard: int, part: SavedShards, places: dict[int, slice]) -> ShardState:
        read, shards = part.read, part.shards
        sizes = read(SIZES, slice(None)).numpy()
        number = shard - shards.start
        before = sizes[:number, :2].sum(axis=0).tolist()
        num_ids, num_candidates, step, window = sizes[number].tolist()
        of_ids = slice(before[0], before[0] + num_ids)
        of_candidates = slice(before[1], before[1] + num_candidates)
        places[shard] = of_ids
        columns: dict[str, Any] = {kind: read(kind, of_ids).numpy() for kind in OF_IDS}
        columns |= {kind: read(kind, of_candidates).numpy() for kind in OF_CANDIDATES}
        sketch = np.zeros((0, 0), np.int64)
        if rules_of(self._table).sketch_width:
            sketch = read(SKETCH, slice(number, number + 1)).numpy()[0]
        if rules_of(self._table).ttl_seconds:
            columns |= {"last_times": read(TIMES, of_ids).numpy(), "now": int(read(NOW, slice(number, number + 1)))}
        return ShardState(**columns, frames=NONE, sketch=sketch, step=step, window=window)


def _touched(demoted: Demoted, before: KnownBefore | None) -> Touched | None:
    return None if before is None or before.stored is None else demoted.touched(before.stored)


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
