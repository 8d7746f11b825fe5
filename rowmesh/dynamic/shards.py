"""DynamicShards: index, rules and statistics of some shards of one dynamic table; the rows are elsewhere.

The rules are written out in `rowmesh.dynamic.reference`, which decides the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rowmesh.dynamic.candidates import Candidates, ExactCandidates, Located, SketchCandidates
from rowmesh.dynamic.event_clock import NO_TIME
from rowmesh.dynamic.expiry import Expiry
from rowmesh.dynamic.frames import FrameList
from rowmesh.dynamic.hashing import seed_of
from rowmesh.dynamic.room import Room, smallest
from rowmesh.dynamic.state import (
    Before,
    MergedFacts,
    Opened,
    Promoted,
    ShardState,
    Statistics,
    United,
    check_batch,
    check_step,
)
from rowmesh.errors import ConfigurationError, DataError, NoRoomError
from rowmesh.ops.dynamic_index import Index, victims
from rowmesh.ops.dynamic_index.cpu import COUNT, ID, NUM_LATER, SCORE, SEEN, USED
from rowmesh.ops.dynamic_requests import cpu as requests
from rowmesh.tables.dynamic import Dynamic

_KINDS = {
    "lru": victims.RECENCY,
    "ttl": victims.RECENCY,
    "lfu": victims.FREQUENCY,
    "lru_lfu": victims.BOTH,
    "score": victims.GIVEN,
}
_MAX_FRAMES = 2**32 - 1
_NONE = np.empty(0, np.int64)
_NOTHING = Promoted(_NONE, np.empty((0, 3), np.int64), _NONE)


@dataclass(frozen=True)
class _Decision:
    """What a step will change: positions in the batch, and numbers by shard."""

    new: np.ndarray  # unknown, and not promoted
    totals: np.ndarray
    admitted: np.ndarray  # a mask of `new`
    promoted: Promoted
    expired: np.ndarray  # frames
    missing: np.ndarray
    window: int
    past: int


class DynamicShards:
    """The shards `[first, last)` of one table.

    Args:
        table: its name, which seeds the hash.
        rules: of the whole table.
        shards: those that are here.
        num_frames: frames that ids, guests and leases share; more than the capacity of the shards.

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

    def __init__(self, table: str, rules: Dynamic, shards: range, num_frames: int) -> None:
        if shards.step != 1 or not 0 <= shards.start <= shards.stop <= rules.num_shards:
            raise ConfigurationError(f"dynamic table {table!r} has shards 0 to {rules.num_shards - 1}, not {shards}")
        if not 0 <= num_frames <= _MAX_FRAMES:
            raise ConfigurationError(f"num_frames of dynamic table {table!r} must be 0 to 2^32 − 1, got {num_frames}")
        self.table, self.rules, self.shards, self.keeps_before = table, rules, shards, False
        self._kind, seed = _KINDS[rules.eviction], seed_of(table)
        self._room = Room(table, rules, shards)
        self._capacities = self._room.capacities
        initial = -(-(rules.initial_capacity or 1) // rules.num_shards)
        shape = (seed, rules.num_shards, shards.start)
        num_columns = 3 if self._kind == victims.RECENCY else 4
        self._index = Index(self._capacities, *shape, max(1, num_frames), num_columns, initial)
        self._frames = FrameList(table, num_frames)
        self.expiry = Expiry(rules)
        self._candidates: Candidates | None = None
        if rules.admit_after > 1:
            sketched = rules.sketch_width > 0
            self._candidates = (
                SketchCandidates(len(shards), rules) if sketched else ExactCandidates(len(shards), *shape)
            )
        self._make_room()
        self._step, self._window = -1, 0

    def _make_room(self) -> None:
        largest = int(self._capacities.max(initial=0))
        self._selection = victims.Selection(len(self.shards), largest, self._kind)

    def open(
        self,
        ids: np.ndarray,
        counts: np.ndarray,
        step: int,
        scores: np.ndarray | None = None,
        time: int = NO_TIME,
        promoted: Promoted = _NOTHING,
    ) -> Opened:
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
            NoRoomError: a shard cannot hold the batch's ids, or leases hold the frames; nothing has changed then.
        """
        check_batch(self.table, ids, counts, scores, self.rules.eviction == "score")
        check_step(self.table, step, self._step)
        self.expiry.clock.check(self.table, time)
        batch = self._locate(ids)
        frames = self._index.find(ids, batch.hashes, batch.shards)
        decision = self._decide(batch, counts, frames, step, self.expiry.past(step, time), promoted)
        known, last = frames[frames >= 0] if self.keeps_before else _NONE, (self._step, self._window)
        facts = self._facts_at(known)
        advanced = self.expiry.clock.advance(step, time)
        opened = self._apply(batch, counts, frames, counts if scores is None else scores, step, decision)
        if not self.keeps_before:
            return opened
        left = opened.evicted_ids, opened.evicted_frames, opened.evicted_facts
        entered = ids[opened.fresh & ~opened.guest | opened.promoted]
        return replace(opened, before=Before(*last, known, facts, entered, *left, opened.uncount, advanced))

    def undo(self, before: Before, leased: np.ndarray = _NONE) -> None:
        """Takes the last step back, of which nothing was released.

        Args:
            before: what it returned.
            leased: frames that were leased to ids which came back in it.
        """
        index = self._index
        entered, left = self._locate(before.entered_ids), self._locate(before.left_ids)
        frames = index.erase(entered.ids, entered.hashes, entered.shards)
        self._frames.lease(frames)
        self._frames.release(frames[~np.isin(frames, leased)])
        index.insert(left.ids, left.hashes, left.shards, before.left_frames)
        self._frames.take_back(before.left_frames)
        self._set_facts(before.left_frames, before.left_facts)
        self._set_facts(before.frames, before.facts)
        if before.uncount is not None:
            before.uncount()
        if before.advanced is not None:
            self.expiry.clock.undo(before.advanced)
        self._step, self._window = before.step, before.window
        self.expiry.begin_anew()
        index.headers[:, NUM_LATER] = -1  # scores have changed

    @property
    def described(self) -> np.ndarray:
        """What `rowmesh.ops.dynamic_requests.open_known` must know, but for the row of the first frame."""
        index, later = self._index, self._selection.later
        described = np.zeros(requests.OWNER_COLUMNS, np.int64)
        described[requests.SEED] = index.seed.view(np.int64)
        described[requests.NUM_SHARDS] = self.rules.num_shards
        described[requests.FIRST_SHARD], described[requests.NUM_HERE] = self.shards.start, len(self.shards)
        described[requests.HEADERS], described[requests.RECORDS] = index.headers.ctypes.data, index.records.ctypes.data
        described[requests.NUM_SLOTS], described[requests.RECORD_COLUMNS] = index.records.shape
        described[requests.LATER], described[requests.MOST_LATER] = later.ctypes.data, later.shape[1]
        described[requests.KIND], described[requests.DECAY_STEPS] = self._kind, self.rules.decay_steps
        return described

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
        self, batch: Located, counts: np.ndarray, frames: np.ndarray, step: int, past: int, promoted: Promoted
    ) -> _Decision:
        is_new = frames < 0
        is_new[promoted.places] = False
        new = np.flatnonzero(is_new)
        window = step // self.rules.window_steps if self.rules.window_steps else 0
        totals = counts[new]
        if self._candidates is not None:
            totals = self._candidates.judge(batch.at(new), totals, window != self._window)
        admitted = totals >= self.rules.admit_after
        try:
            touched = self._by_shard(batch.shards[frames >= 0])
            entering = self._by_shard(batch.shards[np.concatenate([new[admitted], promoted.places])])
            self._room.check_batch(touched + entering)
            expired = self.expiry.due(past, self._index.records, frames)
            leaving = self._by_shard(self._locate(self._index.records[expired, ID]).shards)
            missing = np.maximum(self._index.headers[:, USED] + entering - leaving - self._capacities, 0)
            self._room.check_leaving(missing)
            self._frames.check(len(new) + int((promoted.frames < 0).sum()))
        except NoRoomError:
            if self._candidates is not None:
                self._candidates.undo()
            raise
        return _Decision(new, totals, admitted, promoted, expired, missing, window, past)

    def _by_shard(self, shards: np.ndarray) -> np.ndarray:
        return np.bincount(shards, minlength=len(self.shards))

    def _apply(self, batch: Located, counts, frames, given, step: int, decision: _Decision) -> Opened:
        index, unknown, admitted = self._index, decision.new, decision.admitted
        uncount = None
        if self._candidates is not None:
            is_new = decision.window != self._window
            uncount = self._candidates.commit(batch.at(unknown), decision.totals, admitted, is_new)
        decay = self.rules.decay_steps
        at = (index.records, index.records.ctypes.data, self._selection.later, self._kind, decay, step)
        victims.touch(index.headers, *at, frames, batch.shards, counts, given)
        promoted = np.zeros(len(frames), bool)
        promoted[decision.promoted.places] = True
        num_hits = len(frames) - len(unknown) - len(decision.promoted.places)
        evicted, evicted_ids, evicted_facts = self._evict(at, decision)
        self._promote(at, batch, counts, frames, given, decision.promoted)
        frames[unknown] = self._frames.take(len(unknown))
        guest = np.zeros(len(frames), bool)
        guest[unknown[~admitted]] = True
        self._frames.lease(frames[guest])
        self._frames.lease(evicted)
        entering = unknown[admitted]
        new, slots = batch.at(entering), frames[entering]
        index.reserve(new.shards)
        what = new.ids, new.hashes, new.shards, slots, decision.totals[admitted], given[entering]
        victims.enter(index.headers, *at, *what)
        if self.rules.eviction != "ttl" and len(entering):
            victims.begin(index.headers, *at, self._capacities, self._selection.arguments)
        if self.expiry.is_used:
            self.expiry.add(step, decision.past, frames[~guest], index.records)
        self._step, self._window = step, decision.window
        fresh = np.zeros(len(frames), bool)
        fresh[unknown] = True
        left = evicted_ids, evicted, evicted_facts, len(entering), len(evicted)
        return Opened(frames, fresh, guest, promoted, *left, num_hits, len(unknown) - len(entering), uncount)

    def _promote(self, at, batch: Located, counts, frames, given, promoted: Promoted) -> None:
        """Lets ids enter with what was known of them, and counts them then as known ones."""
        places = promoted.places
        if not len(places):
            return
        entering, slots = batch.at(places), self._frames_for(promoted.frames)
        self._index.insert(entering.ids, entering.hashes, entering.shards, slots)
        self._set_facts(slots, promoted.facts)
        victims.touch(self._index.headers, *at, slots, entering.shards, counts[places], given[places])
        frames[places] = slots

    def _evict(self, at, decision: _Decision) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        expired, records = decision.expired, self._index.records
        ids, facts = records[expired, ID], self._facts_at(expired)
        if len(expired):
            old = self._locate(ids)
            self._index.erase(old.ids, old.hashes, old.shards)
        count = int(decision.missing.sum())
        if not count:
            return expired, ids, facts
        chosen, chosen_ids = np.empty((2, count), np.int64)
        of_chosen = np.empty((count, 3), np.int64)
        what = (self._index.seed, decision.missing, *self._selection.arguments)
        victims.evict(self._index.headers, *at, *what, chosen, chosen_ids, of_chosen)
        if not len(expired):
            return chosen, chosen_ids, of_chosen
        return np.concatenate([expired, chosen]), np.concatenate([ids, chosen_ids]), np.concatenate([facts, of_chosen])

    def release(self, frames: np.ndarray) -> None:
        """Frees frames of guests and victims whose leases ended."""
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

    # What several replica groups know, see `rowmesh.dynamic.merging`

    def facts(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The frame of each id, −1 where it is unknown; and `[N, 3]`: last step + 1, count and frequency, or zeros."""
        frames = self.find(ids)
        return frames, np.where(frames[:, None] >= 0, self._facts_at(frames), 0)

    def all_facts(self) -> tuple[np.ndarray, np.ndarray]:
        """The same of all ids that are known here."""
        frames = np.concatenate([self._index.slots_in(local) for local in range(len(self.shards))])
        return frames, self._facts_at(frames)

    def _facts_at(self, frames: np.ndarray) -> np.ndarray:
        records = self._index.records[frames]
        score = np.zeros(len(records), np.int64) if self._kind == victims.RECENCY else records[:, SCORE]
        return np.stack([records[:, SEEN], records[:, COUNT], score], axis=1)

    def check_merged(self, merged: MergedFacts, rows_at: np.ndarray | None) -> None:
        """Raises NoRoomError where `unite` cannot be carried out; changes nothing."""
        batch, frames, stays = self._find_merged(merged)
        self._room.check_leaving(self._surplus(batch, frames, stays))
        needs = frames < 0 if rows_at is None else (frames < 0) & (rows_at < 0)
        self._frames.check(int(needs.sum()))

    def unite(self, merged: MergedFacts, rows_at: np.ndarray | None) -> United:
        """Sets facts of ids, of which unknown ones enter, and leave that are past their time to live.

        Then those of the smallest (score, id) leave full shards. `check_merged` comes before.

        Args:
            merged: the ids.
            rows_at: int64 `[N]`, where ids that leave are demoted: the frames, leased, that ids have which are in no
                index; −1: none. Those that do not enter get frames then too, which are leased.
        """
        batch, frames, stays = self._find_merged(merged)
        index, facts, is_new = self._index, merged.facts, frames < 0
        self.expiry.clock = merged.clock
        self._set_facts(frames[~is_new], facts[~is_new])
        left = np.concatenate([frames[~is_new & ~stays], self._find_surplus(batch, frames, stays, facts)])
        left_facts, leaving = self._facts_at(left), self._locate(index.records[left, ID])
        index.erase(leaving.ids, leaving.hashes, leaving.shards)
        self._frames.lease(left)
        stays &= is_new | ~np.isin(frames, left)
        entered = np.flatnonzero(is_new & stays if rows_at is None else is_new)
        frames[entered] = self._frames_for(np.full(len(entered), -1) if rows_at is None else rows_at[entered])
        entering = np.flatnonzero(is_new & stays)
        new = batch.at(entering)
        index.insert(new.ids, new.hashes, new.shards, frames[entering])
        self._set_facts(frames[entering], facts[entering])
        if rows_at is None:
            frames[~stays] = -1
        else:
            self._frames.lease(frames[is_new & ~stays])
        index.headers[np.unique(batch.shards), NUM_LATER] = -1  # scores have changed
        self.expiry.begin_anew()
        return United(frames, stays, entered, leaving.ids, left, left_facts)

    def _find_merged(self, merged: MergedFacts) -> tuple[Located, np.ndarray, np.ndarray]:
        """Ids, their frames here, and a mask of those that are not demoted, and not past their time to live."""
        batch = self._locate(merged.ids)
        frames = self._index.find(batch.ids, batch.hashes, batch.shards)
        past = self.expiry.past(self._step, NO_TIME, merged.clock)
        return batch, frames, merged.enters & (merged.facts[:, 0] - 1 > past)

    def _frames_for(self, frames: np.ndarray) -> np.ndarray:
        """Frames for ids: those that they still have, leased; −1: free ones."""
        frames = frames.copy()
        self._frames.take_back(frames[frames >= 0])
        frames[frames < 0] = self._frames.take(int((frames < 0).sum()))
        return frames

    def _set_facts(self, frames: np.ndarray, facts: np.ndarray) -> None:
        records = self._index.records
        records[frames, SEEN], records[frames, COUNT] = facts[:, 0], facts[:, 1]
        if self._kind != victims.RECENCY:
            records[frames, SCORE] = facts[:, 2]

    def _surplus(self, batch: Located, frames: np.ndarray, stays: np.ndarray) -> np.ndarray:
        """By how many ids each shard has more than it holds, where merged ones that stay are there; 0: it has room."""
        is_new = frames < 0
        entering, leaving = (self._by_shard(batch.shards[mask]) for mask in (is_new & stays, ~is_new & ~stays))
        return np.maximum(self._index.headers[:, USED] + entering - leaving - self._capacities, 0)

    def _find_surplus(self, batch: Located, frames: np.ndarray, stays: np.ndarray, facts: np.ndarray) -> np.ndarray:
        """Frames of ids that leave full shards; those of the batch that cannot enter do not stay."""
        surplus = self._surplus(batch, frames, stays)
        full = np.flatnonzero(surplus)
        if not len(full):
            return np.empty(0, np.int64)
        held = [self._index.slots_in(shard) for shard in full.tolist()]
        held = [each[~np.isin(each, frames[~stays])] for each in held]
        here = np.concatenate(held)
        waiting = np.flatnonzero((frames < 0) & stays & np.isin(batch.shards, full))
        ids = np.concatenate([self._index.records[here, ID], batch.ids[waiting]])
        shards = np.concatenate([np.repeat(full, [len(each) for each in held]), batch.shards[waiting]])
        of_ids = np.concatenate([self._facts_at(here), facts[waiting]])
        leaving = smallest(ids, of_ids, shards, surplus, self._kind, self.rules.decay_steps, self._step)
        stays[waiting[leaving[leaving >= len(here)] - len(here)]] = False
        return here[leaving[leaving < len(here)]]

    def sightings(self) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
        """Of ids that are not admitted: the window; ids, ascending, and their counts; or the sketches by shard."""
        states = [self.counted_in(shard) for shard in self.shards]
        sketches, ids, counts = zip(*states, strict=True)
        ids = np.concatenate(ids)
        order = np.argsort(ids)
        return self._window, ids[order], np.concatenate(counts)[order], np.stack(sketches)

    def set_sightings(self, ids: np.ndarray, counts: np.ndarray, sketches: np.ndarray) -> None:
        """Replaces these; the window stays."""
        if self._candidates is None:
            return
        batch, none = self._locate(ids), np.empty(0, np.int64)
        for local, sketch in enumerate(sketches):
            mine = np.flatnonzero(batch.shards == local)
            columns = (none, none, none, none, none, sketch, batch.ids[mine], counts[mine])
            self._candidates.load(local, ShardState(*columns, self._step, self._window), batch.at(mine))

    # What is saved

    @property
    def known_frames(self) -> np.ndarray:
        """The frames of all ids that are known, ascending."""
        return self._frames.taken

    def records_of(self, frames: np.ndarray) -> np.ndarray:
        """Copies of what is known of the ids in some frames, for `columns`."""
        return np.take(self._index.records, frames, axis=0)

    def column_of(self, frames: np.ndarray, column: int) -> np.ndarray:
        """One number of each, as `rowmesh.ops.dynamic_index` counts them."""
        return self._index.records[frames, column]

    def columns(self, records: np.ndarray) -> dict[str, np.ndarray]:
        """By their names in `ShardState`."""
        last = records[:, SEEN] - 1
        scores = last.copy() if self._kind == victims.RECENCY else records[:, SCORE].copy()
        return {"ids": records[:, ID].copy(), "counts": records[:, COUNT].copy(), "last_steps": last, "scores": scores}

    def shards_of(self, ids: np.ndarray) -> np.ndarray:
        """The shard of each id, counted from the first one here; reads nothing that steps change."""
        return self._locate(ids).shards

    def counted_in(self, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The sketch of a shard, and its ids that are not admitted yet with their sightings: copies."""
        none = np.zeros(0, np.int64)
        if self._candidates is None:
            return np.zeros((0, self.rules.sketch_width), np.int64), none, none
        return self._candidates.state_of(self._local(shard))

    @property
    def num_known(self) -> np.ndarray:
        """How many ids each shard knows: a copy."""
        return self._index.headers[:, USED].copy()

    @property
    def clock(self) -> tuple[int, int]:
        """The last step that was opened, and its window of counting."""
        return self._step, self._window

    def state_of(self, shard: int) -> ShardState:
        """All of one shard, as arrays of its own."""
        frames = self._index.slots_in(self._local(shard))
        frames = frames[np.argsort(self._index.records[frames, ID])]
        sketch, ids, counts = self.counted_in(shard)
        return ShardState(
            **self.columns(self.records_of(frames)),
            frames=frames,
            sketch=sketch,
            candidate_ids=ids,
            candidate_counts=counts,
            step=self._step,
            window=self._window,
            last_times=self.expiry.clock.times_of(self._index.records[frames, SEEN] - 1),
            now=self.expiry.clock.now,
        )

    def load(self, shard: int, state: ShardState, frames: np.ndarray) -> None:
        """Replaces one shard by a state, whose ids get the given free frames."""
        local = self._local(shard)
        known, candidates = self._locate(state.ids), self._locate(state.candidate_ids)
        if len(state.ids) > self._capacities[local] or len(frames) != len(state.ids):
            raise DataError(
                f"shard {shard} of dynamic table {self.table!r} holds {self._capacities[local]} ids, and the state "
                f"has {len(state.ids)}, for {len(frames)} frames"
            )
        if (known.shards != local).any() or (candidates.shards != local).any():
            raise DataError(f"the state of shard {shard} of dynamic table {self.table!r} has ids of another shard")
        self._frames.exchange(self._index.slots_in(local), frames)
        self._index.clear(local)
        self._index.insert(known.ids, known.hashes, known.shards, frames)
        records = self._index.records
        records[frames, SEEN], records[frames, COUNT] = state.last_steps + 1, state.counts
        if self._kind != victims.RECENCY:
            records[frames, SCORE] = state.scores
        if self._candidates is not None:
            self._candidates.load(local, state, candidates)
        self._index.headers[:, NUM_LATER] = -1  # steps may begin anew, and frames have changed their shards
        self._step, self._window = state.step, state.window
        self.expiry.begin_anew()
        self.expiry.clock.load(state.last_steps[: len(state.last_times)], state.last_times, state.step, state.now)

    def _local(self, shard: int) -> int:
        if shard not in self.shards:
            raise DataError(f"shard {shard} of dynamic table {self.table!r} is not here; here are {self.shards}")
        return shard - self.shards.start
