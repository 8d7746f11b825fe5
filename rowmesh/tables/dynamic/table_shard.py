"""DynamicShard: what a rank has of a dynamic table: rows by id, what is known of ids, and what is demoted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from rowmesh.ops.dynamic_index.cpu import ID, SEEN
from rowmesh.tables.dense import DenseArena
from rowmesh.tables.dynamic import demoted_records
from rowmesh.tables.dynamic.demoted import Demoted
from rowmesh.tables.dynamic.demoted_records import PREFIX, DemotedRecords
from rowmesh.tables.dynamic.layout import rules_of
from rowmesh.tables.dynamic.owned import OwnedTable
from rowmesh.tables.dynamic.records import (
    NOW,
    OF_CANDIDATES,
    OF_IDS,
    SIZES,
    SKETCH,
    TIMES,
    KnownBefore,
    KnownCopy,
    ShardRows,
)
from rowmesh.tables.dynamic.saved_shards import SavedShards
from rowmesh.tables.dynamic.state import NONE, ShardState
from rowmesh.tables.dynamic.stored_changes import Touched
from rowmesh.tables.shard import Changed, Form, LogicalShards, PlacedRows, RowPiece, ShardMoment, TableShard, Vectors
from rowmesh.tables.spec import TableSpec

CHUNK_ROWS = 1 << 14
"""Rows that are copied at a time."""


class DynamicShard(TableShard):
    """Some of the logical shards of one table.

    Args:
        spec: the table.
        owned: what this rank has of it; None: nothing.
        arena: where the rows are.
        step: how many batches were opened for training.
        replica: of this rank; the first one tells of the table.
        set_step: is told of how many batches there were before what was loaded.

    Attributes:
        shards: which logical shards.
    """

    form: Form = "ids"

    def __init__(
        self,
        spec: TableSpec,
        owned: OwnedTable | None,
        arena: DenseArena,
        *,
        step: int,
        replica: int,
        set_step: Callable[[int], None],
    ) -> None:
        super().__init__(spec)
        self.shards = range(0) if owned is None else owned.shards.shards
        self._found, self._arena, self._step, self._replica = owned, arena, step, replica
        self._set_step = set_step

    @property
    def _owned(self) -> OwnedTable:
        assert self._found is not None, "nothing of it is here"
        return self._found

    @property
    def logical(self) -> LogicalShards | None:
        """Which shards; None: this rank has nothing of the table."""
        return None if self._found is None else LogicalShards(self.shards, self._step, self._found.seed, self._replica)

    @property
    def store(self) -> DenseArena | None:
        """Has the rows of ids in fast memory."""
        return None if self._found is None else self._arena

    @property
    def num_slots(self) -> int:
        """Slots of the whole arena: ids come and go."""
        return 0 if self._found is None else self._arena.num_slots

    # Known and demoted ids now

    @cached_property
    def _known(self) -> KnownCopy:
        return KnownCopy(self._owned.shards, self._owned.shards.known_frames)

    @cached_property
    def _demoted(self) -> DemotedRecords | None:
        return self._demoted_now(None)

    @property
    def ids(self) -> np.ndarray:
        """int64 `[n]`: those that have rows in fast memory, shard by shard."""
        return NONE if self._found is None else self._known.placed[0]

    @property
    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """All but rows and their states, kind by kind, shard by shard."""
        if self._found is not None:
            yield from self._known.arrays
        if self._demoted is not None:
            yield from self._demoted.arrays

    @property
    def pieces(self) -> Mapping[str, Sequence[RowPiece]]:
        """The rows in the order of the ids, and the records of demoted ids, with their facts."""
        if self._found is None:
            return {}
        found = {"": self.placed_rows}
        return found if self._demoted is None else {**found, PREFIX: self._demoted.rows}

    @property
    def placed_rows(self) -> list[ShardRows]:
        """The rows in the order of the ids, some at a time, without demoted ones; values can be replaced."""
        return [] if self._found is None else [ShardRows(self._arena, ids, slots) for ids, slots in self._placed()]

    def _placed(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows in the order of the ids; one piece at least."""
        ids, frames = self._known.placed
        slots = self._owned.slots(frames)
        for first in range(0, max(len(ids), 1), CHUNK_ROWS):
            yield ids[first : first + CHUNK_ROWS], slots[first : first + CHUNK_ROWS]

    def _places(self, changed: Changed | None) -> Iterator[PlacedRows]:
        """The ids in fast memory, or those of them whose rows changed."""
        if self._found is None:
            return
        for ids, slots in self._placed():
            kept = slice(None) if changed is None else changed.marks[id(self._arena)][slots] != 0
            yield PlacedRows(ids[kept], slots[kept])

    def gone(self, before: np.ndarray, changed: Changed | None) -> np.ndarray:
        """Ids that left the table; see `TableShard`."""
        left = np.setdiff1d(before, self.ids, assume_unique=True)
        if changed is None or (demoted := self._demoted_now(changed)) is None:
            return left
        known = np.union1d(self.ids, demoted.ids)
        return np.setdiff1d(np.union1d(left, demoted.gone), known, assume_unique=True)

    def vectors(self, changed: Changed | None, rank: int, world_size: int) -> Iterator[Vectors]:
        """Rows in fast memory, then demoted ones; see `TableShard`."""
        yield from super().vectors(changed, rank, world_size)
        demoted = self._demoted_now(changed)  # where all are wanted, the store is asked which these are
        for piece in [] if demoted is None else demoted.rows:
            yield piece.rows, piece.values
            piece.forget()

    def _demoted_now(self, changed: Changed | None) -> DemotedRecords | None:
        """The demoted records now, or their changes, until the next step; None where ids are never demoted."""
        demoted = None if self._found is None else self._found.flush()
        if demoted is None:
            return None
        touched = self._touched(demoted, changed)
        return DemotedRecords(demoted.stored(touched), None, touched)

    # Between two steps: what is known, and what of it changed

    def note(self) -> KnownBefore | None:
        """Which ids there are now; see `TableShard`."""
        if self._found is None:
            return None
        demoted, shards = self._found.flush(), self._found.shards
        frames = shards.known_frames
        stored = None if demoted is None else demoted.watch()
        return KnownBefore(frames, shards.column_of(frames, ID), self._step, stored)

    def freeze(self, changed: Changed | None) -> ShardMoment:
        """Freezes what is known, or what of it changed; see `TableShard`."""
        if self._found is None:
            return ShardMoment()
        known = self._known
        if changed is not None:
            known = self.changed(changed.known[self.spec.name], changed.marks[id(self._arena)])
        demoted, frozen = self._found.flush(), None
        if demoted is not None:
            touched = self._touched(demoted, changed)
            frozen = DemotedRecords(*demoted.freeze(touched), touched)
        return _DynamicMoment(known, self._found.slots, frozen)

    def changed(self, before: KnownBefore, marks: np.ndarray) -> KnownCopy:
        """Copies the facts that changed, with the ids that are gone.

        A batch changes no more than the ids that it has, and the ids that it evicts. Rows may be updated later than
        their ids were seen, which marks tell.

        Args:
            before: since when.
            marks: uint8 by slot of the arena: 0 where a row was not updated since.
        """
        shards = self._owned.shards
        frames = shards.known_frames
        is_changed = (shards.column_of(frames, SEEN) - 1 > before.step) | (marks[self._owned.slots(frames)] != 0)
        moved = np.flatnonzero(shards.column_of(before.frames, ID) != before.ids)
        left = before.ids[np.union1d(moved, np.flatnonzero(~np.isin(before.frames, frames, assume_unique=True)))]
        return KnownCopy(shards, frames[is_changed], left[shards.find(left) < 0])

    def _touched(self, demoted: Demoted, changed: Changed | None) -> Touched | None:
        stored = None if changed is None else changed.known[self.spec.name].stored
        return None if stored is None else demoted.touched(stored)

    # Loading

    def replace(self, parts: Sequence[SavedShards], states: Sequence[str], step: int) -> None:
        """Replaces everything by what was saved; see `TableShard`."""
        if self._found is not None:
            self._load(self._found, parts, states)
        self._set_step(step)

    def _load(self, owned: OwnedTable, parts: Sequence[SavedShards], states: Sequence[str]) -> None:
        found = {shard: part for part in parts for shard in part.shards if shard in self.shards}
        places = {}
        saved = [self._state(shard, found[shard], places) for shard in self.shards]
        for shard, state, slots in zip(self.shards, saved, owned.load(saved), strict=True):
            if not len(slots):
                continue
            owned.start(slots, state.ids)
            read, at = found[shard].read, places[shard]
            rows = {name: read(name, at) for name in ("values", *states)}
            self._arena.write_rows(slots, rows.pop("values"), rows)
        if (demoted := owned.flush()) is not None:
            demoted_records.load(demoted, parts, states)

    def _state(self, shard: int, part: SavedShards, places: dict[int, slice]) -> ShardState:
        read, shards, rules = part.read, part.shards, rules_of(self.spec)
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
        if rules.sketch_width:
            sketch = read(SKETCH, slice(number, number + 1)).numpy()[0]
        if rules.ttl_seconds:
            columns |= {"last_times": read(TIMES, of_ids).numpy(), "now": int(read(NOW, slice(number, number + 1)))}
        return ShardState(**columns, frames=NONE, sketch=sketch, step=step, window=window)


class _DynamicMoment(ShardMoment):
    """The shard as it was at a moment, or what of it changed. Ids are put in order when they are first read."""

    def __init__(
        self, known: KnownCopy, slots: Callable[[np.ndarray], np.ndarray], demoted: DemotedRecords | None
    ) -> None:
        super().__init__()
        self._known, self._slots, self._demoted = known, slots, demoted
        self.expected = slots(known.frames).astype(np.uint32)

    @property
    def places(self) -> Sequence[PlacedRows]:
        """The rows in the order of the ids."""
        ids, frames = self._known.placed
        return [PlacedRows(ids, self._slots(frames).astype(np.uint32))]

    @property
    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """All but rows and their states."""
        yield from self._known.arrays
        if self._demoted is not None:
            yield from self._demoted.arrays

    @property
    def apart(self) -> Mapping[str, Sequence[RowPiece]]:
        """The records of demoted ids, read from the store as they were."""
        return {} if self._demoted is None else {PREFIX: self._demoted.rows}

    def close(self) -> None:
        """Steps cost nothing more."""
        if self._demoted is not None:
            self._demoted.close()
