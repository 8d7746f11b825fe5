"""RawIds: items by ids that mean the same in all data, in the place of numbers that one preparation gave."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmesh.data.raw.ids import ids_of
from rowmesh.errors import DataError


@dataclass(frozen=True, eq=False)
class RawIds:
    """The ids of the items of some data: an integer is its own id, text has that of `rowmesh.data.raw`.

    Attributes:
        ids: int64 `[M]`, of each item by its number, each once.
        order: int64 `[M]`, numbers by rising id.

    Example:
        >>> raw = RawIds.of(pa.array([700, -3, 12]))
        >>> raw.ids.tolist(), raw.numbers(np.array([12, 5, 700])).tolist()
        ([700, -3, 12], [2, -1, 0])
    """

    ids: NDArray[np.int64]
    order: NDArray[np.int64]

    @staticmethod
    def of(values: pa.Array) -> RawIds:
        """From the values of the items, by number.

        Raises:
            DataError: two of them have one id.
        """
        ids = ids_of(values)
        order = np.argsort(ids, kind="stable")
        if (same := np.flatnonzero(ids[order][1:] == ids[order][:-1])).size:
            one, other = (values[int(number)].as_py() for number in order[same[0] : same[0] + 2])
            raise DataError(
                f"items {one!r} and {other!r} have one id, and would share a row; give model.options.item_ids = "
                '"prepared", or rename one of them'
            )
        return RawIds(ids, order)

    def numbers(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each id; −1 where these data have no such item."""
        if not len(self.ids):
            return np.full(len(ids), -1)
        places = self.order[np.searchsorted(self.ids, ids, sorter=self.order).clip(max=len(self.ids) - 1)]
        return np.where(self.ids[places] == ids, places, -1)
