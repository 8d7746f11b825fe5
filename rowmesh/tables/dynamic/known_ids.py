"""Known ids: what a replica group knows of ids, in its index or demoted, when an average makes groups know the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rowmesh.tables.dynamic.demoted import Found


@dataclass(frozen=True)
class KnownIds:
    """Frames and facts of some ids.

    Attributes:
        frames: int64 `[N]`, in the index; −1: it does not know the id.
        facts: int64 `[N, 3]`: last steps + 1, counts and scores, of demoted ids too; zeros where nothing is known.
        unknown: int64 `[U]`, places of the ids that the index does not know.
        found: what is demoted of these; None where ids that leave are forgotten.
    """

    frames: np.ndarray
    facts: np.ndarray
    unknown: np.ndarray
    found: Found | None

    @classmethod
    def nothing(cls, count: int) -> KnownIds:
        """So many ids, of which nothing is known."""
        return cls(np.full(count, -1), np.zeros((count, 3), np.int64), np.arange(count), None)

    def at(self, chosen: np.ndarray) -> KnownIds:
        """Selects the ids that a mask names."""
        places, stay = np.cumsum(chosen) - 1, chosen[self.unknown]
        found = None if self.found is None else self.found.at(stay)
        return KnownIds(self.frames[chosen], self.facts[chosen], places[self.unknown[stay]], found)

    @property
    def rows_at(self) -> np.ndarray | None:
        """int64 `[N]`: pinned frames that have the rows of demoted ids; −1: none."""
        if self.found is None:
            return None
        frames = np.full(len(self.frames), -1)
        frames[self.unknown] = self.found.frames
        return frames

    @property
    def demoted(self) -> np.ndarray:
        """Places of the ids that are demoted."""
        return self.unknown[:0] if self.found is None else self.unknown[self.found.is_there]
