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
from rowmesh.dynamic.state import Opened, Promoted, ShardState, Statistics, United, check_batch, check_step
from rowmesh.dynamic.surplus import find_surplus
from rowmesh.errors import ConfigurationError, DataError, NoRoomError
from rowmesh.ops.dynamic_index import victims
from rowmesh.ops.dynamic_index.cpu import COUNT, ID, SCORE, SEEN
from rowmesh.ops.dynamic_index.device import DeviceIndex, LookedUp
from rowmesh.ops.dynamic_index.scored import IndexShape, ScoredIndex
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
class _Unknown:
    """Those ids of a step that are unknown, and not promoted."""

    located: Located
    counts: np.ndarray
    given: np.ndarray


@dataclass(frozen=True)
class _Decision:
    """What a step will change."""

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
        num_frames: frames that ids, guests and leases share; more than the capacity of the shards.
        index: on a device, of the shape that `shape_of` gives; None: in the host's memory.

    Attributes:
        expiry: what is known of the time to live.

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
        shape = shape_of(table, rules, shards, num_frames)
        self._kind, self._capacities = shape.kind, shape.capacities
        self._index: ScoredIndex | DeviceIndex
        if index is None:
            initial = -(-(rules.initial_capacity or 1) // rules.num_shards)
            self._index = ScoredIndex(shape, initial)
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
        batch, given = self._locate(ids), counts if scores is None else scores
        frames, past = self._index.find(batch.ids, batch.hashes, batch.shards), self.expiry.past(step, time)
        is_new = frames < 0
        is_new[promoted.places] = False
        new = np.flatnonzero(is_new)
        unknown = _Unknown(batch.at(new), counts[new], given[new])
        touched = self._by_shard(batch.shards[frames >= 0])
        expired = self.expiry.due(past, self.host_index.records, frames) if self.expiry.is_used else _NONE
        back = batch.shards[promoted.places]
        decision = self._decide(unknown, touched, step, expired, back, int((promoted.frames < 0).sum()))
        self.expiry.clock.advance(step, time)
        self._commit(unknown, decision)
        self._index.touch(frames, batch.shards, counts, given, step)
        evicted = self._evict(decision, step)
        self._promote(batch, counts, frames, given, promoted, step)
        frames[new] = self._enter(unknown, decision, evicted[0], step)
        fresh, guest, came_back = np.zeros((3, len(frames)), bool)
        fresh[new], guest[new[~decision.admitted]], came_back[promoted.places] = True, True, True
        if self.expiry.is_used:
            self.expiry.add(step, past, frames[~guest], self.host_index.records)
        return Opened.of(frames, fresh, guest, came_back, evicted)

    def open_found(self, found: LookedUp, step: int) -> tuple[np.ndarray, np.ndarray, Opened]:
        """Takes a step's decisions where the index is on a device, which has found the ids.

        Afterwards `found` has the frames of all ids.

        Returns:
            The unknown ids, ascending, and their counts; and what became of these.

        Raises:
            DataError, NoRoomError: see `open`.
        """
        index = self.device_index
        assert index is not None
        check_step(self.table, step, self._step)
        seen = index.seen(found)
        unknown = _Unknown(self._locate(seen.ids), seen.counts, seen.counts)
        decision = self._decide(unknown, seen.touched, step)
        self._commit(unknown, decision)
        index.touch_found(found, step)
        evicted = self._evict(decision, step)
        frames = self._enter(unknown, decision, evicted[0], step)
        index.put(found, seen.places, frames)
        fresh = np.ones(len(frames), bool)
        opened = Opened.of(frames, fresh, ~decision.admitted, ~fresh, evicted)
        return seen.ids, seen.counts, replace(opened, num_hits=int(seen.touched.sum()))

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
        expired: np.ndarray = _NONE,
        back: np.ndarray = _NONE,
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
            self._check_fits(touched + entering)
            leaving = 0
            if len(expired):
                leaving = self._by_shard(self._locate(self._index.ids_of(expired)).shards)
            missing = np.maximum(self._index.used + entering - leaving - self._capacities, 0)
            self._check_expired(missing)
            self._frames.check(len(totals) + num_more)
        except NoRoomError:
            if self._candidates is not None:
                self._candidates.undo()
            raise
        return _Decision(totals, admitted, expired, missing, window)

    def _by_shard(self, shards: np.ndarray) -> np.ndarray:
        return np.bincount(shards, minlength=len(self.shards))

    def _check_fits(self, wanted: np.ndarray) -> None:
        over = np.flatnonzero(wanted > self._capacities)
        if len(over):
            shard = int(over[np.argmax(wanted[over])])
            raise NoRoomError(
                f"a batch has {wanted[shard]} distinct ids of shard {shard + self.shards.start} of dynamic table "
                f"{self.table!r}, which holds {self._capacities[shard]}; raise capacity from {self.rules.capacity} to "
                f"{int(wanted[shard]) * self.rules.num_shards} or more, or take smaller batches"
            )

    def _check_expired(self, missing: np.ndarray) -> None:
        if self.rules.eviction == "ttl" and missing.any():
            shard = int(missing.argmax())
            wanted = int(self._capacities[shard] + missing[shard])
            raise NoRoomError(
                f"shard {shard + self.shards.start} of dynamic table {self.table!r} is full, and too few ids are past "
                f"their time to live, {self.expiry.time_to_live}; raise capacity from {self.rules.capacity} to "
                f"{wanted * self.rules.num_shards} or more, or shorten it"
            )

    def _commit(self, unknown: _Unknown, decision: _Decision) -> None:
        if self._candidates is not None:
            is_renewed = decision.window != self._window
            self._candidates.commit(unknown.located, decision.totals, decision.admitted, is_renewed)

    def _enter(self, unknown: _Unknown, decision: _Decision, evicted: np.ndarray, step: int) -> np.ndarray:
        """Gives unknown ids frames, and lets those enter that were admitted; the last that a step does."""
        admitted = decision.admitted
        frames = self._frames.take(len(admitted))
        self._frames.lease(frames[~admitted])
        self._frames.lease(evicted)
        new = unknown.located.at(admitted)
        what = decision.totals[admitted], unknown.given[admitted]
        self._index.enter(new.ids, new.hashes, new.shards, frames[admitted], *what, step)
        if self.rules.eviction != "ttl" and len(new.ids):
            self._index.look_ahead(step)
        self._step, self._window = step, decision.window
        return frames

    def _promote(self, batch: Located, counts, frames, given, promoted: Promoted, step: int) -> None:
        """Lets ids enter with what was known of them, and counts them then as known ones."""
        places, slots = promoted.places, promoted.frames.copy()
        if not len(places):
            return
        self._frames.take_back(slots[slots >= 0])
        slots[slots < 0] = self._frames.take(int((slots < 0).sum()))
        entering = batch.at(places)
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
        return frames, np.where(frames[:, None] >= 0, self._index.facts(frames), 0)

    def all_facts(self) -> tuple[np.ndarray, np.ndarray]:
        """The same of all ids that are known here."""
        frames = np.concatenate([self._index.slots_in(local) for local in range(len(self.shards))])
        return frames, self._index.facts(frames)

    def unite(self, ids: np.ndarray, facts: np.ndarray) -> United:
        """Sets facts of ids, of which unknown ones enter. Then those of the smallest (score, id) leave full shards.

        Args:
            ids: int64 `[N]`, distinct.
            facts: int64 `[N, 3]`, as `facts` has them.

        Raises:
            NoRoomError: leases hold the frames; nothing has changed then.
        """
        batch, index = self._locate(ids), self.host_index
        frames = index.find(batch.ids, batch.hashes, batch.shards)
        is_new = frames < 0
        self._frames.check(int(is_new.sum()))
        index.set_facts(frames[~is_new], facts[~is_new])
        left_frames, is_late = find_surplus(index, self._capacities, batch, is_new, facts, self._step)
        left = self._locate(index.ids_of(left_frames))
        index.erase(left.ids, left.hashes, left.shards)
        self._frames.lease(left_frames)
        entering = np.flatnonzero(is_new & ~is_late)
        new, slots = batch.at(entering), self._frames.take(len(entering))
        index.insert(new.ids, new.hashes, new.shards, slots)
        index.set_facts(slots, facts[entering])
        frames[entering] = slots
        frames[np.isin(frames, left_frames)] = -1
        index.forget_order(np.unique(batch.shards))
        self.expiry.begin_anew()
        return United(frames, entering, left.ids, left_frames)

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
        return self._index.read(frames)

    def column_of(self, frames: np.ndarray, column: int) -> np.ndarray:
        """One number of each, as `rowmesh.ops.dynamic_index` counts them."""
        return self._index.read(frames)[:, column]

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
