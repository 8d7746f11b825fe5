"""Told rows: what one rank tells the others of its column about some rows of one group.

A message has the slots (uint32), and then blocks, one item a row each, every part at the next multiple of 64 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rowmesh.ops.memory import round_up


@dataclass(frozen=True, eq=False)
class Told:
    """Some rows.

    Attributes:
        slots: uint32 `[n]`, distinct.
        blocks: for each kind of value, uint8 `[n, bytes]`.
        before: what the blocks were, where this rank needs it itself; never sent.
    """

    slots: np.ndarray
    blocks: list[np.ndarray]
    before: list[np.ndarray] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, chosen: np.ndarray) -> Told:
        """The rows at some places."""
        return Told(self.slots[chosen], [b[chosen] for b in self.blocks], [b[chosen] for b in self.before])

    def places(self, parts: int) -> list[np.ndarray]:
        """Where the rows of each part stand, which is their slot modulo `parts`; in their order."""
        homes = self.slots % np.uint32(parts)
        return [np.flatnonzero(homes == home) for home in range(parts)]


class Layout:
    """Where things are in a message.

    Args:
        item_bytes: of a row, in each block.
    """

    def __init__(self, item_bytes: Sequence[int]) -> None:
        self.item_bytes = tuple(item_bytes)

    def num_bytes(self, count: int) -> int:
        """Of a message of so many rows."""
        return self._offsets(count)[-1]

    def write(self, told: Told, message: np.ndarray, places: np.ndarray | None = None) -> None:
        """Lays rows out in uint8 `[num_bytes]`: all, or those at some places."""
        laid_out = self.read(message, len(told) if places is None else len(places))
        for to, values in zip([laid_out.slots, *laid_out.blocks], [told.slots, *told.blocks], strict=True):
            if places is None:
                to[:] = values
            else:
                np.take(values, places, axis=0, out=to, mode="clip")  # "raise" would buffer the result

    def read(self, message: np.ndarray, count: int) -> Told:
        """The rows of a message that has so many, as views."""
        offsets = self._offsets(count)
        blocks = [
            message[begin : begin + size * count].reshape(count, size)
            for begin, size in zip(offsets, self.item_bytes, strict=False)
        ]
        return Told(message[: 4 * count].view(np.uint32), blocks)

    def _offsets(self, count: int) -> list[int]:
        """Where each block begins, and the size of all."""
        offsets = [round_up(4 * count, 64)]
        for size in self.item_bytes:
            offsets.append(offsets[-1] + round_up(size * count, 64))
        return offsets
