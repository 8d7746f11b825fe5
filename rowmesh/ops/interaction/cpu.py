"""Dot interactions on a CPU: the vectors of a sample stay in the first cache, sums in vector registers.

[Note: tiles]

Forward multiplies the matrix of a sample's vectors, `V [n, D]`, n = F + 1, by its transpose. V is transposed first,
tile by tile in registers. Then the products of V_i with LANES others are one vector, to which every column d adds
V_i[d] times that column. Four rows i and two such vectors at a time: eight sums, which are enough to hide how long a
multiplication takes. Only tiles that reach below the diagonal are computed.

Backward is `∂V_i = Σ_j s_ij V_j` with s symmetric and zero on the diagonal. The gradient of the products has s_ij,
j < i, at i(i − 1)/2 + j, and is read there. Four rows i and two vectors of columns at a time.

Samples are independent: any number of threads computes the same bits.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import Tensor

from rowmesh.ops.memory import round_up
from rowmesh.ops.simd import (
    FLOAT64,
    STORAGE,
    STORAGE_BYTES,
    add,
    axpy,
    copy_bytes,
    kernel,
    load_row,
    load_scalar,
    store_row,
    transpose_tile,
    zero_row,
)

SAMPLES_OF_A_THREAD = 64  # at least


def lanes(storage: int) -> int:
    """Elements of a vector of 64 bytes."""
    return 8 if storage == FLOAT64 else 16


def forward(base: Tensor, embeddings: Tensor, out: Tensor) -> None:
    """Writes `[B, D + F(F+1)/2]`; all are contiguous."""
    samples, features, dim = embeddings.shape
    run = kernels(features, dim, STORAGE[out.dtype]).forward

    def part(first: int, end: int) -> None:
        scratch = _scratch(features, dim, out.dtype)
        run(base.data_ptr(), embeddings.data_ptr(), first, end, out.data_ptr(), scratch.data_ptr())

    _in_parts(part, samples)


def backward(base: Tensor, embeddings: Tensor, grad: Tensor, of_base: Tensor, of_embeddings: Tensor) -> None:
    """Writes the gradients of base and embeddings; all are contiguous."""
    samples, features, dim = embeddings.shape
    run = kernels(features, dim, STORAGE[grad.dtype]).backward
    read = (base.data_ptr(), embeddings.data_ptr(), grad.data_ptr())

    def part(first: int, end: int) -> None:
        scratch = _scratch(features, dim, grad.dtype)
        run(*read, first, end, of_base.data_ptr(), of_embeddings.data_ptr(), scratch.data_ptr())

    _in_parts(part, samples)


def _in_parts(part: Callable[[int, int], None], samples: int) -> None:
    """Divides samples among as many threads as torch has."""
    count = max(min(torch.get_num_threads(), samples // SAMPLES_OF_A_THREAD), 1)
    if count == 1:
        part(0, samples)
        return
    bounds = [samples * number // count for number in range(count + 1)]
    threads = _threads(os.getpid(), count - 1)
    first, *rest = pairwise(bounds)
    others = [threads.submit(part, *each) for each in rest]
    part(*first)
    for other in others:
        other.result()


@functools.cache
def _threads(pid: int, count: int) -> ThreadPoolExecutor:
    """The threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(count, "rowmesh-interaction")


