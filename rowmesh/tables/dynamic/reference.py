"""Dynamic shards in plain Python, with dictionaries: the rules as written, and what the fast ones are compared with.

Each step, of the batch's distinct ids with their counts, shard by shard:

1. Count. A known id's count grows. Another id becomes a candidate, whose count grows, or is added to the sketch; all of
   a batch's ids are added before any is judged. Both begin anew with each window of `window_steps` steps.
2. Admit. A candidate of `admit_after` sightings or more is admitted, with that count. A sketch is judged by the
   smallest of the id's counters; it keeps an admitted id's sightings until the window ends. A demoted id is no
   candidate: it comes back with what was known of it, and is counted as a known one.
3. Update scores. Last step seen; frequency: halved for every multiple of `decay_steps` since the last sighting, by an
   exact shift, and then more by the count in units of 2^−16; the caller's score. Sums stop at 2^63 − 1.
4. Evict. Ids that were not seen for `ttl_steps` steps leave, and those that were not for `ttl_seconds`: a step is at
   the time of the latest event up to it. Then, where room is missing, those of the smallest score, and the smallest id
   among equals. An id of this batch never leaves.
5. Insert what was admitted, in ascending order of ids.
6. Demote, where the mode says so: what left goes to the slower tier as it is, in ascending order of ids; what came back
   has left that. Where a shard has more than its part of `store_capacity` there, those that came first are forgotten.

A step that cannot be taken raises, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rowmesh.errors import NoRoomError
from rowmesh.tables.dynamic.event_clock import NO_TIME
from rowmesh.tables.dynamic.hashing import hash_of, shard_of, sketch_columns
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.dynamic.state import FRACTION_BITS, MAX, OpenedIds, ShardState, Statistics, check_batch, check_step

INFINITE = float("inf")


@dataclass
class _Entry:
    frame: int
    count: int
    last: int
    score: int
    time: int = NO_TIME


@dataclass
class _Shard:
    entries: dict[int, _Entry] = field(default_factory=dict)
    candidates: dict[int, int] = field(default_factory=dict)
    sketch: dict[tuple[int, int], int] = field(default_factory=dict)
    demoted: dict[int, _Entry] = field(default_factory=dict)  # those that came first are first


class ReferenceShards:
    """What `DynamicShards` is, one id at a time. It keeps what is known of demoted ids by itself.

    Attributes:
        num_forgotten: ids that the slower tier had no room for.
    """

    def __init__(self, table: str, rules: Dynamic, shards: range, num_frames: int) -> None:
        self.table, self.rules, self.shards = table, rules, shards
        self._shards = {shard: _Shard() for shard in shards}
        self._free = set(range(num_frames))
        self._step, self._window, self._now = -1, 0, NO_TIME
        self.num_forgotten = 0

    def open(
        self, ids: np.ndarray, counts: np.ndarray, step: int, scores: np.ndarray | None = None, time: int = NO_TIME
    ) -> OpenedIds:
        check_batch(self.table, ids, counts, scores, self.rules.eviction == "score")
        check_step(self.table, step, self._step)
        batch = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        given = dict(zip(ids.tolist(), [0] * len(ids) if scores is None else scores.tolist(), strict=True))
        home = dict(zip(ids.tolist(), shard_of(self.table, ids, self.rules.num_shards).tolist(), strict=True))
        known = {i for i in batch if i in self._shards[home[i]].entries}
        back = {i for i in batch if i in self._shards[home[i]].demoted}
        window = step // self.rules.window_steps if self.rules.window_steps else 0
        unknown = {i: c for i, c in batch.items() if i not in known | back}
        candidates, sketches = self._count_unknown(unknown, home, window)
        admitted = [i for i in candidates if candidates[i] >= self.rules.admit_after]
        now = max(time, self._now)
        leaving = self._choose_victims(batch, home, known | back, admitted, given, step, now)
        if len(batch) - len(known) > len(self._free):
            raise NoRoomError(f"table {self.table!r}: pins hold the frames")
        self._now = now
        return self._apply(batch, home, known, back, candidates, sketches, admitted, leaving, given, step, window)

    def _count_unknown(self, unknown, home, window):
        """The count of every unknown id after this step, and the sketches then."""
        old = {shard: state.sketch if window == self._window else {} for shard, state in self._shards.items()}
        sketches = {shard: dict(sketch) for shard, sketch in old.items()}
        if not self.rules.sketch_width:
            past = {i: self._shards[home[i]].candidates.get(i, 0) if window == self._window else 0 for i in unknown}
            return {i: min(MAX, past[i] + c) for i, c in unknown.items()}, sketches
        cells = {i: self._cells(i) for i in unknown}
        for i, c in unknown.items():
            for cell in cells[i]:
                sketches[home[i]][cell] = min(MAX, sketches[home[i]].get(cell, 0) + c)
        return {i: min(sketches[home[i]][cell] for cell in cells[i]) for i in unknown}, sketches

    def _cells(self, i):
        hashes = hash_of(self.table, np.array([i]))
        return list(enumerate(sketch_columns(hashes, self.rules.sketch_depth, self.rules.sketch_width)[0].tolist()))

    def _choose_victims(self, batch, home, known, admitted, given, step, now):
        leaving = []
        for shard, state in self._shards.items():
            others = [i for i in state.entries if i not in batch]
            expired = [i for i in others if self._has_expired(state.entries[i], step, now)]
            wanted = sum(home[i] == shard for i in known) + sum(home[i] == shard for i in admitted)
            room = self.rules.shard_capacity(shard)
            if wanted > room:
                raise NoRoomError(f"table {self.table!r}, shard {shard}: {wanted} ids do not fit into {room}")
            others = sorted(set(others) - set(expired), key=lambda i: (*self._score(state.entries[i], step), i))
            missing = max(0, wanted + len(others) - room)
            if missing and self.rules.eviction == "ttl":
                raise NoRoomError(f"table {self.table!r}, shard {shard}: no id is past its time to live")
            leaving += [(shard, i) for i in expired + others[:missing]]
        return leaving

    def _has_expired(self, entry, step, now):
        by_steps = self.rules.ttl_steps and step - entry.last >= self.rules.ttl_steps
        return by_steps or (self.rules.ttl_seconds and now - entry.time >= self.rules.ttl_seconds)

    def _score(self, entry, step):
        if self.rules.eviction in ("lru", "ttl"):
            return (entry.last,)
        frequency = entry.score >> self._halvings(entry.last, step)
        return (frequency, entry.last) if self.rules.eviction == "lru_lfu" else (frequency,)

    def _halvings(self, last, step):
        return step // self.rules.decay_steps - last // self.rules.decay_steps if self.rules.decay_steps else 0

    def _apply(self, batch, home, known, back, candidates, sketches, admitted, leaving, given, step, window):
        for i in sorted(back):
            entry = self._shards[home[i]].entries[i] = self._shards[home[i]].demoted.pop(i)
            entry.frame = min(self._free)
            self._free.remove(entry.frame)
        for i in known | back:
            entry = self._shards[home[i]].entries[i]
            entry.score = self._new_score(entry.score >> self._halvings(entry.last, step), batch[i], given[i], step)
            entry.count, entry.last, entry.time = min(MAX, entry.count + batch[i]), step, self._now
        evicted = [(i, self._leave(shard, i)) for shard, i in sorted(leaving, key=lambda pair: pair[1])]
        for shard, state in self._shards.items():
            state.sketch = sketches[shard]
            if window != self._window:
                state.candidates = {}
        for i, count in candidates.items():
            state = self._shards[home[i]]
            state.candidates.pop(i, None)
            if i not in admitted and not self.rules.sketch_width:
                state.candidates[i] = count
        frames = {i: self._shards[home[i]].entries[i].frame for i in known | back}
        for i in sorted(candidates):
            frames[i] = min(self._free)
            self._free.remove(frames[i])
            if i in admitted:
                score = self._new_score(0, candidates[i], given[i], step)
                self._shards[home[i]].entries[i] = _Entry(frames[i], candidates[i], step, score, self._now)
        self._step, self._window = step, window
        return OpenedIds(
            frames=np.array([frames[i] for i in batch], np.int64),
            fresh=np.array([i in candidates for i in batch], bool),
            guest=np.array([i in candidates and i not in admitted for i in batch], bool),
            promoted=np.array([i in back for i in batch], bool),
            evicted_ids=np.array([i for i, _ in evicted], np.int64),
            evicted_frames=np.array([e.frame for _, e in evicted], np.int64),
            evicted_facts=np.array([self._facts_of(e) for _, e in evicted], np.int64).reshape(-1, 3),
            num_admitted=len(admitted),
            num_evicted=len(evicted),
            num_hits=len(known),
            num_dropped=len(candidates) - len(admitted),
        )

    def _leave(self, shard, i):
        state = self._shards[shard]
        entry = state.entries.pop(i)
        if self.rules.mode == "demote":
            state.demoted[i] = entry
            while len(state.demoted) > (self.rules.stored_in(shard) or INFINITE):
                state.demoted.pop(next(iter(state.demoted)))
                self.num_forgotten += 1
        return entry

    def _facts_of(self, entry):
        return entry.last + 1, entry.count, 0 if self.rules.eviction in ("lru", "ttl") else entry.score

    def _new_score(self, old, count, given, step):
        if self.rules.eviction in ("lru", "ttl"):
            return step
        return given if self.rules.eviction == "score" else min(MAX, old + (count << FRACTION_BITS))

    def release(self, frames: np.ndarray) -> None:
        self._free |= set(frames.tolist())

    def find(self, ids: np.ndarray) -> np.ndarray:
        return np.array([-1 if e is None else e.frame for e in self._entries(ids)], np.int64)

    def statistics(self, ids: np.ndarray) -> Statistics:
        step = max(self._step, 0)
        rows = [
            (False, 0, 0, 0) if e is None else (True, e.count, e.last, self._score(e, step)[0])
            for e in self._entries(ids, demoted=True)
        ]
        known, *numbers = zip(*rows, strict=True) if rows else ((), (), (), ())
        return Statistics(np.array(known, bool), *(np.array(n, np.int64) for n in numbers))

    def _entries(self, ids, *, demoted=False):
        home = shard_of(self.table, ids, self.rules.num_shards).tolist()
        found = [(self._shards[s], i) for s, i in zip(home, ids.tolist(), strict=True)]
        return [state.entries.get(i) or (state.demoted.get(i) if demoted else None) for state, i in found]

    def state_of(self, shard: int) -> ShardState:
        state = self._shards[shard]
        entries = sorted(state.entries.items())
        sketch = np.zeros(
            (self.rules.sketch_depth if self.rules.sketch_width else 0, self.rules.sketch_width), np.int64
        )
        for cell, count in state.sketch.items():
            sketch[cell] = count
        candidates = sorted(state.candidates.items())
        return ShardState(
            ids=np.array([i for i, _ in entries], np.int64),
            frames=np.array([e.frame for _, e in entries], np.int64),
            counts=np.array([e.count for _, e in entries], np.int64),
            last_steps=np.array([e.last for _, e in entries], np.int64),
            scores=np.array([e.score for _, e in entries], np.int64),
            sketch=sketch,
            candidate_ids=np.array([i for i, _ in candidates], np.int64),
            candidate_counts=np.array([c for _, c in candidates], np.int64),
            step=self._step,
            window=self._window,
            last_times=np.array([e.time for _, e in entries if self.rules.ttl_seconds], np.int64),
            now=self._now,
        )

    def load(self, shard: int, state: ShardState, frames: np.ndarray) -> None:
        self._free |= {e.frame for e in self._shards[shard].entries.values()}
        self._free -= set(frames.tolist())
        times = state.last_times if self.rules.ttl_seconds else np.full(len(frames), NO_TIME)
        columns = (state.ids, frames, state.counts, state.last_steps, state.scores, times)
        entries = {i: _Entry(*rest) for i, *rest in zip(*(c.tolist() for c in columns), strict=True)}
        sketch = {(int(r), int(c)): int(state.sketch[r, c]) for r, c in zip(*state.sketch.nonzero(), strict=True)}
        candidates = dict(zip(state.candidate_ids.tolist(), state.candidate_counts.tolist(), strict=True))
        self._shards[shard] = _Shard(entries, candidates, sketch)
        self._step, self._window, self._now = state.step, state.window, state.now
