"""DynamicShards: index, rules and statistics of some shards of one dynamic table; the rows are elsewhere.

The rules are written out in `rowmesh.tables.dynamic.reference`, which decides the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rowmesh.errors import ConfigurationError, DataError, NoRoomError
from rowmesh.ops.dynamic_index import victims
from rowmesh.ops.dynamic_index.cpu import COUNT, ID, SCORE, SEEN
from rowmesh.ops.dynamic_index.device import DeviceIndex, LookedUp, SeenIds
from rowmesh.ops.dynamic_index.scored import IndexShape, ScoredIndex
from rowmesh.tables.dynamic.candidates import Candidates, ExactCandidates, Located, SketchCandidates
from rowmesh.tables.dynamic.event_clock import NO_TIME
from rowmesh.tables.dynamic.expiry import Expiry
from rowmesh.tables.dynamic.frames import FrameList
from rowmesh.tables.dynamic.hashing import seed_of
from rowmesh.tables.dynamic.room import Room, smallest
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.dynamic.state import (
    NO_FACTS,
    NONE,
    Before,
    MergedFacts,
    OpenedIds,
    Promoted,
    ShardState,
    Statistics,
    United,
    check_batch,
    check_step,
)

_KINDS = {
    "lru": victims.RECENCY,
    "ttl": victims.RECENCY,
    "lfu": victims.FREQUENCY,
    "lru_lfu": victims.BOTH,
    "score": victims.GIVEN,
}
_MAX_FRAMES = 2**32 - 1
_NOTHING = Promoted(NONE, NO_FACTS, NONE)


@dataclass(frozen=True)
class _Unknown:
    """The ids of a step that are unknown, and not promoted."""

    located: Located
    counts: np.ndarray
    given: np.ndarray


@dataclass(frozen=True)
class _Decision:
    """The changes that a step will make."""

    totals: np.ndarray  # of the unknown ids
    admitted: np.ndarray  # a mask of them
    expired: np.ndarray  # frames
    missing: np.ndarray  # by shard
    window: int


def shape_of(table: str, rules: Dynamic, shards: range, num_frames: int) -> IndexShape:
    """The index of some shards of a table."""
    capacities = np.array([rules.shard_capacity(shard) for shard in shards], np.int64)
    here = (seed_of(table), rules.num_shards, shards.start)
    return IndexShape(capacities, *here, max(1, num_frames), _KINDS[rules.eviction], rules.decay_steps)


class DynamicShards:
    """The shards `[first, last)` of one table.

    Args:
        table: its name, which seeds the hash.
        rules: of the whole table.
        shards: those that are here.
        num_frames: frames that ids and batches under way share; more than the capacity of the shards.
        index: on a device, of the shape that `shape_of` gives; None: in the host's memory.

    Attributes:
        expiry: what is known of the time to live.
        keeps_before: whether steps return what `undo` needs.

    Example:
        >>> rules = Dynamic(capacity=2, shards=1)
        >>> shards = DynamicShards("user", rules, range(1), num_frames=4)
        >>> shards.open(np.array([-1, 7]), np.array([1, 3]), step=0).fresh.tolist()
        [True, True]
        >>> shards.open(np.array([7, 9]), np.array([1, 1]), step=1).evicted_ids.tolist()
        [-1]
    """

    def __init__(
        self, table: str, rules: Dynamic, shards: range, num_frames: int, index: DeviceIndex | None = None
    ) -> None:
        if shards.step != 1 or not 0 <= shards.start <= shards.stop <= rules.num_shards:
            raise ConfigurationError(f"dynamic table {table!r} has shards 0 to {rules.num_shards - 1}, not {shards}")
        if not 0 <= num_frames <= _MAX_FRAMES:
            raise ConfigurationError(f"num_frames of dynamic table {table!r} must be 0 to 2^32 − 1, got {num_frames}")
        self.table, self.rules, self.shards, self.device_index = table, rules, shards, index
        self.keeps_before = False
        shape = shape_of(table, rules, shards, num_frames)
        self._kind, self._room = shape.kind, Room(table, rules, shards)
        self._index: ScoredIndex | DeviceIndex
        if index is None:
            self._index = ScoredIndex(shape, -(-(rules.initial_capacity or 1) // rules.num_shards))
        else:
            self._index = index
        self._frames = FrameList(table, num_frames)
        self.expiry = Expiry(rules)
        self._candidates: Candidates | None = None
        if rules.admit_after > 1:
            sketched = rules.sketch_width > 0
            here = (len(shards), shape.seed, shape.num_shards, shape.first_shard)
            self._candidates = SketchCandidates(len(shards), rules) if sketched else ExactCandidates(*here)
        self._step, self._window = -1, 0

    @property
    def host_index(self) -> ScoredIndex:
        """The index, where it is in the host's memory."""
        assert isinstance(self._index, ScoredIndex)
        return self._index

    def open(
        self,
        ids: np.ndarray,
        counts: np.ndarray,
        step: int,
        scores: np.ndarray | None = None,
        time: int = NO_TIME,
        promoted: Promoted = _NOTHING,
    ) -> OpenedIds:
        """Takes a step's decisions. Every step is opened, also without ids.

        Args:
            ids: int64 `[N]`, distinct and ascending, of these shards.
            counts: int64 `[N]`, occurrences in the global batch.
            step: above that of the last call.
            scores: int64 `[N]`, the caller's, where eviction is "score".
            time: of the latest event of the global batch, in seconds, where ids live for some.
            promoted: those of the ids that were demoted: they enter with what was known of them.

        Raises:
            DataError: these arguments do not fit the rules.
            NoRoomError: a shard cannot hold the batch's ids, or pins hold the frames; nothing has changed then.
        """
        check_batch(self.table, ids, counts, scores, self.rules.eviction == "score")
        check_step(self.table, step, self._step)
        self.expiry.clock.check(self.table, time)
        batch, given = self._locate(ids), counts if scores is None else scores
        frames, past = self._index.find(batch.ids, batch.hashes, batch.shards), self.expiry.past(step, time)
        is_new = frames < 0
        is_new[promoted.places] = False
        new = np.flatnonzero(is_new)
        unknown = _Unknown(batch.at(new), counts[new], given[new])
        touched = self._by_shard(batch.shards[frames >= 0])
        expired = self.expiry.due(past, self.host_index.records, frames) if self.expiry.is_used else NONE
        back = batch.shards[promoted.places]
        decision = self._decide(unknown, touched, step, expired, back, int((promoted.frames < 0).sum()))
        known, last = frames[frames >= 0] if self.keeps_before else NONE, (self._step, self._window)
        facts = self._index.facts(known) if self.keeps_before else NO_FACTS
        advanced = self.expiry.clock.advance(step, time)
        uncount = self._commit(unknown, decision)
        self._index.touch(frames, batch.shards, counts, given, step)
        evicted = self._evict(decision, step)
        self._promote(batch, counts, frames, given, promoted, step)
        frames[new] = self._enter(unknown, decision, evicted[0], step)
        fresh, guest, came_back = np.zeros((3, len(frames)), bool)
        fresh[new], guest[new[~decision.admitted]], came_back[promoted.places] = True, True, True
        if self.expiry.is_used:
            self.expiry.add(step, past, frames[~guest], self.host_index.records)
        opened = OpenedIds.of(frames, fresh, guest, came_back, evicted)
        if not self.keeps_before:
            return opened
        left = opened.evicted_ids, opened.evicted_frames, opened.evicted_facts
        entered = ids[fresh & ~guest | came_back]
        return replace(opened, before=Before(*last, known, facts, entered, *left, uncount, advanced))

    def check_seen(self, seen: SeenIds, step: int) -> None:
        """Raises DataError or NoRoomError where `open_found` would; changes nothing."""
        check_step(self.table, step, self._step)
        self._decide(_Unknown(self._locate(seen.ids), seen.counts, seen.counts), seen.touched, step)
        if self._candidates is not None:
            self._candidates.undo()

    def open_found(self, found: LookedUp, seen: SeenIds, step: int) -> tuple[np.ndarray, np.ndarray, OpenedIds]:
        """Takes a step's decisions where the index is on a device, which has found the ids.

        Afterwards `found` has the frames of all ids. `seen` is what the index says of them.

        Returns:
            The unknown ids, ascending, and their counts; and what became of these.

        Raises:
            DataError, NoRoomError: see `open`.
        """
        index = self.device_index
        assert index is not None
        check_step(self.table, step, self._step)
        unknown = _Unknown(self._locate(seen.ids), seen.counts, seen.counts)
        decision = self._decide(unknown, seen.touched, step)
        self._commit(unknown, decision)
        index.touch_found(found, step)
        evicted = self._evict(decision, step)
        frames = self._enter(unknown, decision, evicted[0], step)
        index.put(found, seen.places, frames)
        fresh = np.ones(len(frames), bool)
        opened = OpenedIds.of(frames, fresh, ~decision.admitted, ~fresh, evicted)
        return seen.ids, seen.counts, replace(opened, num_hits=int(seen.touched.sum()))

    def undo(self, before: Before, pinned: np.ndarray = NONE) -> None:
        """Takes the last step back, of which nothing was released.

        Args:
            before: what it returned.
            pinned: frames, then pinned, of ids which came back in it.
        """
        index = self.host_index
        entered, left = self._locate(before.entered_ids), self._locate(before.left_ids)
        frames = index.erase(entered.ids, entered.hashes, entered.shards)
        self._frames.pin(frames)
        self._frames.release(frames[~np.isin(frames, pinned)])
        index.insert(left.ids, left.hashes, left.shards, before.left_frames)
        self._frames.take_back(before.left_frames)
        index.set_facts(before.left_frames, before.left_facts)
        index.set_facts(before.frames, before.facts)
        if before.uncount is not None:
            before.uncount()
        if before.advanced is not None:
            self.expiry.clock.undo(before.advanced)
        self._step, self._window = before.step, before.window
        self.expiry.begin_anew()
        index.forget_order()

    @property
    def described(self) -> np.ndarray:
        """What `rowmesh.ops.dynamic_requests.open_known` must know, but for the row of the first frame."""
        return self.host_index.described

    @property
    def is_always_plain(self) -> bool:
        """Whether a step of known ids never changes more than their counts and scores."""
        return not self.rules.window_steps and not self.rules.has_ttl and self._kind != victims.GIVEN

    def is_plain(self, step: int) -> bool:
        """Whether a step of known ids changes no more than that."""
        rules = self.rules
        is_same_window = not rules.window_steps or step // rules.window_steps == self._window
        return is_same_window and not rules.has_ttl and self._kind != victims.GIVEN

    def note_step(self, step: int) -> None:
        """A step was opened by `rowmesh.ops.dynamic_requests.open_known`."""
        check_step(self.table, step, self._step)
        self._step = step

    def _locate(self, ids: np.ndarray) -> Located:
        ids = np.ascontiguousarray(ids, np.int64)
        hashes, shards, strange = self._index.locate(ids)
        if strange >= 0:
            raise DataError(
                f"id {ids[strange]} of dynamic table {self.table!r} belongs to shard "
                f"{shards[strange] + self.shards.start}, and here are {self.shards}"
            )
        return Located(ids, hashes, shards)

    def _decide(
        self,
        unknown: _Unknown,
        touched: np.ndarray,
        step: int,
        expired: np.ndarray = NONE,
        back: np.ndarray = NONE,
        num_more: int = 0,
    ) -> _Decision:
        """Decides what to do; changes nothing that `_commit` would not make good, also where it raises.

        Args:
            unknown: ids of the step.
            touched: int64 by shard, known ones.
            step: its number.
            expired: frames of ids that leave in any case.
            back: shards of promoted ids.
            num_more: frames that these need.
        """
        window = step // self.rules.window_steps if self.rules.window_steps else 0
        totals = unknown.counts
        if self._candidates is not None:
            totals = self._candidates.judge(unknown.located, totals, window != self._window)
        admitted = totals >= self.rules.admit_after
        try:
            entering = self._by_shard(np.concatenate([unknown.located.shards[admitted], back]))
            self._room.check_batch(touched + entering)
            leaving = 0
            if len(expired):
                leaving = self._by_shard(self._locate(self._index.ids_of(expired)).shards)
            missing = np.maximum(self._index.used + entering - leaving - self._room.capacities, 0)
            self._room.check_leaving(missing)
            self._frames.check(len(totals) + num_more)
        except NoRoomError:
            if self._candidates is not None:
                self._candidates.undo()
            raise
        return _Decision(totals, admitted, expired, missing, window)

    def _by_shard(self, shards: np.ndarray) -> np.ndarray:
        return np.bincount(shards, minlength=len(self.shards))

    def _commit(self, unknown: _Unknown, decision: _Decision) -> Callable[[], None] | None:
        """Counts ids that are not admitted; returns what takes that back."""
        if self._candidates is None:
            return None
        is_renewed = decision.window != self._window
        return self._candidates.commit(unknown.located, decision.totals, decision.admitted, is_renewed)

    def _enter(self, unknown: _Unknown, decision: _Decision, evicted: np.ndarray, step: int) -> np.ndarray:
        """Gives unknown ids frames, and lets those enter that were admitted; the last that a step does."""
        admitted = decision.admitted
        frames = self._frames.take(len(admitted))
        self._frames.pin(frames[~admitted])
        self._frames.pin(evicted)
        new = unknown.located.at(admitted)
        what = decision.totals[admitted], unknown.given[admitted]
        self._index.enter(new.ids, new.hashes, new.shards, frames[admitted], *what, step)
        if self.rules.eviction != "ttl" and len(new.ids):
            self._index.look_ahead(step)
        self._step, self._window = step, decision.window
        return frames

    def _promote(self, batch: Located, counts, frames, given, promoted: Promoted, step: int) -> None:
        """Lets ids enter with what was known of them, and counts them then as known ones."""
        places = promoted.places
        if not len(places):
            return
        entering, slots = batch.at(places), self._frames_for(promoted.frames)
        self._index.insert(entering.ids, entering.hashes, entering.shards, slots)
        self._index.set_facts(slots, promoted.facts)
        self._index.touch(slots, entering.shards, counts[places], given[places], step)
        frames[places] = slots

    def _evict(self, decision: _Decision, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Frames, ids and facts of those that leave."""
        expired = decision.expired
        if not len(expired):
            return self._index.evict(decision.missing, step)
        ids, facts = self._index.ids_of(expired), self._index.facts(expired)
        old = self._locate(ids)
        self.host_index.erase(old.ids, old.hashes, old.shards)
        left = self._index.evict(decision.missing, step)
        return np.concatenate([expired, left[0]]), np.concatenate([ids, left[1]]), np.concatenate([facts, left[2]])

    def release(self, frames: np.ndarray) -> None:
        """Frees frames of guests and victims that no batch pins any more."""
        self._frames.release(frames)

    def find(self, ids: np.ndarray) -> np.ndarray:
        """The frame of each id, −1 where it is unknown; changes nothing. Ids are in any order."""
        batch = self._locate(ids)
        return self._index.find(batch.ids, batch.hashes, batch.shards)

    def statistics(self, ids: np.ndarray) -> Statistics:
        """Counts, last steps and scores of ids, in any order; changes nothing."""
        return self.statistics_of(self.facts(ids)[1])

    def statistics_of(self, facts: np.ndarray) -> Statistics:
        """The same of facts, as `facts` has them."""
        known = facts[:, 0] > 0
        last = np.where(known, facts[:, 0] - 1, 0)
        if self._kind == victims.RECENCY:
            score = last
        else:
            score = facts[:, 2]
            if self.rules.decay_steps:
                halvings = max(self._step, 0) // self.rules.decay_steps - last // self.rules.decay_steps
                score = score >> np.minimum(halvings, 63)
        return Statistics(known, facts[:, 1], last, score)

    # Averages of replica groups, see `rowmesh.exchange.resolve.merging`

    def facts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The frame of each id, −1 where it is unknown; and `[N, 3]`: last step + 1, count and frequency, or zeros."""
        frames = self.find(ids)
        return frames, np.where(frames[:, None] >= 0, self._index.facts(frames), 0)

    def all_facts(self) -> tuple[np.ndarray, np.ndarray]:
        """The same of all ids that are known here."""
        frames = np.concatenate([self._index.slots_in(local) for local in range(len(self.shards))])
        return frames, self._index.facts(frames)

    def check_merged(self, merged: MergedFacts, rows_at: np.ndarray | None) -> None:
        """Raises NoRoomError where `unite` cannot be carried out; changes nothing."""
        batch, frames, stays = self._find_merged(merged)
        self._room.check_leaving(self._surplus(batch, frames, stays))
        needs = (frames < 0) & (stays if rows_at is None else rows_at < 0)
        if rows_at is None and needs.sum() > self._frames.num_free:
            self._find_surplus(batch, frames, stays, merged.facts)
            needs &= stays  # those that a full shard takes
        self._frames.check(int(needs.sum()))

    def unite(self, merged: MergedFacts, rows_at: np.ndarray | None) -> United:
        """Sets facts of ids: unknown ids enter, and ids that are past their time to live leave.

        Then the ids of the smallest (score, id) leave full shards. `check_merged` comes before.

        Args:
            merged: the ids.
            rows_at: int64 `[N]`, where ids that leave are demoted: the pinned frames of ids that are in no index; −1:
                none. Ids that do not enter get frames then too, which are pinned.
        """
        batch, frames, stays = self._find_merged(merged)
        index, facts, is_new = self.host_index, merged.facts, frames < 0
        self.expiry.clock = merged.clock
        index.set_facts(frames[~is_new], facts[~is_new])
        left = np.concatenate([frames[~is_new & ~stays], self._find_surplus(batch, frames, stays, facts)])
        left_facts, leaving = index.facts(left), self._locate(index.ids_of(left))
        index.erase(leaving.ids, leaving.hashes, leaving.shards)
        self._frames.pin(left)
        stays &= is_new | ~np.isin(frames, left)
        entered = np.flatnonzero(is_new & stays if rows_at is None else is_new)
        frames[entered] = self._frames_for(np.full(len(entered), -1) if rows_at is None else rows_at[entered])
        entering = np.flatnonzero(is_new & stays)
        new = batch.at(entering)
        index.insert(new.ids, new.hashes, new.shards, frames[entering])
        index.set_facts(frames[entering], facts[entering])
        if rows_at is None:
            frames[~stays] = -1
        else:
            self._frames.pin(frames[is_new & ~stays])
        index.forget_order(np.unique(batch.shards))
        self.expiry.begin_anew()
        return United(frames, stays, entered, leaving.ids, left, left_facts)

    def _find_merged(self, merged: MergedFacts) -> tuple[Located, np.ndarray, np.ndarray]:
        """Ids, their frames here, and a mask of those that are not demoted, and not past their time to live."""
        batch = self._locate(merged.ids)
        frames = self._index.find(batch.ids, batch.hashes, batch.shards)
        past = self.expiry.past(self._step, NO_TIME, merged.clock)
        return batch, frames, merged.enters & (merged.facts[:, 0] - 1 > past)

    def _frames_for(self, frames: np.ndarray) -> np.ndarray:
        """Frames for ids: those that they still have, pinned; −1: free ones."""
        frames = frames.copy()
        self._frames.take_back(frames[frames >= 0])
        frames[frames < 0] = self._frames.take(int((frames < 0).sum()))
        return frames

    def _surplus(self, batch: Located, frames: np.ndarray, stays: np.ndarray) -> np.ndarray:
        """By how many ids each shard has more than it holds, where merged ones that stay are there; 0: it has room."""
        is_new = frames < 0
        entering, leaving = (self._by_shard(batch.shards[mask]) for mask in (is_new & stays, ~is_new & ~stays))
        return np.maximum(self._index.used + entering - leaving - self._room.capacities, 0)

    def _find_surplus(self, batch: Located, frames: np.ndarray, stays: np.ndarray, facts: np.ndarray) -> np.ndarray:
        """Frames of ids that leave full shards; those of the batch that cannot enter do not stay."""
        surplus = self._surplus(batch, frames, stays)
        full = np.flatnonzero(surplus)
        if not len(full):
            return NONE
        held = [self._index.slots_in(shard) for shard in full.tolist()]
        held = [each[~np.isin(each, frames[~stays])] for each in held]
        here = np.concatenate(held)
        waiting = np.flatnonzero((frames < 0) & stays & np.isin(batch.shards, full))
        ids = np.concatenate([self._index.ids_of(here), batch.ids[waiting]])
        shards = np.concatenate([np.repeat(full, [len(each) for each in held]), batch.shards[waiting]])
        of_ids = np.concatenate([self._merged_facts(here, frames, facts), facts[waiting]])
        leaving = smallest(ids, of_ids, shards, surplus, self._kind, self.rules.decay_steps, self._step)
        stays[waiting[leaving[leaving >= len(here)] - len(here)]] = False
        return here[leaving[leaving < len(here)]]

    def _merged_facts(self, here: np.ndarray, frames: np.ndarray, facts: np.ndarray) -> np.ndarray:
        """Facts of the ids in frames: those of the merged ones, and of others what is known."""
        order = np.argsort(frames)
        places = order[np.minimum(np.searchsorted(frames, here, sorter=order), len(frames) - 1)]
        is_merged = frames[places] == here
        return np.where(is_merged[:, None], facts[places], self._index.facts(here))

    def sightings(self) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Sightings of ids that are not admitted: the window; ids, ascending, and counts; or sketches by shard."""
        states = [self.counted_in(shard) for shard in self.shards]
        sketches, ids, counts = zip(*states, strict=True)
        ids = np.concatenate(ids)
        order = np.argsort(ids)
        return self._window, ids[order], np.concatenate(counts)[order], np.stack(sketches)

    def set_sightings(self, ids: np.ndarray, counts: np.ndarray, sketches: np.ndarray) -> None:
        """Replaces these; the window stays."""
        if self._candidates is None:
            return
        batch = self._locate(ids)
        for local, sketch in enumerate(sketches):
            mine = np.flatnonzero(batch.shards == local)
            columns = (NONE, NONE, NONE, NONE, NONE, sketch, batch.ids[mine], counts[mine])
            self._candidates.load(local, ShardState(*columns, self._step, self._window), batch.at(mine))

    # Saving and loading

    @property
    def known_frames(self) -> np.ndarray:
        """The frames of all ids that are known, ascending."""
        return self._frames.taken

    def records_of(self, frames: np.ndarray) -> np.ndarray:
        """Copies of what is known of the ids in some frames, for `columns`."""
        return self._index.read(frames)

    def column_of(self, frames: np.ndarray, column: int) -> np.ndarray:
        """A column of the records in some frames; `rowmesh.ops.dynamic_index` numbers the columns."""
        return self._index.read(frames)[:, column]

    def columns(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """The columns of records, by their names in `ShardState`."""
        last = records[:, SEEN] - 1
        scores = last.copy() if self._kind == victims.RECENCY else records[:, SCORE].copy()
        return {"ids": records[:, ID].copy(), "counts": records[:, COUNT].copy(), "last_steps": last, "scores": scores}

    def shards_of(self, ids: np.ndarray) -> np.ndarray:
        """The shard of each id, counted from the first one here; reads nothing that steps change."""
        return self._locate(ids).shards

    def counted_in(self, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sketch of a shard, and its ids that are not admitted yet with their sightings: copies."""
        if self._candidates is None:
            return np.zeros((0, self.rules.sketch_width), np.int64), NONE, NONE
        return self._candidates.state_of(self._local(shard))

    @property
    def num_known(self) -> np.ndarray:
        """How many ids each shard knows: a copy."""
        return self._index.used.copy()

    @property
    def clock(self) -> tuple[int, int]:
        """The last step that was opened, and its window of counting."""
        return self._step, self._window

    def state_of(self, shard: int) -> ShardState:
        """All of one shard, as arrays of its own."""
        frames = self._index.slots_in(self._local(shard))
        records = self._index.read(frames)
        order = np.argsort(records[:, ID])
        frames, records = frames[order], records[order]
        sketch, ids, counts = self.counted_in(shard)
        return ShardState(
            **self.columns(records),
            frames=frames,
            sketch=sketch,
            candidate_ids=ids,
            candidate_counts=counts,
            step=self._step,
            window=self._window,
            last_times=self.expiry.clock.times_of(records[:, SEEN] - 1),
            now=self.expiry.clock.now,
        )

    def load(self, shard: int, state: ShardState, frames: np.ndarray) -> None:
        """Replaces one shard by a state, whose ids get the given free frames."""
        local = self._local(shard)
        known, candidates = self._locate(state.ids), self._locate(state.candidate_ids)
        capacity = self._room.capacities[local]
        if len(state.ids) > capacity or len(frames) != len(state.ids):
            raise DataError(
                f"shard {shard} of dynamic table {self.table!r} holds {capacity} ids, and the state has "
                f"{len(state.ids)}, for {len(frames)} frames"
            )
        if (known.shards != local).any() or (candidates.shards != local).any():
            raise DataError(f"the state of shard {shard} of dynamic table {self.table!r} has ids of another shard")
        self._frames.exchange(self._index.slots_in(local), frames)
        self._index.clear(local)
        self._index.insert(known.ids, known.hashes, known.shards, frames)
        scores = np.zeros_like(state.counts) if self._kind == victims.RECENCY else state.scores
        self._index.set_facts(frames, np.stack([state.last_steps + 1, state.counts, scores], axis=1))
        if self._candidates is not None:
            self._candidates.load(local, state, candidates)
        self._index.forget_order()  # steps may begin anew, and frames have changed their shards
        self._step, self._window = state.step, state.window
        self.expiry.begin_anew()
        self.expiry.clock.load(state.last_steps[: len(state.last_times)], state.last_times, state.step, state.now)

    def _local(self, shard: int) -> int:
        if shard not in self.shards:
            raise DataError(f"shard {shard} of dynamic table {self.table!r} is not here; here are {self.shards}")
        return shard - self.shards.start