def _scratch(features: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Zeros for what a kernel keeps of one sample; the padding of V is never written."""
    width = lanes(STORAGE[dtype])
    rows, columns = round_up(features + 1, width), round_up(dim, width)
    pairs = round_up(features * (features + 1) // 2, width) + width
    return torch.zeros(2 * rows * columns + rows * rows + pairs + 5 * columns, dtype=dtype, device="cpu")


@functools.cache
def kernels(features: int, dim: int, storage: int) -> SimpleNamespace:
    """The kernels for one number of features, dimension and storage, compiled at their first call."""
    STORAGE, LANES, DIM, N, ITEM = storage, lanes(storage), dim, features + 1, STORAGE_BYTES[storage]
    NP, DP, LINE = round_up(N, LANES), round_up(dim, LANES), LANES * ITEM
    V_BYTES, T_BYTES, ROW = DP * ITEM, NP * ITEM, dim * ITEM
    TRANSPOSED, SQUARE = NP * V_BYTES, 2 * NP * V_BYTES
    PAIRS = SQUARE + NP * T_BYTES
    PAIR_BYTES = N * (N - 1) // 2 * ITEM
    EMBEDDINGS, OUT = features * ROW, ROW + PAIR_BYTES
    GRADIENTS, OF_BASE = TRANSPOSED, TRANSPOSED + 4 * V_BYTES
    SECOND = LINE if DP > LANES else 0  # of a single vector, both are the same

    @kernel
    def forward(base, embeddings, first, end, out, scratch):
        """See [Note: tiles]; scratch: V, its transpose, their product, its lower triangle."""
        for b in range(first, end):
            copy_bytes(out + b * OUT, base + b * ROW, ROW)
            copy_bytes(scratch, base + b * ROW, ROW)
            for i in range(1, N):
                copy_bytes(scratch + i * V_BYTES, embeddings + b * EMBEDDINGS + (i - 1) * ROW, ROW)
            for i in range(0, NP, LANES):
                for d in range(0, DP, LANES):
                    tile = scratch + TRANSPOSED + d * T_BYTES + i * ITEM
                    transpose_tile(scratch + i * V_BYTES + d * ITEM, V_BYTES, tile, T_BYTES, LANES, STORAGE)
            for i in range(0, N, 4):
                v0, end_column = scratch + i * V_BYTES, min(i + 3, N - 1)
                v1, v2, v3 = v0 + V_BYTES, v0 + 2 * V_BYTES, v0 + 3 * V_BYTES
                sums = scratch + SQUARE + i * T_BYTES
                j = 0
                while j + LANES < end_column:
                    t = scratch + TRANSPOSED + j * ITEM
                    a0 = zero_row(LANES, STORAGE)
                    a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
                    for d in range(DIM):
                        x = load_row(t + d * T_BYTES, LANES, STORAGE)
                        y = load_row(t + d * T_BYTES + LINE, LANES, STORAGE)
                        s = load_scalar(v0 + d * ITEM, STORAGE)
                        a0 = axpy(s, x, a0)
                        b0 = axpy(s, y, b0)
                        s = load_scalar(v1 + d * ITEM, STORAGE)
                        a1 = axpy(s, x, a1)
                        b1 = axpy(s, y, b1)
                        s = load_scalar(v2 + d * ITEM, STORAGE)
                        a2 = axpy(s, x, a2)
                        b2 = axpy(s, y, b2)
                        s = load_scalar(v3 + d * ITEM, STORAGE)
                        a3 = axpy(s, x, a3)
                        b3 = axpy(s, y, b3)
                    to = sums + j * ITEM
                    store_row(to, a0, STORAGE)
                    store_row(to + LINE, b0, STORAGE)
                    store_row(to + T_BYTES, a1, STORAGE)
                    store_row(to + T_BYTES + LINE, b1, STORAGE)
                    store_row(to + 2 * T_BYTES, a2, STORAGE)
                    store_row(to + 2 * T_BYTES + LINE, b2, STORAGE)
                    store_row(to + 3 * T_BYTES, a3, STORAGE)
                    store_row(to + 3 * T_BYTES + LINE, b3, STORAGE)
                    j += 2 * LANES
                if j < end_column:
                    t = scratch + TRANSPOSED + j * ITEM
                    a0 = zero_row(LANES, STORAGE)
                    a1, a2, a3 = a0, a0, a0
                    for d in range(DIM):
                        x = load_row(t + d * T_BYTES, LANES, STORAGE)
                        a0 = axpy(load_scalar(v0 + d * ITEM, STORAGE), x, a0)
                        a1 = axpy(load_scalar(v1 + d * ITEM, STORAGE), x, a1)
                        a2 = axpy(load_scalar(v2 + d * ITEM, STORAGE), x, a2)
                        a3 = axpy(load_scalar(v3 + d * ITEM, STORAGE), x, a3)
                    to = sums + j * ITEM
                    store_row(to, a0, STORAGE)
                    store_row(to + T_BYTES, a1, STORAGE)
                    store_row(to + 2 * T_BYTES, a2, STORAGE)
                    store_row(to + 3 * T_BYTES, a3, STORAGE)
            # A row's last vector reaches into the next row, which comes after it.
            to = scratch + PAIRS
            for i in range(1, N):
                for j in range(0, i, LANES):
                    x = load_row(scratch + SQUARE + i * T_BYTES + j * ITEM, LANES, STORAGE)
                    store_row(to + j * ITEM, x, STORAGE)
                to += i * ITEM
            copy_bytes(out + b * OUT + ROW, scratch + PAIRS, PAIR_BYTES)

    @kernel
    def backward(base, embeddings, grad, first, end, of_base, of_embeddings, scratch):
        """See [Note: tiles]; scratch: V, gradients of four of its rows, what the output has of the base's."""
        for b in range(first, end):
            copy_bytes(scratch, base + b * ROW, ROW)
            for i in range(1, N):
                copy_bytes(scratch + i * V_BYTES, embeddings + b * EMBEDDINGS + (i - 1) * ROW, ROW)
            copy_bytes(scratch + OF_BASE, grad + b * OUT, ROW)
            pairs = grad + b * OUT + ROW
            for i in range(0, N, 4):
                # Rows past the last are computed as the last, and not written.
                i1, i2, i3 = min(i + 1, N - 1), min(i + 2, N - 1), min(i + 3, N - 1)
                s0, s1 = pairs + i * (i - 1) // 2 * ITEM, pairs + i1 * (i1 - 1) // 2 * ITEM
                s2, s3 = pairs + i2 * (i2 - 1) // 2 * ITEM, pairs + i3 * (i3 - 1) // 2 * ITEM
                c = 0
                while c < DP:
                    # Where the number of vectors is odd, the last two are computed together, the second last once more.
                    c = max(min(c, DP - 2 * LANES), 0)
                    v = scratch + c * ITEM
                    a0 = zero_row(LANES, STORAGE)
                    a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
                    for j in range(i):
                        x = load_row(v + j * V_BYTES, LANES, STORAGE)
                        y = load_row(v + j * V_BYTES + SECOND, LANES, STORAGE)
                        s = load_scalar(s0 + j * ITEM, STORAGE)
                        a0 = axpy(s, x, a0)
                        b0 = axpy(s, y, b0)
                        s = load_scalar(s1 + j * ITEM, STORAGE)
                        a1 = axpy(s, x, a1)
                        b1 = axpy(s, y, b1)
                        s = load_scalar(s2 + j * ITEM, STORAGE)
                        a2 = axpy(s, x, a2)
                        b2 = axpy(s, y, b2)
                        s = load_scalar(s3 + j * ITEM, STORAGE)
                        a3 = axpy(s, x, a3)
                        b3 = axpy(s, y, b3)
                    for j in range(i, min(i + 4, N)):
                        x = load_row(v + j * V_BYTES, LANES, STORAGE)
                        y = load_row(v + j * V_BYTES + SECOND, LANES, STORAGE)
                        column = pairs + j * (j - 1) // 2 * ITEM
                        if j != i:
                            s = load_scalar(column + i * ITEM, STORAGE)
                            a0 = axpy(s, x, a0)
                            b0 = axpy(s, y, b0)
                        if j != i1:
                            s = load_scalar(s1 + j * ITEM if j < i1 else column + i1 * ITEM, STORAGE)
                            a1 = axpy(s, x, a1)
                            b1 = axpy(s, y, b1)
                        if j != i2:
                            s = load_scalar(s2 + j * ITEM if j < i2 else column + i2 * ITEM, STORAGE)
                            a2 = axpy(s, x, a2)
                            b2 = axpy(s, y, b2)
                        if j != i3:
                            s = load_scalar(s3 + j * ITEM if j < i3 else column + i3 * ITEM, STORAGE)
                            a3 = axpy(s, x, a3)
                            b3 = axpy(s, y, b3)
                    column = pairs + ((i + 4) * (i + 3) // 2 + i) * ITEM
                    for j in range(i + 4, N):
                        x = load_row(v + j * V_BYTES, LANES, STORAGE)
                        y = load_row(v + j * V_BYTES + SECOND, LANES, STORAGE)
                        s = load_scalar(column, STORAGE)
                        a0 = axpy(s, x, a0)
                        b0 = axpy(s, y, b0)
                        s = load_scalar(column + ITEM, STORAGE)
                        a1 = axpy(s, x, a1)
                        b1 = axpy(s, y, b1)
                        s = load_scalar(column + 2 * ITEM, STORAGE)
                        a2 = axpy(s, x, a2)
                        b2 = axpy(s, y, b2)
                        s = load_scalar(column + 3 * ITEM, STORAGE)
                        a3 = axpy(s, x, a3)
                        b3 = axpy(s, y, b3)
                        column += j * ITEM
                    if i == 0:
                        a0 = add(a0, load_row(scratch + OF_BASE + c * ITEM, LANES, STORAGE))
                        b0 = add(b0, load_row(scratch + OF_BASE + c * ITEM + SECOND, LANES, STORAGE))
                    to = scratch + GRADIENTS + c * ITEM
                    store_row(to, a0, STORAGE)
                    store_row(to + SECOND, b0, STORAGE)
                    store_row(to + V_BYTES, a1, STORAGE)
                    store_row(to + V_BYTES + SECOND, b1, STORAGE)
                    store_row(to + 2 * V_BYTES, a2, STORAGE)
                    store_row(to + 2 * V_BYTES + SECOND, b2, STORAGE)
                    store_row(to + 3 * V_BYTES, a3, STORAGE)
                    store_row(to + 3 * V_BYTES + SECOND, b3, STORAGE)
                    c += 2 * LANES
                for row in range(i, min(i + 4, N)):
                    to = of_base + b * ROW if row == 0 else of_embeddings + b * EMBEDDINGS + (row - 1) * ROW
                    copy_bytes(to, scratch + GRADIENTS + (row - i) * V_BYTES, ROW)

    return SimpleNamespace(forward=forward, backward=backward)
