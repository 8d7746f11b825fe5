"""Hash of text: a 64-bit number for each of many values, seeded, the same on every machine.

It is XXH64, as the xxhash library computes it, read as a signed number.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import DataError
from rowmesh.ops.hash_text import cpu


def hash_text(values: NDArray[np.uint8], offsets: NDArray[np.int64], seed: int = 0) -> NDArray[np.int64]:
    """XXH64 of each value.

    Args:
        values: uint8 `[m]`: all values back to back.
        offsets: int64 `[n + 1]`: value i is `values[offsets[i]:offsets[i + 1]]`.
        seed: below 2⁶⁴.

    Returns:
        int64 `[n]`.

    Raises:
        DataError: offsets fall, or reach past the values.

    Example:
        >>> hash_text(np.frombuffer(b"annbob", np.uint8), np.array([0, 3, 6])).tolist()
        [811139115053772478, -7888184235188891589]

    Source: Collet, XXH64, https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
    """
    if len(offsets) < 1 or offsets[0] < 0 or offsets[-1] > len(values) or (np.diff(offsets) < 0).any():
        raise DataError(f"offsets of text must rise from 0 or more to {len(values)} at most")
    out = np.empty(len(offsets) - 1, np.int64)
    cpu.hash_text(values, offsets, np.uint64(seed), out)
    return out
