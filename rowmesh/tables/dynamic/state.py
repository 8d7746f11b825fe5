"""Plain arrays that dynamic shards answer and store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rowmesh.errors import DataError
from rowmesh.tables.dynamic.event_clock import NO_TIME, Advanced, EventClock

MAX = 2**63 - 1  # counts and frequencies stay there
FRACTION_BITS = 16  # of a frequency: a sighting adds 1 << 16
NONE, NO_FACTS = np.empty(0, np.int64), np.empty((0, 3), np.int64)  # of no ids


@dataclass(frozen=True, eq=False)
class Before:
    """The former state of what a step changed in some shards.

    Attributes:
        step, window: of the step before.
        frames: int64 `[n]`, of ids that were known.
        facts: int64 `[n, 3]`: their last steps + 1, counts and frequencies.
        entered_ids: int64 `[m]`, that were not.
        left_ids, left_frames: int64 `[E]`, that were known, and left.
        left_facts: int64 `[E, 3]`.
        uncount: takes back the sightings of ids that are not admitted.
        advanced: what became of the clock; None: nothing.
    """

    step: int
    window: int
    frames: np.ndarray
    facts: np.ndarray
    entered_ids: np.ndarray = field(default_factory=lambda: NONE)
    left_ids: np.ndarray = field(default_factory=lambda: NONE)
    left_frames: np.ndarray = field(default_factory=lambda: NONE)
    left_facts: np.ndarray = field(default_factory=lambda: NO_FACTS)
    uncount: Callable[[], None] | None = None
    advanced: Advanced | None = None


@dataclass(frozen=True)
class OpenedIds:
    """The result of opening a step's ids. Numbers are of distinct ids, not of occurrences.

    Attributes:
        frames: int64 `[N]`, where the row of each id is.
        fresh: bool `[N]`; the frame must be initialized before it is read.
        guest: bool `[N]`; not admitted: its frame is for this batch alone, and its gradient is dropped.
        promoted: bool `[N]`; it was demoted, and came back into the index.
        evicted_ids: int64 `[E]`, in no particular order; they have left the index.
        evicted_frames: int64 `[E]`; free only after `release`.
        evicted_facts: int64 `[E, 3]`: their last steps + 1, counts and frequencies.
        num_admitted: ids that entered the index.
        num_evicted: ids that left it.
        num_hits: ids that it knew before.
        num_dropped: guests.
        before: what can be undone, where that is kept.
    """

    frames: np.ndarray
    fresh: np.ndarray
    guest: np.ndarray
    promoted: np.ndarray
    evicted_ids: np.ndarray
    evicted_frames: np.ndarray
    evicted_facts: np.ndarray
    num_admitted: int
    num_evicted: int
    num_hits: int
    num_dropped: int
    before: Before | None = None

    @classmethod
    def of(
        cls,
        frames: np.ndarray,
        fresh: np.ndarray,
        guest: np.ndarray,
        promoted: np.ndarray,
        evicted: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> OpenedIds:
        """With the numbers that follow; `evicted` are frames, ids and facts."""
        left, left_ids, facts = evicted
        num_new, num_guests = int(fresh.sum()), int(guest.sum())
        num_hits = len(frames) - num_new - int(promoted.sum())
        numbers = (num_new - num_guests, len(left), num_hits, num_guests)
        return cls(frames, fresh, guest, promoted, left_ids, left, facts, *numbers)

    @property
    def num_promoted(self) -> int:
        """Ids that came back into the index."""
        return int(self.promoted.sum())


@dataclass(frozen=True)
class Promoted:
    """The demoted ids of a step that come back.

    Attributes:
        places: int64 `[R]`, in the step's ids, ascending.
        facts: int64 `[R, 3]`: last steps + 1, counts and frequencies.
        frames: int64 `[R]`, where their rows still are, pinned; −1: in none.
    """

    places: np.ndarray
    facts: np.ndarray
    frames: np.ndarray


@dataclass(frozen=True)
class Statistics:
    """Statistics of ids; zeros where `known` is false.

    Attributes:
        known: bool `[N]`; ids that are demoted are known.
        count: int64 `[N]`, occurrences since the first of those that led to admission.
        last_step: int64 `[N]`, of the last sighting.
        score: int64 `[N]`: the last step (LRU, time to live), the decayed frequency as of the last opened step, in
            units of 2^−16 (LFU, both), or the caller's.
    """

    known: np.ndarray
    count: np.ndarray
    last_step: np.ndarray
    score: np.ndarray


@dataclass(frozen=True)
class ShardState:
    """A complete shard: the same arrays whatever the number of ranks. Ids ascend.

    `scores` are frequencies as of `last_steps` (not decayed since), the caller's scores, or the last steps.
    `frames` mean something only where they were taken; `load` gets new ones. `window` is that of the candidates,
    ids with sightings that are not admitted yet. Where ids live for some seconds, `last_times` are the times of
    `last_steps`, and `now` is that of the latest event so far.
    """

    ids: np.ndarray
    frames: np.ndarray
    counts: np.ndarray
    last_steps: np.ndarray
    scores: np.ndarray
    sketch: np.ndarray
    candidate_ids: np.ndarray
    candidate_counts: np.ndarray
    step: int
    window: int
    last_times: np.ndarray = field(default_factory=lambda: NONE)
    now: int = NO_TIME


@dataclass(frozen=True)
class MergedFacts:
    """Facts that replica groups know together, about ids that each may know differently.

    Attributes:
        ids: int64 `[N]`, ascending, of the shards here.
        facts: int64 `[N, 3]`: last steps + 1, counts, and scores as of these steps.
        enters: bool `[N]`: which ids some group has in its index; the others are demoted wherever they are known.
        clock: by which ids live.
        changed: int64, ascending: these ids, and the ids that no group knows any more.
    """

    ids: np.ndarray
    facts: np.ndarray
    enters: np.ndarray
    clock: EventClock
    changed: np.ndarray


@dataclass(frozen=True)
class United:
    """What `unite` has done.

    Attributes:
        frames: int64 `[N]`, of the ids; −1 where one left or did not enter, and is not demoted.
        stays: bool `[N]`: which of them are in the index now.
        entered: places of those that it did not know, and which have frames.
        left_ids, left_frames: int64 `[E]`, of all ids that left it; the frames are free only after `release`.
        left_facts: int64 `[E, 3]`.
    """

    frames: np.ndarray
    stays: np.ndarray
    entered: np.ndarray
    left_ids: np.ndarray
    left_frames: np.ndarray
    left_facts: np.ndarray


def check_batch(table: str, ids: np.ndarray, counts: np.ndarray, scores: np.ndarray | None, scored: bool) -> None:
    """Raises where a step's arrays are not what `open` takes."""
    arrays = {"ids": ids, "counts": counts} | ({} if scores is None else {"scores": scores})
    for name, array in arrays.items():
        if array.dtype != np.int64 or array.shape != ids.shape or array.ndim != 1:
            raise DataError(
                f"{name} of dynamic table {table!r} must be int64 [N] like ids, got {array.dtype} {list(array.shape)}"
            )
    if (ids[1:] <= ids[:-1]).any():
        raise DataError(f"ids of dynamic table {table!r} must be distinct and ascending")
    if len(counts) and counts.min() < 1:
        raise DataError(f"counts of dynamic table {table!r} must be 1 or more, got {counts.min()}")
    if scored != (scores is not None):
        raise DataError(
            f'dynamic table {table!r} {"needs" if scored else "takes no"} scores: eviction "score" alone uses them'
        )


def check_step(table: str, step: int, last: int) -> None:
    """Raises where steps do not ascend."""
    if not last < step < MAX:
        raise DataError(f"step of dynamic table {table!r} must be above {last}, the last one opened, got {step}")
