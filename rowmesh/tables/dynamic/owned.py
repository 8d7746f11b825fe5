"""The share of a rank in a dynamic table: the shards that decide, and the frames that have the rows."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rowmesh.errors import DataError
from rowmesh.ops.dynamic_index.device import DeviceIndex, LookedUp, SeenIds
from rowmesh.ops.dynamic_requests import cpu
from rowmesh.tables import TableSpec
from rowmesh.tables.dense import DenseArena
from rowmesh.tables.dynamic.changes import Change
from rowmesh.tables.dynamic.counters import DynamicCounters
from rowmesh.tables.dynamic.demoted import Demoted, Found, promoted_of
from rowmesh.tables.dynamic.event_clock import NO_TIME
from rowmesh.tables.dynamic.frames import FrameList
from rowmesh.tables.dynamic.hooks import DecisionHooks
from rowmesh.tables.dynamic.known_ids import KnownIds
from rowmesh.tables.dynamic.layout import num_spare, num_used, rules_of
from rowmesh.tables.dynamic.shards import DynamicShards
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.dynamic.state import NONE, Before, MergedFacts, OpenedIds, ShardState, Statistics, United
from rowmesh.tables.dynamic.stores import RecordStore
from rowmesh.tables.row_store import Piece


class Decided(Protocol):
    """Is told of decisions, see `rowmesh.exchange.resolve.merging`."""

    def note(self, ids: np.ndarray, fresh: np.ndarray, left_ids: np.ndarray, left_frames: np.ndarray) -> None:
        """Ids that were seen, left or were forgotten; frames that have a new id; ids that left these frames."""
        ...

    def note_back(self, ids: np.ndarray, frames: np.ndarray, facts: np.ndarray) -> None:
        """Ids that were demoted are in these frames; facts as they were until then."""
        ...

    def take_back(self, noted: np.ndarray) -> None:
        """The last step was not: it has noted these ids, the very array."""
        ...

    def begin_anew(self) -> None:
        """All was replaced."""
        ...


@dataclass(eq=False)
class _Kept:
    """A batch that can be taken back.

    Attributes:
        number: of the batch.
        before: what it changed, as it was.
        change: what else it changed.
        counted: what it added to the counters.
        noted: what `merging` was told.
    """

    number: int
    before: Before
    change: Change
    counted: DynamicCounters
    noted: np.ndarray | None = None


@dataclass(frozen=True)
class _Untold:
    """A step of which hooks have still to be told.

    Attributes:
        hooks: those that there were when it was opened.
        step, ids, counts, opened: as `DecisionHooks` takes them.
    """

    hooks: tuple[int, ...]
    step: int
    ids: np.ndarray
    counts: np.ndarray
    opened: OpenedIds


class OwnedTable:
    """Some shards of a dynamic table, and their rows. Frames are counted from the rank's first one.

    Args:
        table: as `framed` gives it.
        shards: those of this rank, one or more.
        arena: where the rows are.
        piece: the frames of this rank: rows of the table as the exchange sees it, and their slots.
        seed: of initial values.
        store: of records of demoted ids; None where evicted ones are forgotten.
        index: on a device; None: in the host's memory.

    Attributes:
        shards: index, rules and statistics.
        counters: what was decided here.
        merging: is told of decisions, where replica groups decide for themselves.
        hooks: are told of them too, where there are any.
        num_frames: frames that known ids have.
        seed: of initial values.
    """

    def __init__(
        self,
        table: TableSpec,
        shards: range,
        arena: DenseArena,
        piece: Piece,
        seed: int,
        store: RecordStore | None = None,
        index: DeviceIndex | None = None,
    ) -> None:
        rules = rules_of(table)
        spare = num_spare(rules, shards)
        self._table, self._arena, self._piece, self.seed = table, arena, piece, seed
        self._first_visitor = num_used(rules, shards)
        self.shards = DynamicShards(table.name, rules, shards, self._first_visitor, index)
        self.counters = DynamicCounters(table.name)
        self._visitors = FrameList(table.name, spare)
        self._zero = self._first_visitor + spare  # its memory is never written
        self._changes: list[Change] = []
        self._kept: list[_Kept] = []  # of batches that may be taken back, the last one last
        self._demoted: Demoted | None = None
        if store is not None:
            self._demoted = Demoted(table, self.shards, arena, piece.slots.start, store)
        self.shards.keeps_before = index is None
        self.merging: Decided | None = None
        self.hooks: DecisionHooks | None = None
        self._untold: list[_Untold] = []
        self.num_frames = self._first_visitor

    def tell_hooks(self, hooks: DecisionHooks) -> None:
        """Has hooks told of what is decided from now on."""
        self.hooks = hooks

    def merge_with(self, merging: Decided) -> None:
        """Has what makes replica groups one told of what is decided from now on."""
        self.merging = merging

    @property
    def is_scored(self) -> bool:
        """Whether `open` needs scores."""
        return self._table.takes_scores

    def open(
        self,
        number: int,
        ids: np.ndarray,
        counts: np.ndarray,
        step: int,
        scores: np.ndarray | None = None,
        time: int = NO_TIME,
    ) -> np.ndarray:
        """Takes a step's decisions; afterwards all rows are there. Returns the rows of the ids, int64 `[N]`.

        Args:
            number: of the batch.
            ids: int64 `[N]`, distinct and ascending: those of all ranks.
            counts: int64 `[N]`.
            step: above that of the last call.
            scores: int64 `[N]`, of the caller, where such decide.
            time: of the latest event of all ranks, in seconds.

        Raises:
            DataError, NoRoomError: see `DynamicShards.open`.
            StoreError: the store does not answer; nothing has changed then.
        """
        if self._demoted is None:
            opened = self.shards.open(ids, counts, step, scores, time)
            change = _change_of(number, ids, opened)
        else:
            opened, change = self._open_demoted(self._demoted, number, ids, counts, step, scores, time)
        counted = self._take(ids, counts, opened, change)
        kept = None
        if opened.before is not None:
            kept = _Kept(number, opened.before, change, counted)
            self._kept.append(kept)
        if self.merging is not None:
            changed = np.concatenate([ids[~opened.guest], opened.evicted_ids, change.forgotten_ids])
            self.merging.note(changed, opened.frames[opened.fresh], change.evicted_ids, change.evicted_frames)
            if kept is not None:
                kept.noted = changed
        if self.hooks:
            self._untold.append(_Untold(self.hooks.numbers, step, ids, counts, opened))
        return opened.frames + self._piece.rows.start

    def tell(self, step: int) -> None:
        """Tells hooks what was decided in a step.

        Raises:
            RowmeshError: one failed; names it.
        """
        untold = [each for each in self._untold if each.step == step]
        self._untold = [each for each in self._untold if each.step != step]
        for each in untold:
            assert self.hooks is not None
            self.hooks(each.hooks, each.step, each.ids, each.counts, each.opened)

    def _take(self, ids: np.ndarray, counts: np.ndarray, opened: OpenedIds, change: Change) -> DynamicCounters:
        """Writes the rows of new ids, and notes what has changed; returns what was counted."""
        num_new = opened.num_admitted + opened.num_dropped
        if num_new:
            self._start(opened.frames[opened.fresh], ids[opened.fresh])
        if num_new or opened.num_promoted or opened.num_evicted:
            self._changes.append(change)
        counted = self._counted(opened, counts, len(change.forgotten_ids))
        self.counters.add(counted)
        return counted

    def _open_demoted(
        self,
        demoted: Demoted,
        number: int,
        ids: np.ndarray,
        counts: np.ndarray,
        step: int,
        scores: np.ndarray | None,
        time: int,
    ) -> tuple[OpenedIds, Change]:
        """The same where evicted ids are demoted; the rows of those that come back are there afterwards."""
        unknown = np.flatnonzero(self.shards.find(ids) < 0)
        found = demoted.find(self._changes, ids[unknown])
        promoted = promoted_of(unknown, found)
        opened = self.shards.open(ids, counts, step, scores, time, promoted)
        stored = found.is_there & (found.frames < 0)
        demoted.restore(found, np.flatnonzero(stored), opened.frames[unknown[stored]])
        back = ids[promoted.places[promoted.frames >= 0]]
        taken = [earlier.take_back(back) for earlier in self._changes] if len(back) else []
        change = _change_of(number, ids, opened)
        change.taken = [each for each in taken if len(each.evicted_ids)]
        change.promoted_ids = ids[unknown[stored]]
        if self.merging is not None:
            self.merging.note_back(ids[promoted.places], opened.frames[promoted.places], promoted.facts)
        demoted.demote(change, ids[promoted.places])
        return opened, change

    # Where the index is on a device, which has found the ids of a batch

    @property
    def device_index(self) -> DeviceIndex:
        """The index, where it is on a device."""
        assert self.shards.device_index is not None
        return self.shards.device_index

    def check_found(self, found: LookedUp, step: int) -> SeenIds:
        """Reads from the device what `open_found` needs; raises NoRoomError where that would fail. Changes nothing."""
        seen = self.device_index.seen(found)
        self.shards.check_seen(seen, step)
        return seen

    def open_found(self, number: int, found: LookedUp, step: int, seen: SeenIds | None = None) -> None:
        """Takes a step's decisions as `open` does; `found` gets the frames. `seen` is what `check_found` returned."""
        if self._is_quiet:
            seen = self.device_index.seen(found) if seen is None else seen
            ids, counts, opened = self.shards.open_found(found, seen, step)
            self._take(ids, counts, opened, _change_of(number, ids, opened))
            return
        ids, counts, places = self.device_index.all_ids(found)
        self._put(found, places, self.open(number, ids, counts, step))

    def find_found(self, number: int, found: LookedUp, ahead: Container[int], *, again: bool) -> None:
        """Finds ids in evaluation as `find` does; `found` gets the frames."""
        ids, _, places = self.device_index.all_ids(found)
        self._put(found, places, self.find(number, ids, ahead, again=again))

    def _put(self, found: LookedUp, places: np.ndarray, rows: np.ndarray) -> None:
        self.device_index.put(found, places, rows - self._piece.rows.start)

    @property
    def guests(self) -> np.ndarray:
        """Rows, int64, that no id keeps: of guests of batches that have not ended; what they get is dropped."""
        frames = [change.guests for change in self._changes]
        return np.concatenate([NONE, *frames]) + self._piece.rows.start

    def guests_of(self, numbers: Container[int]) -> np.ndarray:
        """Those of batches that have not ended, in the thread of their update."""
        frames = [change.guests for change in [*self._changes] if change.number in numbers]
        return np.concatenate([NONE, *frames]) + self._piece.rows.start

    def has_changed(self, ahead: Container[int]) -> bool:
        """Whether one of these batches has changed what is known."""
        return any(change.number in ahead for change in self._changes)

    @property
    def is_on_device(self) -> bool:
        """Whether the index is on a device."""
        return self.shards.device_index is not None

    @property
    def described(self) -> np.ndarray:
        """What `rowmesh.ops.dynamic_requests.open_known` must know; the same for as long as the table lives."""
        described = self.shards.described
        described[cpu.FIRST_ROW] = self._piece.rows.start
        return described

    @property
    def is_always_plain(self) -> bool:
        """Whether a step of known ids never changes more than their counts and scores, which nobody needs to note."""
        return self._is_quiet and self.shards.is_always_plain

    def is_plain(self, step: int) -> bool:
        """Whether a step of known ids changes no more than that."""
        return self._is_quiet and self.shards.is_plain(step)

    @property
    def _is_quiet(self) -> bool:
        """Whether nobody is told of decisions."""
        return self.merging is None and not self.hooks

    def count_known(self, num_hits: int, step: int) -> int:
        """Notes that a step was opened by `open_known`, with so many distinct ids, which all were known.

        Returns:
            The last step before.
        """
        last, _ = self.shards.clock
        self.shards.note_step(step)
        self.counters.steps += 1
        self.counters.hits += num_hits
        return last

    def uncount_known(self, num_hits: int, last: int, before: np.ndarray) -> None:
        """Takes the last step back, which `count_known` noted.

        Args:
            num_hits: what that was told.
            last: what it returned.
            before: int64 `[n, 4]`, what the kernel said of the ids.
        """
        self.shards.undo(Before(last, self.shards.clock[1], before[:, 0], before[:, 1:]))
        self.counters.steps -= 1
        self.counters.hits -= num_hits

    @staticmethod
    def _counted(opened: OpenedIds, counts: np.ndarray, num_forgotten: int) -> DynamicCounters:
        return DynamicCounters(
            "",
            steps=1,
            hits=opened.num_hits,
            admitted=opened.num_admitted,
            evicted=opened.num_evicted,
            guests=opened.num_dropped,
            dropped=int(counts[opened.guest].sum()) if opened.num_dropped else 0,
            promoted=opened.num_promoted,
            forgotten=num_forgotten,
        )

    def find(self, number: int, ids: np.ndarray, ahead: Container[int], *, again: bool = False) -> np.ndarray:
        """The rows of ids in evaluation, which changes nothing; unknown ids have rows of their own until it ends.

        Args:
            number: of the batch.
            ids: int64 `[N]`, distinct and ascending: those of all ranks.
            ahead: batches that a pipeline has opened before their turn; they are as if they had not been.
            again: whether a batch that trains is looked up once more, whose guests read their initial rows.

        Raises:
            DataError: an id is unknown, and the rules say that this is an error.
            NoRoomError: there are more unknown ids than spare frames.
            StoreError: the store does not answer; names it.
        """
        frames = self.shards.find(ids)
        for change in reversed(self._changes):
            if change.number in ahead:
                change.undo(ids, frames)
        if again and self._demoted is None:  # later batches may have evicted ids of it, whose rows stay until it ends
            for change in self._changes:
                change.find_evicted(ids, frames)
        unknown = np.flatnonzero(frames < 0)
        if self._demoted is not None and len(unknown):
            found = self._demoted.find(self._changes, ids[unknown], ahead)
            if not again:
                self._check_missing(ids[unknown[~found.is_there]])
            frames[unknown[found.is_there]] = self._visit_demoted(self._demoted, number, found)
            unknown = unknown[~found.is_there]
        if len(unknown):
            self.counters.missing += len(unknown)
            frames[unknown] = self._frames_of_unknown(number, ids[unknown], again=again)
        self.counters.found += len(ids) - len(unknown)
        return frames + self._piece.rows.start

    def _visit_demoted(self, demoted: Demoted, number: int, found: Found) -> np.ndarray:
        """Frames with copies of the rows that were found."""
        places = np.flatnonzero(found.is_there)
        frames = self._take_visitors(number, len(places))
        demoted.restore(found, places, frames)
        return frames

    def _check_missing(self, ids: np.ndarray) -> None:
        if len(ids) and rules_of(self._table).missing == "error":
            raise DataError(
                f"dynamic table {self._table.name!r} does not know {len(ids)} of the ids that are looked up, the first "
                f'is {ids[0]}; correct the data, or let unknown ids read missing="initial" or "zero"'
            )

    def _frames_of_unknown(self, number: int, ids: np.ndarray, *, again: bool) -> np.ndarray | int:
        if not again:
            self._check_missing(ids)
        if rules_of(self._table).missing == "zero" and not again:
            return self._zero
        frames = self._take_visitors(number, len(ids))
        self._start(frames, ids)
        return frames

    def _take_visitors(self, number: int, count: int) -> np.ndarray:
        self._visitors.check(count)
        visitors = self._visitors.take(count)
        self._visitors.pin(visitors)
        self._changes.append(Change(number=number, visitors=visitors))
        return visitors + self._first_visitor

    def statistics(self, ids: np.ndarray) -> Statistics:
        """Counts, last steps and scores of ids, demoted ones too, in any order and perhaps twice; changes nothing."""
        facts = self.shards.facts(ids)[1]
        if self._demoted is not None and len(ids):
            unknown, inverse = np.unique(ids, return_inverse=True)
            found = self._demoted.find(self._changes, unknown)
            facts = np.where(facts[:, :1] > 0, facts, found.facts[inverse])
        return self.shards.statistics_of(facts)

    def _start(self, frames: np.ndarray, ids: np.ndarray) -> None:
        self._arena.start(frames + self._piece.slots.start, ids, self.seed, self._table)

    # Averages of replica groups, see `rowmesh.exchange.resolve.merging`

    def held(self, ids: np.ndarray) -> KnownIds:
        """Finds frames and facts of distinct ids here, demoted or not; changes nothing.

        Raises:
            StoreError: the store does not answer; names it.
        """
        frames, facts = self.shards.facts(ids)
        unknown, found = np.flatnonzero(frames < 0), None
        if self._demoted is not None:
            found = self._demoted.find(self._changes, ids[unknown])
            facts[unknown] = found.facts
        return KnownIds(frames, facts, unknown, found)

    def unite(self, number: int, merged: MergedFacts, held: KnownIds) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Takes over what other replica groups know; see `DynamicShards.unite`.

        Args:
            number: of the last batch that was opened.
            merged: which ids there are.
            held: what was known of them here.

        Returns:
            Slots of the ids, their rows as they were here, or initial ones; −1 of those that are forgotten. Masks of
            those that are not forgotten, and of those that are in the index.
        """
        ids, united = merged.ids, self.shards.unite(merged, held.rows_at)
        entered = np.setdiff1d(united.entered, held.demoted, assume_unique=True)
        self._start(united.frames[entered], ids[entered])
        left = united.left_ids, united.left_frames, united.left_facts
        change = Change(number=number, admitted_ids=ids[entered])
        if self._demoted is not None and held.found is not None:
            left = self._unite_demoted(self._demoted, change, merged, held, united)
        order = np.argsort(left[0])
        change.evicted_ids, change.evicted_frames, change.evicted_facts = (each[order] for each in left)
        if self._demoted is not None:
            self.counters.forgotten += self._demoted.demote(change, ids[held.demoted])
        self._changes.append(change)
        self.counters.evicted += len(united.left_ids)
        has_row = united.frames >= 0
        return self.slots(united.frames), has_row, united.stays

    def _unite_demoted(
        self, demoted: Demoted, change: Change, merged: MergedFacts, held: KnownIds, united: United
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Brings the rows of demoted ids into their frames. Returns which ids are demoted then: ids, frames, facts.

        They are as if they had come back and left again: their records are written when the average has been done.
        """
        assert held.found is not None
        found, ids = held.found, merged.ids
        stored = np.flatnonzero(found.is_there & (found.frames < 0))
        places = held.unknown[stored]
        demoted.restore(found, stored, united.frames[places])
        change.promoted_ids = ids[places]
        for earlier in self._changes:
            earlier.take_back(ids[held.demoted])
        others, away = ~np.isin(united.left_ids, ids), ~united.stays
        return (
            np.concatenate([ids[away], united.left_ids[others]]),
            np.concatenate([united.frames[away], united.left_frames[others]]),
            np.concatenate([merged.facts[away], united.left_facts[others]]),
        )

    def release(self, first: int) -> None:
        """Frees what batches before number `first` hold, which have ended on all ranks.

        Raises:
            StoreError: the store does not answer; names it. Records that were not written wait for the next call.
        """
        while self._kept and self._kept[0].number < first:
            del self._kept[0]
        while self._changes and self._changes[0].number < first:
            if self._demoted is not None:
                self._demoted.flush(self._changes[0])
            self._free(self._changes.pop(0))

    def go_back(self, number: int) -> None:
        """Takes back what a batch decided, the last of those that this table opened; nothing where it opened none."""
        if not self._kept or self._kept[-1].number != number:
            return
        kept = self._kept.pop()
        taken = kept.change.taken
        self.shards.undo(kept.before, np.concatenate([NONE, *(each.evicted_frames for each in taken)]))
        self._changes = [each for each in self._changes if each.number != number]
        self._take_back(kept.change, kept.before)
        self.counters.subtract(kept.counted)
        if self.merging is not None and kept.noted is not None:
            self.merging.take_back(kept.noted)
        if self._untold and self._untold[-1].step > self.shards.clock[0]:
            self._untold.pop()

    def _take_back(self, change: Change, before: Before) -> None:
        """Takes back what a batch changed beside its shards."""
        self.shards.release(change.guests)
        if self._demoted is not None:
            self._demoted.undo(change, before.left_ids)
        self._changes = sorted([*self._changes, *change.taken], key=lambda each: each.number)

    def flush(self) -> Demoted | None:
        """Brings the store up to date, with no batch under way, and returns the demoted ids; None: there never are any.

        Raises:
            StoreError: the store does not answer; names it.
        """
        if self._demoted is not None:
            for change in self._changes:
                self._demoted.flush(change)
                change.flushed()
        return self._demoted

    def _free(self, change: Change) -> None:
        if len(change.freed):
            self.shards.release(change.freed)
        if len(change.visitors):
            self._visitors.release(change.visitors)

    def close(self) -> None:
        """Closes the store of demoted ids."""
        if self._demoted is not None:
            self._demoted.close()

    # Saving and loading

    def slots(self, frames: np.ndarray) -> np.ndarray:
        """Where in the arena frames are."""
        return frames + self._piece.slots.start

    def frames(self, slots: np.ndarray) -> np.ndarray:
        """The frames that are there."""
        return slots - self._piece.slots.start

    def start(self, slots: np.ndarray, ids: np.ndarray) -> None:
        """Gives ids rows as new ones have, at slots that `load` returned."""
        self._arena.start(slots, ids, self.seed, self._table)

    def load(self, states: list[ShardState]) -> list[np.ndarray]:
        """Replaces all shards, which no batch under way uses; returns the slots of the ids of each.

        Args:
            states: of the shards here, in order.
        """
        if self._demoted is not None:
            self._demoted.clear()
        self._kept.clear()
        self._untold.clear()
        while self._changes:
            self._free(self._changes.pop(0))
        rules = rules_of(self._table)
        empty = ShardState(NONE, NONE, NONE, NONE, NONE, _no_sketch(rules), NONE, NONE, -1, 0)
        for shard in self.shards.shards:
            self.shards.load(shard, empty, NONE)
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


def _change_of(number: int, ids: np.ndarray, opened: OpenedIds) -> Change:
    order = np.argsort(opened.evicted_ids)
    return Change(
        number=number,
        admitted_ids=ids[opened.fresh & ~opened.guest],
        evicted_ids=opened.evicted_ids[order],
        evicted_frames=opened.evicted_frames[order],
        evicted_facts=opened.evicted_facts[order],
        guests=opened.frames[opened.guest],
    )
