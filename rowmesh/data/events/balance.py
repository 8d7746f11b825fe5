"""balance: shares sequences out so that all get about as many ids."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray


def balance(lengths: NDArray[np.int64], num_parts: int) -> list[NDArray[np.int64]]:
    """Which sequences each part gets, in rising order: the longest first, each to the part with the fewest ids.

    No part has more ids than another by more than the longest sequence. Equal lengths give equal parts: ties go to the
    sequence, and the part, of the lower number.

    Args:
        lengths: int64 `[B]`, ids of each sequence.
        num_parts: ranks or micro-batches.

    >>> [part.tolist() for part in balance(np.array([5, 1, 1, 1, 2]), 2)]
    [[0], [1, 2, 3, 4]]
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, 0, part) for part in range(num_parts)]
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        load, size, part = heapq.heappop(loads)
        parts[part].append(sequence)
        heapq.heappush(loads, (load + int(lengths[sequence]), size + 1, part))
    return [np.array(sorted(part), np.int64) for part in parts]
