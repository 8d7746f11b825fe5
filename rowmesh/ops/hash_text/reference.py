"""Hash of text by the xxhash library, value by value."""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray


def hash_text(values: NDArray[np.uint8], offsets: NDArray[np.int64], seed: int = 0) -> NDArray[np.int64]:
    """See `rowmesh.ops.hash_text.hash_text`."""
    data = values.tobytes()
    hashes = [
        xxhash.xxh64_intdigest(data[offsets[i] : offsets[i + 1]], seed & 0xFFFFFFFFFFFFFFFF)
        for i in range(len(offsets) - 1)
    ]
    return np.array(hashes, np.uint64).view(np.int64)
