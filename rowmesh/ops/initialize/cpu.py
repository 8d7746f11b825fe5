"""Initial values on a CPU, written straight to where rows are kept."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.simd import COMPUTE_BYTES, FLOAT32, FLOAT64, inlined, kernel, store_scalar

UNIFORM, NORMAL, CONSTANT = 0, 1, 2
DISTRIBUTIONS = {"uniform": UNIFORM, "normal": NORMAL, "constant": CONSTANT}


@inlined
def _mix(z):
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@inlined
def _value(key, counter, distribution, a, b):
    """Output number `counter` of a stream, as a value of the distribution."""
    if distribution == CONSTANT:
        return a
    z = _mix(key + (counter + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    if distribution == UNIFORM:
        return a + (b - a) * (np.float64(z >> np.uint64(11)) * 2.0**-53)
    u = (np.float64(z >> np.uint64(32)) + 0.5) * 2.0**-32
    v = np.float64(z & np.uint64(0xFFFFFFFF)) * 2.0**-32
    return a + b * np.sqrt(-2.0 * np.log(u)) * np.cos(2.0 * np.pi * v)


@functools.cache
def _kernel(storage: int) -> SimpleNamespace:
    STORAGE, ELEMENT = storage, COMPUTE_BYTES[storage]
    SCALAR = np.float64 if storage == FLOAT64 else np.float32

    @kernel
    def fill(out, num_rows, dim, key, first, stride, distribution, a, b):
        for i in range(num_rows):
            counter = np.uint64(first + i * stride) * np.uint64(dim)
            for e in range(dim):
                value = _value(key, counter + np.uint64(e), distribution, a, b)
                store_scalar(out + ELEMENT * (i * dim + e), SCALAR(value), STORAGE)

    @kernel
    def fill_slots(out, dim, slots, places, pieces, streams, distribution):
        for i in range(len(slots)):
            slot = np.int64(slots[i])
            piece, end = 0, len(pieces)
            while end - piece > 1:  # the last that does not begin behind the slot
                middle = (piece + end) // 2
                if pieces[middle, 0] <= slot:
                    piece = middle
                else:
                    end = middle
            row = pieces[piece, 1] + (slot - pieces[piece, 0]) * pieces[piece, 2]
            stream = streams[pieces[piece, 3]]
            counter = np.uint64(row) * np.uint64(dim)
            at = out + ELEMENT * dim * np.int64(places[i])
            for e in range(dim):
                value = _value(stream["key"], counter + np.uint64(e), distribution, stream["a"], stream["b"])
                store_scalar(at + ELEMENT * e, SCALAR(value), STORAGE)

    return SimpleNamespace(fill=fill, fill_slots=fill_slots)


def initialize(out: Tensor, key: int, *, first: int, stride: int, distribution: str, a: float, b: float) -> None:
    """Writes the initial values of some rows; see `rowmesh.ops.initialize.initialize`, which checks arguments."""
    num_rows, dim = out.shape
    rule = (stride, DISTRIBUTIONS[distribution], float(a), float(b))
    if out.dtype != torch.bfloat16:
        fill = _kernel(FLOAT64 if out.dtype == torch.float64 else FLOAT32).fill
        fill(out.data_ptr(), num_rows, dim, np.uint64(key), first, *rule)
        return
    block = torch.empty(min(num_rows, 65536), dim, dtype=torch.float32, device="cpu")
    for begin in range(0, num_rows, 65536):
        part = out[begin : begin + 65536]
        _kernel(FLOAT32).fill(block.data_ptr(), len(part), dim, np.uint64(key), first + begin * stride, *rule)
        part.copy_(block[: len(part)])


STREAM = np.dtype([("key", np.uint64), ("a", np.float64), ("b", np.float64)])


def initialize_slots(
    out: Tensor, places: np.ndarray, slots: np.ndarray, pieces: np.ndarray, streams: np.ndarray, distribution: str
) -> None:
    """Writes the initial values of the rows in `slots` into `out[places]`, whatever tables they are of.

    Args:
        out: `[n, D]`, float32, float64 or bfloat16, contiguous.
        places: uint32 `[m]`, where to write.
        slots: uint32 `[m]`, in a rank's memory.
        pieces: int64 `[P, 4]`, in order: the first slot of each run of rows, its row there, rows from one slot to the
            next, and its table. Every slot belongs to the last piece that does not begin behind it.
        streams: STREAM `[tables]`, each table's key, a and b, as in `initialize`.
        distribution: as in `initialize`.

    Example:
        >>> rows, pieces = torch.empty(2, 4), np.array([[0, 0, 1, 0], [10, 1, 2, 1]])
        >>> streams = np.array([(5, -1.0, 1.0), (7, -1.0, 1.0)], STREAM)
        >>> slots = np.array([10, 11], np.uint32)
        >>> initialize_slots(rows, np.array([0, 1], np.uint32), slots, pieces, streams, "uniform")
        >>> expected = torch.empty(2, 4)
        >>> initialize(expected, 7, first=1, stride=2, distribution="uniform", a=-1.0, b=1.0)
        >>> bool((rows == expected).all())
        True
    """
    rule = (slots, places, pieces, streams, DISTRIBUTIONS[distribution])
    if out.dtype != torch.bfloat16:
        fill_slots = _kernel(FLOAT64 if out.dtype == torch.float64 else FLOAT32).fill_slots
        fill_slots(out.data_ptr(), out.shape[1], *rule)
        return
    block = torch.empty(len(slots), out.shape[1], dtype=torch.float32, device="cpu")
    _kernel(FLOAT32).fill_slots(
        block.data_ptr(), out.shape[1], slots, np.arange(len(slots), dtype=np.uint32), *rule[2:]
    )
    out[torch.from_numpy(places.astype(np.int64))] = block.to(torch.bfloat16)
