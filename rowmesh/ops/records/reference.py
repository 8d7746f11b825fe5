"""Records in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def pack(arrays: Sequence[np.ndarray], places: np.ndarray) -> np.ndarray:
    """Records, uint8 `[n, bytes]`, of arrays `[num_places, …]`."""
    return np.concatenate([array.view(np.uint8).reshape(len(array), -1)[places] for array in arrays], 1)


def unpack(arrays: Sequence[np.ndarray], places: np.ndarray, records: np.ndarray) -> None:
    """Writes records into arrays."""
    begin = 0
    for array in arrays:
        parts = array.view(np.uint8).reshape(len(array), -1)
        parts[places] = records[:, begin : begin + parts.shape[1]]
        begin += parts.shape[1]
