"""Versions: how often each row was updated, to notice a row that is not what its last update left."""

from __future__ import annotations

import numpy as np

from rowmesh.errors import RowmeshError
from rowmesh.tables.row_arrays import InitialRows


class Versions:
    """The versions of a rank's rows, to compare with those that travel with the rows themselves.

    Takes 4 bytes a slot, which the system provides page by page, and 4 in every record.

    Args:
        num_slots: rows of the group on this rank.
        held: uint32 `[num_cache_slots]`, the version that the row in each cache slot has.
        initial: names rows.
    """

    def __init__(self, num_slots: int, held: np.ndarray, initial: InitialRows) -> None:
        self._last = np.zeros(num_slots, np.uint32)
        self._held, self._initial = held, initial

    @property
    def num_bytes(self) -> int:
        """Memory of the versions."""
        return self._last.nbytes

    def advance(self, cache_slots: np.ndarray, slots: np.ndarray) -> None:
        """Counts an update of each row; slots are distinct."""
        self._held[cache_slots] += 1
        self._last[slots] += 1

    def overwrite(self, slots: np.ndarray) -> np.ndarray:
        """Counts that the rows of distinct slots are replaced; returns the versions of the new ones."""
        self._last[slots] += 1
        return self._last[slots]

    def check(self, cache_slots: np.ndarray, slots: np.ndarray, where: str) -> None:
        """Raises RowmeshError for the first row that is not what its last update left.

        Args:
            cache_slots, slots: of each row.
            where: they were found, for the message.
        """
        found, expected = self._held[cache_slots], self._last[slots]
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            first = wrong[0]
            raise RowmeshError(
                f"{self._initial.name(int(slots[first]))}: {where} is version {found[first]}, but its last update left "
                f"version {expected[first]}; {len(wrong)} of {len(slots)} rows are not what they must be, which is a "
                "mistake in rowmesh: please report it"
            )
