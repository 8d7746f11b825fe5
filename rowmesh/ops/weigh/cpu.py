"""Gradients of weights on a CPU; features are described as for `rowmesh.ops.pool.cpu`."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from rowmesh.ops.pool.cpu import BAG_SIZE, DESCRIPTOR, FIRST_CELL, IDS_BEGIN, MEAN, NUM_BAGS, OFFSETS, STRIDE, ids_in
from rowmesh.ops.simd import (
    COMPUTE_BYTES,
    FLOAT32,
    FLOAT64,
    STORAGE_BYTES,
    copy_bytes,
    dot,
    kernel,
    load_i64,
    load_row,
    load_u32,
    store_scalar,
)


@functools.cache
def kernels(dim: int, storage: int) -> SimpleNamespace:
    """The kernels, compiled at their first call."""
    DIM, STORAGE = dim, storage
    ROW_BYTES = dim * STORAGE_BYTES[storage]
    ELEMENT = COMPUTE_BYTES[storage]
    OUT = FLOAT64 if storage == FLOAT64 else FLOAT32

    @kernel
    def copy_rows(addresses, num_rows, out):
        """Rows that are anywhere, one after the other."""
        for u in range(num_rows):
            copy_bytes(out + ROW_BYTES * u, load_i64(addresses + 8 * u), ROW_BYTES)

    @kernel
    def weight_gradients(features, num_features, rows, inverse, grad, out):
        """`out[i]` = the product of the row of id i and the gradient of its bag, over the bag's size for a mean."""
        for f in range(num_features):
            feature = features + 8 * DESCRIPTOR * f
            i, offsets, bag_size = (
                load_i64(feature + IDS_BEGIN),
                load_i64(feature + OFFSETS),
                load_i64(feature + BAG_SIZE),
            )
            cell, is_mean = load_i64(feature + FIRST_CELL), load_i64(feature + MEAN)
            for bag in range(load_i64(feature + NUM_BAGS)):
                size = ids_in(offsets, bag_size, bag)
                divisor = size if is_mean else 1
                for _ in range(size):
                    row = load_row(rows + ROW_BYTES * load_u32(inverse + 4 * i), DIM, STORAGE)
                    product = dot(row, load_row(grad + ELEMENT * cell, DIM, OUT))
                    store_scalar(out + ELEMENT * i, product / divisor, OUT)
                    i += 1
                cell += load_i64(feature + STRIDE)

    return SimpleNamespace(copy_rows=copy_rows, weight_gradients=weight_gradients)
