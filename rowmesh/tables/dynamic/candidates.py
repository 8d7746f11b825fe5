"""Sightings of ids that are not admitted yet: exact, or in a sketch.

`judge` says what the counts will be; then either `commit` or `undo` follows, so that a step that is refused changes
nothing. What `commit` returns takes the last step back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from rowmesh.ops.dynamic_index import Index, sketch
from rowmesh.ops.dynamic_index.cpu import COUNT, ID, SEEN
from rowmesh.tables.dynamic.hashing import sketch_columns
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.dynamic.state import MAX, ShardState

_UNBOUNDED = 1 << 40
_COLUMNS = 3


@dataclass(frozen=True)
class Located:
    """Ids with their hashes and local shards, each `[N]`."""

    ids: np.ndarray
    hashes: np.ndarray
    shards: np.ndarray

    def at(self, chosen: np.ndarray) -> Located:
        """Some of them."""
        return Located(self.ids[chosen], self.hashes[chosen], self.shards[chosen])


class Candidates(Protocol):
    """A counter of unknown ids."""

    def judge(self, unknown: Located, counts: np.ndarray, renew: bool) -> np.ndarray: ...

    def commit(self, unknown: Located, totals: np.ndarray, admitted: np.ndarray, renew: bool) -> Callable[[], None]: ...

    def undo(self) -> None: ...

    def state_of(self, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...

    def load(self, shard: int, state: ShardState, located: Located) -> None: ...


class ExactCandidates:
    """A count for each id; it holds every id of a window."""

    def __init__(self, num_shards: int, seed: int, all_shards: int, first_shard: int) -> None:
        self._shape = (num_shards, seed, all_shards, first_shard)
        self._clear()

    def _clear(self) -> None:
        num_shards, seed, all_shards, first_shard = self._shape
        capacities = np.full(num_shards, _UNBOUNDED)
        self._index = Index(capacities, seed, all_shards, first_shard, 16, _COLUMNS)
        self._free = np.arange(16)

    def judge(self, unknown: Located, counts: np.ndarray, renew: bool) -> np.ndarray:
        if renew:
            return counts
        slots = self._index.find(unknown.ids, unknown.hashes, unknown.shards)
        past = np.where(slots >= 0, self._index.records[slots, COUNT], 0)
        return np.where(past > MAX - counts, MAX, past + counts)

    def commit(self, unknown: Located, totals: np.ndarray, admitted: np.ndarray, renew: bool) -> Callable[[], None]:
        before = self._index, self._free
        if renew:
            self._clear()
        ids, hashes, shards = unknown.ids, unknown.hashes, unknown.shards
        slots = self._index.find(ids, hashes, shards)
        past = np.where(slots >= 0, self._index.records[slots, COUNT], 0)
        gone = admitted & (slots >= 0)
        freed = self._index.erase(ids[gone], hashes[gone], shards[gone])
        self._free = np.concatenate([self._free, freed])
        kept = ~admitted & (slots >= 0)
        self._index.records[slots[kept], COUNT] = totals[kept]
        new = ~admitted & (slots < 0)
        self._add(ids[new], hashes[new], shards[new], totals[new])
        return partial(self._put_back, *before) if renew else partial(self._uncount, unknown, past)

    def _put_back(self, index: Index, free: np.ndarray) -> None:
        self._index, self._free = index, free

    def _uncount(self, unknown: Located, past: np.ndarray) -> None:
        """Gives ids the counts that they had; 0: none."""
        ids, hashes, shards = unknown.ids, unknown.hashes, unknown.shards
        is_here = self._index.find(ids, hashes, shards) >= 0
        freed = self._index.erase(ids[is_here], hashes[is_here], shards[is_here])
        self._free = np.concatenate([self._free, freed])
        had = past > 0
        self._add(ids[had], hashes[had], shards[had], past[had])

    def _add(self, ids: np.ndarray, hashes: np.ndarray, shards: np.ndarray, counts: np.ndarray) -> None:
        held = len(self._index.records)
        if len(ids) > len(self._free):
            more = max(held, len(ids))
            self._index.set_num_slots(held + more)
            self._free = np.concatenate([self._free, np.arange(held, held + more)])
        slots, self._free = self._free[: len(ids)], self._free[len(ids) :]
        self._index.insert(ids, hashes, shards, slots)
        self._index.records[slots, SEEN] = 1
        self._index.records[slots, COUNT] = counts

    def undo(self) -> None:
        """Nothing: `judge` changes nothing."""

    def state_of(self, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        records = self._index.records[self._index.slots_in(shard)]
        records = records[np.argsort(records[:, ID])]
        return np.zeros((0, 0), np.int64), records[:, ID].copy(), records[:, COUNT].copy()

    def load(self, shard: int, state: ShardState, located: Located) -> None:
        self._free = np.concatenate([self._free, self._index.slots_in(shard)])
        self._index.clear(shard)
        self._add(located.ids, located.hashes, located.shards, state.candidate_counts)


class SketchCandidates:
    """A count-min sketch by shard: bounded, and never too low."""

    def __init__(self, num_shards: int, rules: Dynamic) -> None:
        self._depth, self._width = rules.sketch_depth, rules.sketch_width
        self._sketch = np.zeros((num_shards, self._depth, self._width), np.int64)
        self._old = self._sketch
        self._last: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None

    def judge(self, unknown: Located, counts: np.ndarray, renew: bool) -> np.ndarray:
        self._old = self._sketch
        if renew:
            self._sketch = np.zeros_like(self._sketch)
        columns = sketch_columns(unknown.hashes, self._depth, self._width)
        before, totals = np.empty_like(columns), np.empty(len(counts), np.int64)
        sketch.add(self._sketch, unknown.shards, columns, counts, before, totals)
        self._last = unknown.shards, columns, before
        return totals

    def commit(self, unknown: Located, totals: np.ndarray, admitted: np.ndarray, renew: bool) -> Callable[[], None]:
        assert self._last is not None
        back = partial(self._put_back, self._old) if renew else partial(self._restore, *self._last)
        self._old = self._sketch
        return back

    def _put_back(self, before: np.ndarray) -> None:
        self._sketch = self._old = before

    def _restore(self, shards: np.ndarray, columns: np.ndarray, before: np.ndarray) -> None:
        sketch.restore(self._sketch, shards, columns, before)

    def undo(self) -> None:
        if self._last is not None and self._old is self._sketch:
            sketch.restore(self._sketch, *self._last)
        self._sketch, self._last = self._old, None

    def state_of(self, shard: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self._sketch[shard].copy(), np.zeros(0, np.int64), np.zeros(0, np.int64)

    def load(self, shard: int, state: ShardState, located: Located) -> None:
        self._sketch[shard] = state.sketch
