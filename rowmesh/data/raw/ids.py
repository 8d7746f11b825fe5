"""Ids of raw values: an integer is its own id, text and bytes get the XXH64 of their bytes, with a seed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rowmesh.data.plain_columns import is_text
from rowmesh.errors import DataError
from rowmesh.ops.hash_text import hash_text

MISSING_TEXT = b""
"""The text that is hashed for a missing value: null, also among integers, or empty text."""


def ids_of(values: pa.Array, seed: int = 0) -> NDArray[np.int64]:
    """The ids of raw values, 64 bits each.

    An unsigned integer past 2⁶³ is the signed one with the same bits.

    Args:
        values: integers, text or bytes, or of type null.
        seed: of the hash of text.

    Raises:
        DataError: they are of another type.

    Example:
        >>> ids_of(pa.array([7, None])).tolist()[0]
        7
        >>> ids_of(pa.array(["ann", "bob", "ann"])).tolist()
        [811139115053772478, -7888184235188891589, 811139115053772478]
    """
    if pa.types.is_null(values.type):
        return np.full(len(values), _missing(seed))
    if pa.types.is_integer(values.type):
        return _integers(values, seed)
    if not is_text(values.type):
        raise DataError(f"ids must be integers, text or bytes, got {values.type}")
    if values.null_count:
        values = values.cast(pa.binary()).fill_null(MISSING_TEXT)
    wide = values.cast(pa.large_binary())
    _, offsets, data = wide.buffers()
    begins = np.frombuffer(offsets, np.int64, len(wide) + 1, 8 * wide.offset) if len(wide) else np.zeros(1, np.int64)
    text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    return hash_text(text, begins, seed)


def _integers(values: pa.Array, seed: int) -> NDArray[np.int64]:
    is_null = values.is_null().to_numpy(zero_copy_only=False)
    plain = values.fill_null(0).to_numpy(zero_copy_only=False)
    ids = plain.view(np.int64) if plain.dtype == np.uint64 else plain.astype(np.int64)
    return np.where(is_null, _missing(seed), ids)


def _missing(seed: int) -> np.int64:
    return hash_text(np.frombuffer(MISSING_TEXT, np.uint8), np.zeros(2, np.int64), seed)[0]
