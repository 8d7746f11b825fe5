"""Demoted ids of a dynamic table on one rank: their records are in a store, and come back when the ids are asked for.

A step demotes ids when it is opened. Their rows stay in their frames until all earlier batches have ended, which may
update them; then `flush` writes them to the store, a step at a time. So what is known of an id that is in no index is
found, in this order, in the steps that are not flushed, the last one first: in a frame, or forgotten; then in the
store. An id that comes back before its record was written takes its frame again, as if it had never left. The store
loses what came back when that step is flushed: what fails before can be done again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor

from rowmesh.tables import TableSpec
from rowmesh.tables.dense import DenseArena
from rowmesh.tables.dynamic.changes import Change, find_in
from rowmesh.tables.dynamic.layout import rules_of
from rowmesh.tables.dynamic.record_layout import RecordLayout
from rowmesh.tables.dynamic.shards import DynamicShards
from rowmesh.tables.dynamic.state import Promoted
from rowmesh.tables.dynamic.stored_changes import StoredChanges, Touched, by_shard
from rowmesh.tables.dynamic.stored_records import StoredRecords
from rowmesh.tables.dynamic.stores import FrozenStore, RecordStore, SharedStore


@dataclass(frozen=True)
class Found:
    """Facts and rows of ids that are in no index.

    Attributes:
        is_there: bool `[N]`: whether anything is.
        frames: int64 `[N]`, where the row is; −1: in the record, or nowhere.
        facts: int64 `[N, 3]`: last steps + 1, counts and frequencies; zeros where nothing is known.
        records: uint8 `[N, width]`; of ids in the store.
    """

    is_there: np.ndarray
    frames: np.ndarray
    facts: np.ndarray
    records: np.ndarray

    def at(self, chosen: np.ndarray) -> Found:
        """Selects some of the ids."""
        return Found(self.is_there[chosen], self.frames[chosen], self.facts[chosen], self.records[chosen])


class Demoted:
    """The demoted ids of some shards of a table.

    Args:
        table: which one.
        shards: of this rank.
        arena: where the rows are.
        first_slot: of the frames in it.
        store: for the records, empty; it is owned from here on.
    """

    def __init__(
        self, table: TableSpec, shards: DynamicShards, arena: DenseArena, first_slot: int, store: RecordStore
    ) -> None:
        self._shards, self._arena, self._first_slot = shards, arena, first_slot
        self._store = SharedStore(store)
        self._layout = RecordLayout(table)
        rules = rules_of(table)
        self._rooms = [rules.stored_in(shard) for shard in shards.shards]
        # Where there is a limit, by shard, the ids that are demoted, with ascending numbers: the first came first.
        self._order: list[dict[int, int]] = [{} for _ in self._rooms]
        self._num_ordered = 0
        self._num_stored = np.zeros(len(self._rooms), np.int64)  # where there is no limit
        self._listeners: list[StoredChanges] = []

    @property
    def shards(self) -> range:
        """Whose ids these are."""
        return self._shards.shards

    def clear(self) -> None:
        """Forgets all. No step may wait to be flushed."""
        self._store.clear(self._shards.shards)
        self._order = [{} for _ in self._rooms]
        self._num_stored[:] = 0

    def close(self) -> None:
        """Closes the store."""
        self._store.close()

    def find(self, changes: Sequence[Change], ids: np.ndarray, ahead: Container[int] = ()) -> Found:
        """Finds the facts and rows of ids that the index does not know; changes nothing.

        Args:
            changes: of the steps that are not flushed.
            ids: int64 `[N]`, distinct, which the index does not know.
            ahead: batches whose changes are as if they had not been.

        Raises:
            StoreError: the store does not answer; names it.
        """
        is_there, frames = np.zeros(len(ids), bool), np.full(len(ids), -1)
        facts, left = np.zeros((len(ids), 3), np.int64), np.arange(len(ids))
        for change in reversed(changes):
            if change.number in ahead:
                continue
            is_forgotten = find_in(change.forgotten_ids, ids[left])[1]
            places, found = find_in(change.evicted_ids, ids[left])
            found &= ~is_forgotten
            here, at = left[found], places[found]
            is_there[here], frames[here], facts[here] = True, change.evicted_frames[at], change.evicted_facts[at]
            left = left[~found & ~is_forgotten]
        records = np.empty((len(ids), self._layout.width), np.uint8)
        if len(left):
            wanted = np.empty((len(left), self._layout.width), np.uint8)
            stored = self._store.get(self._shards_of(ids[left]), ids[left], wanted)
            left = left[stored]
            is_there[left], records[left] = True, wanted[stored]
            facts[left] = self._layout.facts(wanted[stored])
        return Found(is_there, frames, facts, records)

    def demote(self, change: Change, promoted_ids: np.ndarray) -> int:
        """Notes who comes back with a change, and that its evicted ids are demoted; returns how many are forgotten."""
        if not any(self._rooms):
            return 0
        for i, shard in zip(promoted_ids.tolist(), self._local(promoted_ids), strict=True):
            change.left_order.append((shard, i, self._order[shard].pop(i)))
        demoted_in = self._add(change.evicted_ids)
        forgotten = []
        for shard in set(demoted_in):
            order, room = self._order[shard], self._rooms[shard] or 0
            surplus = list(islice(order, max(0, len(order) - room)))  # at once: a dictionary passes over what it lost
            change.left_order += [(shard, i, order.pop(i)) for i in surplus]
            forgotten += surplus
        change.forgotten_ids = np.sort(np.array(forgotten, np.int64))
        return len(forgotten)

    def undo(self, change: Change, evicted_ids: np.ndarray) -> None:
        """Takes the last `demote` back, by which these ids were demoted. The store has not heard of it."""
        if not any(self._rooms):
            return
        for shard, i, place in change.left_order:
            self._order[shard][i] = place
        for i, shard in zip(evicted_ids.tolist(), self._local(evicted_ids), strict=True):
            del self._order[shard][i]
        for shard in {shard for shard, _, _ in change.left_order}:
            self._order[shard] = dict(sorted(self._order[shard].items(), key=lambda entry: entry[1]))

    def _add(self, ids: np.ndarray) -> list[int]:
        """Adds ids to the order; returns their shards."""
        shards = self._local(ids)
        for i, shard in zip(ids.tolist(), shards, strict=True):
            self._order[shard][i] = self._num_ordered
            self._num_ordered += 1
        return shards

    def flush(self, change: Change) -> None:
        """Brings the store to where a change has left it; the batch has ended. May be called again where it raises.

        Raises:
            StoreError: the store does not answer; names it.
        """
        gone = np.unique(np.concatenate([change.promoted_ids, change.forgotten_ids]))
        if len(gone):
            self._store.delete(self._shards_of(gone), gone)
        kept = ~np.isin(change.evicted_ids, change.forgotten_ids)
        ids = change.evicted_ids[kept]
        if len(ids):
            rows, state = self._arena.read_rows(change.evicted_frames[kept] + self._first_slot)
            records = self._layout.pack(rows, state, change.evicted_facts[kept])
            self._store.put(self._shards_of(ids), ids, records)
        # An id that an average brought back and demoted again was there; an id forgotten as it is demoted never was.
        were_there = np.isin(gone, change.promoted_ids) | ~np.isin(gone, change.evicted_ids)
        self._note(gone, were_there, ids)

    def _note(self, gone: np.ndarray, were_there: np.ndarray, put: np.ndarray) -> None:
        """Counts and tells what a change did to the store, once all of it is done."""
        self._count(gone[were_there], -1)
        self._count(put, 1)
        for each in self._listeners:
            each.note(gone, is_there=False, was_there=were_there)
            each.note(put, is_there=True, was_there=False)

    def _count(self, ids: np.ndarray, sign: int) -> None:
        if len(ids):
            self._num_stored += sign * np.bincount(self._shards.shards_of(ids), minlength=len(self._num_stored))

    def stored(self, touched: Touched | None = None) -> StoredRecords:
        """The records in the store, between two steps.

        Args:
            touched: whose records are read; None: all.
        """
        return self._stored(self._store, touched)

    def freeze(self, touched: Touched | None = None) -> tuple[StoredRecords, FrozenStore]:
        """The same, for another thread, while steps go on; until the store's part is closed."""
        frozen = self._store.freeze(None if touched is None else np.concatenate(touched.put))
        return self._stored(frozen, touched), frozen

    def _stored(self, store: SharedStore | FrozenStore, touched: Touched | None) -> StoredRecords:
        order = None
        if touched is None and any(self._rooms):
            order = [np.fromiter(ids, np.int64, len(ids)) for ids in self._order]
        return StoredRecords(store, self._shards, self._layout, order)

    def watch(self) -> StoredChanges:
        """Notes what is put into the store, and leaves it, from now on; nothing may wait to be flushed."""
        return StoredChanges(self._listeners)

    def touched(self, since: StoredChanges) -> Touched:
        """The ids that were put into the store, or left it, since a moment; nothing may wait to be flushed."""
        is_ordered, num_shards = any(self._rooms), len(self._rooms)
        put, gone = since.put if is_ordered else np.sort(since.put), np.sort(since.gone)
        num_stored = np.array([len(order) for order in self._order], np.int64) if is_ordered else self._num_stored
        of_each, gone_of_each = (by_shard(ids, self._shards.shards_of(ids), num_shards) for ids in (put, gone))
        return Touched(of_each, gone_of_each, num_stored.copy())

    def write(self, ids: np.ndarray, rows: Tensor, state: Mapping[str, Tensor], facts: np.ndarray) -> None:
        """Adds records of one shard, as if they had been demoted in their order; states that are not given are new.

        Raises:
            StoreError: the store does not answer; names it.
        """
        shards = self._shards_of(ids)
        self._store.put(shards, ids, self._layout.pack(rows, self._layout.completed(state, len(ids)), facts))
        if any(self._rooms):
            self._add(ids)
        self._count(ids, 1)

    def restore(self, found: Found, places: np.ndarray, frames: np.ndarray) -> None:
        """Writes rows and states of found ids to frames.

        Args:
            found: as `find` gave it.
            places: int64 `[n]`, of those ids.
            frames: int64 `[n]`, where to.
        """
        slots = frames + self._first_slot
        stored = found.frames[places] < 0
        if stored.any():
            self._arena.restore(slots[stored], *self._layout.unpack(found.records[places[stored]]))
        if not stored.all():
            others = found.frames[places[~stored]] + self._first_slot
            self._arena.restore(slots[~stored], *self._arena.read_rows(others))

    def _local(self, ids: np.ndarray) -> list[int]:
        return self._shards.shards_of(ids).tolist()

    def _shards_of(self, ids: np.ndarray) -> np.ndarray:
        return self._shards.shards_of(ids) + self._shards.shards.start


def promoted_of(places: np.ndarray, found: Found) -> Promoted:
    """The ids of a step that come back, given the places that were looked for and what was found."""
    there = found.is_there
    return Promoted(places[there], found.facts[there], found.frames[there])
