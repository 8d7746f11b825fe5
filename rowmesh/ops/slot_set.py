"""SlotSet: which of many slots are marked, one bit each."""

from __future__ import annotations

import numpy as np

from rowmesh.ops.simd import kernel


@kernel
def _add(bits, slots):
    for i in range(len(slots)):
        bits[slots[i] >> 3] |= 1 << (slots[i] & 7)


@kernel
def _contains(bits, slots, out):
    for i in range(len(slots)):
        out[i] = (bits[slots[i] >> 3] >> (slots[i] & 7)) & 1


class SlotSet:
    """A set of slots below `num_slots`; the system provides its memory page by page as slots are added.

    Example:
        >>> written = SlotSet(100)
        >>> written.add(np.array([3, 99], np.uint32))
        >>> written.contains(np.array([2, 3, 99], np.uint32)).tolist()
        [False, True, True]
    """

    def __init__(self, num_slots: int) -> None:
        self._bits = np.zeros((num_slots + 7) // 8, np.uint8)

    @property
    def num_bytes(self) -> int:
        """Memory of the set."""
        return self._bits.nbytes

    def add(self, slots: np.ndarray) -> None:
        """Marks slots, uint32."""
        _add(self._bits, slots)

    def contains(self, slots: np.ndarray) -> np.ndarray:
        """Which of the slots, uint32, are marked."""
        out = np.empty(len(slots), np.bool_)
        _contains(self._bits, slots, out)
        return out
