"""Changes of a batch in a table, until the batch has ended on all ranks: then its victims' frames are free."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rowmesh.tables.dynamic.state import NO_FACTS, NONE


@dataclass(kw_only=True)
class Change:
    """The changes of a batch. Arrays are int64 `[n]`; the ids of an array are distinct.

    Attributes:
        number: of the batch.
        admitted_ids: that entered the index, and about which nothing was known; or of which an average has told that
            they are demoted, which `evicted_ids` then has too.
        evicted_ids: that left it, ascending.
        evicted_frames: where their rows are; earlier batches may still update these.
        evicted_facts: `[n, 3]`: last steps + 1, counts and frequencies.
        guests: frames of ids that were not admitted.
        visitors: frames of unknown ids in evaluation, among such frames.
        promoted_ids: that came back from the store, which still has them.
        forgotten_ids: for which the store has no room, ascending.
        taken: of earlier changes, whose ids came back in the frames that they still had.
        left_order: shard, id and place of those that left the order of demotion.
    """

    number: int
    admitted_ids: np.ndarray = field(default_factory=lambda: NONE)
    evicted_ids: np.ndarray = field(default_factory=lambda: NONE)
    evicted_frames: np.ndarray = field(default_factory=lambda: NONE)
    evicted_facts: np.ndarray = field(default_factory=lambda: NO_FACTS)
    guests: np.ndarray = field(default_factory=lambda: NONE)
    visitors: np.ndarray = field(default_factory=lambda: NONE)
    promoted_ids: np.ndarray = field(default_factory=lambda: NONE)
    forgotten_ids: np.ndarray = field(default_factory=lambda: NONE)
    taken: list[Change] = field(default_factory=list)
    left_order: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def freed(self) -> np.ndarray:
        """Frames that are free when the batch has ended."""
        return np.concatenate([self.evicted_frames, self.guests])

    def flushed(self) -> None:
        """Nothing of it waits to be written any more; its frames are still pinned."""
        self.guests = self.freed
        self.evicted_ids, self.evicted_frames, self.evicted_facts = NONE, NONE, NO_FACTS
        self.promoted_ids = self.forgotten_ids = NONE

    def undo(self, ids: np.ndarray, frames: np.ndarray) -> None:
        """Finds ids as before the change; their frames are still pinned. Ids that came back have their rows there."""
        places, found = find_in(self.evicted_ids, ids)
        frames[found] = self.evicted_frames[places[found]]
        frames[np.isin(ids, self.admitted_ids)] = -1

    def find_evicted(self, ids: np.ndarray, frames: np.ndarray) -> None:
        """Finds those ids that have no frame, −1, where they were when they left."""
        places, found = find_in(self.evicted_ids, ids)
        found &= frames < 0
        frames[found] = self.evicted_frames[places[found]]

    def take_back(self, ids: np.ndarray) -> Change:
        """Evicted ids are known again, in the frames that they had; returns what of the change is no more."""
        stay = ~np.isin(self.evicted_ids, ids)
        taken = Change(
            number=self.number,
            evicted_ids=self.evicted_ids[~stay],
            evicted_frames=self.evicted_frames[~stay],
            evicted_facts=self.evicted_facts[~stay],
        )
        self.evicted_ids, self.evicted_frames = self.evicted_ids[stay], self.evicted_frames[stay]
        self.evicted_facts = self.evicted_facts[stay]
        return taken


def find_in(ascending: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each id stands among ascending ones, and a mask of those that do.

    Example:
        >>> places, found = find_in(np.array([2, 5]), np.array([5, 3]))
        >>> places[found], found
        (array([1]), array([ True, False]))
    """
    places = np.searchsorted(ascending, ids)
    if not len(ascending):
        return places, np.zeros(len(ids), bool)
    places = np.minimum(places, len(ascending) - 1)
    return places, ascending[places] == ids
