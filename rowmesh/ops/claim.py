"""claim: of some slots those that nobody has claimed yet."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rowmesh.ops.compiled import compiled

Slots = npt.NDArray[np.uint32]


def claim(is_free: npt.NDArray[np.uint8], slots: Slots, at: Slots) -> tuple[Slots, Slots]:
    """Marks those of the slots that are free as not free any more.

    Args:
        is_free: uint8 `[S]`, by slot; changed. Slots past its end are not free.
        slots: uint32 `[N]`.
        at: uint32 `[N]`, anything beside them.

    Returns:
        The slots that were free, in their order, each once, and what stands beside them.

    Example:
        >>> is_free = np.array([1, 0, 1], np.uint8)
        >>> slots, at = (np.array(numbers, np.uint32) for numbers in ([2, 1, 2, 9], [5, 6, 7, 8]))
        >>> [each.tolist() for each in claim(is_free, slots, at)], is_free.tolist()
        ([[2], [5]], [1, 0, 0])
    """
    claimed = np.empty((2, len(slots)), np.uint32)
    count = _claim(is_free, np.ascontiguousarray(slots), np.ascontiguousarray(at), claimed)
    return claimed[0, :count], claimed[1, :count]


@compiled(nogil=True)
def _claim(is_free, slots, at, claimed):
    count = 0
    for i in range(len(slots)):
        slot = slots[i]
        if slot < len(is_free) and is_free[slot]:
            is_free[slot] = 0
            claimed[0, count], claimed[1, count] = slot, at[i]
            count += 1
    return count
