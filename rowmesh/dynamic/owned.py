"""What a rank owns of a dynamic table: the shards that decide, and the frames that have the rows."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rowmesh.dynamic.counters import DynamicCounters
from rowmesh.dynamic.event_clock import NO_TIME
from rowmesh.dynamic.frames import FrameList
from rowmesh.dynamic.layout import num_kept, num_spare, rules_of
from rowmesh.dynamic.shards import DynamicShards
from rowmesh.dynamic.state import Opened, ShardState
from rowmesh.errors import DataError
from rowmesh.ops.dynamic_requests import cpu
from rowmesh.tables import TableSpec
from rowmesh.tables.dense import DenseArena
from rowmesh.tables.dynamic import Dynamic
from rowmesh.tables.row_store import Piece


@dataclass(frozen=True)
class _Change:
    """What a batch changed in the index; frames that it freed are used again when it has ended."""

    number: int
    admitted_ids: np.ndarray
    evicted_ids: np.ndarray
    evicted_frames: np.ndarray
    freed: np.ndarray
    visitors: np.ndarray


class Decided(Protocol):
    """Is told of decisions, see `rowmesh.dynamic.merging`."""

    def note(self, ids: np.ndarray, fresh: np.ndarray) -> None:
        """Ids that were seen or left, and frames that have a new id."""
        ...

    def begin_anew(self) -> None:
        """All was replaced."""
        ...


class OwnedTable:
    """Some shards of a dynamic table, and their rows. Frames are counted from the rank's first one.

    Args:
        table: as `framed` gives it.
        shards: those of this rank, one or more.
        arena: where the rows are.
        piece: the frames of this rank: rows of the table as the exchange sees it, and their slots.
        seed: of initial values.

    Attributes:
        shards: index, rules and statistics.
        counters: what was decided here.
        merging: is told of decisions, where replica groups decide for themselves.
        num_frames: frames that known ids have.
    """

    def __init__(self, table: TableSpec, shards: range, arena: DenseArena, piece: Piece, seed: int) -> None:
        rules = rules_of(table)
        spare = num_spare(rules, shards)
        self._table, self._arena, self._piece, self._seed = table, arena, piece, seed
        self._first_visitor = num_kept(rules, shards) + spare
        self.shards = DynamicShards(table.name, rules, shards, self._first_visitor)
        self.counters = DynamicCounters(table.name)
        self._visitors = FrameList(table.name, spare)
        self._zero = self._first_visitor + spare  # its memory is never written
        self._changes: list[_Change] = []
        self.merging: Decided | None = None
        self.num_frames = self._first_visitor

    def open(self, number: int, ids: np.ndarray, counts: np.ndarray, step: int, time: int = NO_TIME) -> np.ndarray:
        """Takes a step's decisions; afterwards all rows are there. Returns the rows of the ids, int64 `[N]`.

        Args:
            number: of the batch.
            ids: int64 `[N]`, distinct and ascending: those of all ranks.
            counts: int64 `[N]`.
            step: above that of the last call.
            time: of the latest event of all ranks, in seconds.

        Raises:
            DataError, NoRoomError: see `DynamicShards.open`.
        """
        opened = self.shards.open(ids, counts, step, time=time)
        if opened.num_hits < len(ids):
            self._start(opened.frames[opened.fresh], ids[opened.fresh])
        if opened.num_hits < len(ids) or opened.num_evicted:
            freed = np.concatenate([opened.evicted_frames, opened.frames[opened.guest]])
            admitted = ids[opened.fresh & ~opened.guest]
            none = np.empty(0, np.int64)
            self._changes.append(
                _Change(number, admitted, opened.evicted_ids, opened.evicted_frames, freed, none),
            )
        if self.merging is not None:
            self.merging.note(np.concatenate([ids[~opened.guest], opened.evicted_ids]), opened.frames[opened.fresh])
        self._count(opened, counts)
        return opened.frames + self._piece.rows.start

    @property
    def described(self) -> np.ndarray:
        """What `rowmesh.ops.dynamic_requests.open_known` must know; the same for as long as the table lives."""
        described = self.shards.described
        described[cpu.FIRST_ROW] = self._piece.rows.start
        return described

    @property
    def is_always_plain(self) -> bool:
        """Whether a step of known ids never changes more than their counts and scores, which nobody needs to note."""
        return self.merging is None and self.shards.is_always_plain

    def is_plain(self, step: int) -> bool:
        """Whether a step of known ids changes no more than that."""
        return self.merging is None and self.shards.is_plain(step)

    def count_known(self, num_hits: int, step: int) -> None:
        """Notes that a step was opened by `open_known`, with so many distinct ids, which all were known."""
        self.shards.note_step(step)
        self.counters.steps += 1
        self.counters.hits += num_hits

    def _count(self, opened: Opened, counts: np.ndarray) -> None:
        counters = self.counters
        counters.steps += 1
        counters.hits += opened.num_hits
        counters.admitted += opened.num_admitted
        counters.evicted += opened.num_evicted
        counters.guests += opened.num_dropped
        if opened.num_dropped:
            counters.dropped += int(counts[opened.guest].sum())

    def find(self, number: int, ids: np.ndarray, ahead: Container[int]) -> np.ndarray:
        """The rows of ids in evaluation, which changes nothing; unknown ids have rows of their own until it ends.

        Args:
            number: of the batch.
            ids: int64 `[N]`, distinct and ascending: those of all ranks.
            ahead: batches that a pipeline has opened before their turn; they are as if they had not been.

        Raises:
            DataError: an id is unknown, and the rules say that this is an error.
            NoRoomError: there are more unknown ids than spare frames.
        """
        frames = self.shards.find(ids)
        for change in reversed(self._changes):
            if change.number in ahead:
                _undo(change, ids, frames)
        if len(unknown := np.flatnonzero(frames < 0)):
            self.counters.missing += len(unknown)
            frames[unknown] = self._frames_of_unknown(number, ids[unknown])
        self.counters.found += len(ids) - len(unknown)
        return frames + self._piece.rows.start

    def _frames_of_unknown(self, number: int, ids: np.ndarray) -> np.ndarray | int:
        missing = rules_of(self._table).missing
        if missing == "zero":
            return self._zero
        if missing == "error":
            raise DataError(
                f"dynamic table {self._table.name!r} does not know {len(ids)} of the ids that are looked up, the first "
                f'is {ids[0]}; correct the data, or let unknown ids read missing="initial" or "zero"'
            )
        self._visitors.check(len(ids))
        visitors = self._visitors.take(len(ids))
        self._visitors.lease(visitors)
        none = np.empty(0, np.int64)
        self._changes.append(_Change(number, none, none, none, none, visitors))
        frames = visitors + self._first_visitor
        self._start(frames, ids)
        return frames

    def _start(self, frames: np.ndarray, ids: np.ndarray) -> None:
        self._arena.start(frames + self._piece.slots.start, ids, self._seed, self._table)

    def unite(self, number: int, ids: np.ndarray, facts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Takes over what other replica groups know; see `DynamicShards.unite`.

        Args:
            number: of the last batch that was opened.
            ids: int64 `[N]`, ascending.
            facts: int64 `[N, 3]`.

        Returns:
            Slots of the ids that are known afterwards, and a mask of these. New ones have their initial rows.
        """
        united = self.shards.unite(ids, facts)
        entered = united.frames[united.entered]
        self._start(entered, ids[united.entered])
        none = np.empty(0, np.int64)
        change = _Change(number, ids[united.entered], united.left_ids, united.left_frames, united.left_frames, none)
        self._changes.append(change)
        self.counters.evicted += len(united.left_ids)
        stay = united.frames >= 0
        return self.slots(united.frames[stay]), stay

    def release(self, first: int) -> None:
        """Batches before number `first` have ended on all ranks: what they freed may be used again."""
        while self._changes and self._changes[0].number < first:
            change = self._changes.pop(0)
            if len(change.freed):
                self.shards.release(change.freed)
            if len(change.visitors):
                self._visitors.release(change.visitors)

    # What is saved

    def slots(self, frames: np.ndarray) -> np.ndarray:
        """Where in the arena frames are."""
        return frames + self._piece.slots.start

    def frames(self, slots: np.ndarray) -> np.ndarray:
        """The frames that are there."""
        return slots - self._piece.slots.start

    def start(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Gives ids rows as new ones have, at slots that `load` returned."""
        self._arena.start(slots, ids, self._seed, self._table)

    def load(self, states: list[ShardState]) -> list[np.ndarray]:
        """Replaces all shards, which no batch under way uses; returns the slots of the ids of each.

        Args:
            states: of the shards here, in order.
        """
        self.release(1 << 62)
        rules, none = rules_of(self._table), np.empty(0, np.int64)
        empty = ShardState(none, none, none, none, none, _no_sketch(rules), none, none, -1, 0)
        for shard in self.shards.shards:
            self.shards.load(shard, empty, none)
        slots, first = [], 0
        for shard, state in zip(self.shards.shards, states, strict=True):
            frames = np.arange(first, first + len(state.ids))
            self.shards.load(shard, state, frames)
            slots.append(self.slots(frames))
            first += len(frames)
        if self.merging is not None:
            self.merging.begin_anew()
        return slots


def _no_sketch(rules: Dynamic) -> np.ndarray:
    return np.zeros((rules.sketch_depth if rules.sketch_width else 0, rules.sketch_width), np.int64)


def _undo(change: _Change, ids: np.ndarray, frames: np.ndarray) -> None:
    """Finds ids as before a change; their frames are still leased."""
    frames[np.isin(ids, change.admitted_ids)] = -1
    order = np.argsort(change.evicted_ids)
    evicted = change.evicted_ids[order]
    places = np.minimum(np.searchsorted(evicted, ids), max(len(evicted) - 1, 0))
    if len(evicted):
        back = evicted[places] == ids
        frames[back] = change.evicted_frames[order][places[back]]
