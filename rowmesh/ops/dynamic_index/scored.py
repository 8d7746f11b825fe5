"""ScoredIndex: an index on a host whose ids have counts and scores, and which gives away those of the smallest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rowmesh.ops.dynamic_index import Index, victims
from rowmesh.ops.dynamic_index.cpu import COUNT, ID, NUM_LATER, SCORE, SEEN, USED
from rowmesh.ops.dynamic_requests import cpu as requests


class IndexShape(NamedTuple):
    """The index of some shards of a table, on a host or a device.

    Attributes:
        capacities, seed, num_shards, first_shard, num_slots: see `Index`.
        kind: of the scores, one of those in `victims`.
        decay_steps: in which a frequency halves; 0: never.
    """

    capacities: np.ndarray
    seed: int
    num_shards: int
    first_shard: int
    num_slots: int
    kind: int
    decay_steps: int


class ScoredIndex(Index):
    """An `Index`, and what `victims` does with its records.

    Args:
        shape: of the table.
        initial: see `Index`.
    """

    def __init__(self, shape: IndexShape, initial: int) -> None:
        self.kind, self.decay_steps = shape.kind, shape.decay_steps
        where = (shape.capacities, shape.seed, shape.num_shards, shape.first_shard, shape.num_slots)
        super().__init__(*where, 3 if self.kind == victims.RECENCY else 4, initial)
        largest = int(shape.capacities.max(initial=0))
        self.selection = victims.Selection(len(shape.capacities), largest, self.kind)

    @property
    def described(self) -> np.ndarray:
        """What `rowmesh.ops.dynamic_requests.open_known` must know, but for the row of the first slot."""
        later, described = self.selection.later, np.zeros(requests.OWNER_COLUMNS, np.int64)
        described[requests.SEED] = self.seed.view(np.int64)
        described[requests.NUM_SHARDS] = self._num_shards
        described[requests.FIRST_SHARD], described[requests.NUM_HERE] = self._first_shard, len(self.capacities)
        described[requests.HEADERS], described[requests.RECORDS] = self.headers.ctypes.data, self.records.ctypes.data
        described[requests.NUM_SLOTS], described[requests.RECORD_COLUMNS] = self.records.shape
        described[requests.LATER], described[requests.MOST_LATER] = later.ctypes.data, later.shape[1]
        described[requests.KIND], described[requests.DECAY_STEPS] = self.kind, self.decay_steps
        return described

    @property
    def used(self) -> np.ndarray:
        """How many ids each shard has: a view."""
        return self.headers[:, USED]

    def _at(self, step: int) -> tuple:
        return self.records, self.records.ctypes.data, self.selection.later, self.kind, self.decay_steps, step

    def touch(self, slots: np.ndarray, shards: np.ndarray, counts: np.ndarray, given: np.ndarray, step: int) -> None:
        """Counts known ids in a step; those of a slot below zero are passed over."""
        victims.touch(self.headers, *self._at(step), slots, shards, counts, given)

    def evict(self, missing: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Removes so many ids of each shard, those of the smallest scores which the step has not seen.

        Args:
            missing: int64 by shard.
            step: of the last `touch`.

        Returns:
            Their slots, ids, and facts.
        """
        count = int(missing.sum())
        slots, ids = np.empty((2, count), np.int64)
        facts = np.empty((count, 3), np.int64)
        if count:
            what = (self.seed, missing, *self.selection.arguments)
            victims.evict(self.headers, *self._at(step), *what, slots, ids, facts)
        return slots, ids, facts

    def enter(
        self,
        ids: np.ndarray,
        hashes: np.ndarray,
        shards: np.ndarray,
        slots: np.ndarray,
        counts: np.ndarray,
        given: np.ndarray,
        step: int,
    ) -> None:
        """Adds ids that are not there, with their first counts and scores."""
        self.reserve(shards)
        victims.enter(self.headers, *self._at(step), ids, hashes, shards, slots, counts, given)

    def look_ahead(self, step: int) -> None:
        """Orders ids of some shards that will be full soon, so that not all do when they are full."""
        victims.begin(self.headers, *self._at(step), self.capacities, self.selection.arguments)

    def read(self, slots: np.ndarray) -> np.ndarray:
        """Copies of records."""
        return np.take(self.records, slots, axis=0)

    def facts(self, slots: np.ndarray) -> np.ndarray:
        """Last steps + 1, counts, and scores where they are none of these, else zeros: int64 `[n, 3]`."""
        records = self.records[slots]
        score = np.zeros(len(records), np.int64) if self.kind == victims.RECENCY else records[:, SCORE]
        return np.stack([records[:, SEEN], records[:, COUNT], score], axis=1)

    def set_facts(self, slots: np.ndarray, facts: np.ndarray) -> None:
        """Replaces these."""
        self.records[slots, SEEN], self.records[slots, COUNT] = facts[:, 0], facts[:, 1]
        if self.kind != victims.RECENCY:
            self.records[slots, SCORE] = facts[:, 2]

    def ids_of(self, slots: np.ndarray) -> np.ndarray:
        """The ids in slots."""
        return self.records[slots, ID]

    def forget_order(self, shards: np.ndarray | slice = slice(None)) -> None:
        """Facts of ids of some shards were set: what is known of the smallest scores is not true any more."""
        self.headers[shards, NUM_LATER] = -1
