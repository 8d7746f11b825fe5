"""Pre-images in plain NumPy: what the tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rowmesh.ops.pre_images.cpu import CLAIMED


def claim(
    is_free: npt.NDArray[np.uint8],
    places: npt.NDArray[np.uint32],
    slots: npt.NDArray[np.uint32],
    at: npt.NDArray[np.uint32],
    first: int,
) -> npt.NDArray[np.uint32]:
    """See `rowmesh.ops.pre_images.claim`."""
    found = []
    for slot, beside in zip(slots.tolist(), at.tolist(), strict=True):
        if slot < len(is_free) and is_free[slot] == 1:
            found.append(beside)
            is_free[slot], places[slot] = CLAIMED, first + len(found)
    return np.array(found, np.uint32)


def settle(
    is_free: npt.NDArray[np.uint8], places: npt.NDArray[np.uint32], slots: range | npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """See `rowmesh.ops.pre_images.settle`."""
    index = np.array(slots, np.int64)
    is_claimed = is_free[index] == CLAIMED
    is_free[index] = 0
    return np.where(is_claimed, places[index], 0).astype(np.uint32) if is_claimed.any() else np.empty(0, np.uint32)


def restore(places: npt.NDArray[np.uint32], blocks: Sequence[npt.NDArray], out: npt.NDArray) -> None:
    """See `PreImages.restore`."""
    every = np.concatenate(blocks)
    changed = np.flatnonzero(places)
    out[changed] = every[places[changed] - 1]
