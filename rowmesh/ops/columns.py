"""Columns: vectors that stand feature by feature, copied into the columns of an output and back; ids made narrow."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np

from rowmesh.ops.simd import COMPUTE_BYTES, FLOAT32, FLOAT64, kernel, load_i64, load_row, store_row, store_u32


@kernel
def narrow(ids, begin, end, num_rows, out):
    """Copies ids `begin` … `end − 1`, int64, to `out`, uint32; returns how many are no row of so many."""
    others, limit = 0, np.uint64(num_rows)
    for i in range(begin, end):
        row = load_i64(ids + 8 * i)
        others += np.uint64(row) >= limit
        store_u32(out + 4 * (i - begin), row & 0xFFFFFFFF)
    return others


@functools.cache
def kernels(dim: int, storage: int) -> SimpleNamespace:
    """The kernels that depend on the dimension and on how rows are stored, compiled at their first call.

    `columns` is int64 `[features, 2]`: where the column of a feature begins in the output, and its first vector.
    """
    DIM, OUT = dim, FLOAT64 if storage == FLOAT64 else FLOAT32
    ELEMENT = COMPUTE_BYTES[storage]
    BYTES = dim * ELEMENT

    @kernel
    def scatter(vectors, columns, num_features, num_samples, width, output):
        """Copies the vectors of all features into the output, `[B, width]`."""
        for f in range(num_features):
            to = output + ELEMENT * load_i64(columns + 16 * f)
            at = vectors + BYTES * load_i64(columns + 16 * f + 8)
            for _ in range(num_samples):
                store_row(to, load_row(at, DIM, OUT), OUT)
                to += ELEMENT * width
                at += BYTES

    @kernel
    def pack(vectors, columns, num_features, num_samples, width, output):
        """The way back."""
        for f in range(num_features):
            at = output + ELEMENT * load_i64(columns + 16 * f)
            to = vectors + BYTES * load_i64(columns + 16 * f + 8)
            for _ in range(num_samples):
                store_row(to, load_row(at, DIM, OUT), OUT)
                at += ELEMENT * width
                to += BYTES

    return SimpleNamespace(scatter=scatter, pack=pack)
