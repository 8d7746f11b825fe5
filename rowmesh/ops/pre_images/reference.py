"""Pre-images in plain NumPy: what the tests compare with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


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
        if slot < len(is_free) and is_free[slot]:
            found.append(beside)
            is_free[slot], places[slot] = 0, first + len(found)
    return np.array(found, np.uint32)


def restore(places: npt.NDArray[np.uint32], blocks: Sequence[npt.NDArray], out: npt.NDArray) -> None:
    """See `PreImages.restore`."""
    every = np.concatenate(blocks)
    changed = np.flatnonzero(places)
    out[changed] = every[places[changed] - 1]
