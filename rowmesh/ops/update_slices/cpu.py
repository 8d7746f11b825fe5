"""Update of touched slices on a CPU: one pass over a core that skips slices no rank read.

To the bit what `rowmesh.ops.tensor_train.cpu.update` does with the same gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rowmesh.ops.merge_update.cpu import RULES, change_row, rounded
from rowmesh.ops.simd import (
    FLOAT64,
    STORAGE,
    STORAGE_BYTES,
    inlined,
    kernel,
    load_i64,
    load_row,
    load_scalar,
)

_UPDATED = 16  # elements that an update alone changes at a time
_MOST_CHUNK = 64  # elements that an update changes at a time


def update_slices(
    core: Tensor, states: Sequence[Tensor], gradient: Tensor, touched: Tensor, rule: str, numbers: tuple[float, ...]
) -> None:
    """Changes the touched slices of a core and their states in place; see `rowmesh.ops.update_slices`."""
    state1, state2 = (states[k].data_ptr() if k < len(states) else 0 for k in range(2))
    given = (gradient.data_ptr(), touched.data_ptr(), len(core), core[0].nbytes)
    _update_kernel(STORAGE[core.dtype], rule)(*given, core.data_ptr(), state1, state2, *numbers)


@inlined
def change_slice(
    gradient,
    weight,
    state1,
    state2,
    slice_bytes,
    chunk_bytes,
    scalars,
    chunk,
    storage,
    rule,
):
    """A slice of a core and its state, given its gradient, a chunk of elements after the other as if they were rows."""
    for at in range(0, slice_bytes, chunk_bytes):
        change_row(
            load_row(gradient + at, chunk, storage),
            0,
            weight + at,
            state1 + at,
            state2 + at,
            scalars,
            chunk,
            chunk,
            storage,
            storage,
            rule,
            False,
            0,
            0,
        )


@inlined
def change_slices(
    count,
    slices,
    gradients,
    core,
    state1,
    state2,
    slice_bytes,
    chunk_bytes,
    scalars,
    chunk,
    storage,
    rule,
):
    """The slices of a core that are touched; their gradients follow each other."""
    for t in range(count):
        at = load_i64(slices + 8 * t) * slice_bytes
        change_slice(
            gradients + t * slice_bytes,
            core + at,
            state1 + at,
            state2 + at,
            slice_bytes,
            chunk_bytes,
            scalars,
            chunk,
            storage,
            rule,
        )


def chunk_of(elements: int) -> int:
    """The most elements, up to a limit, that a slice divides into."""
    return max(n for n in range(1, min(elements, _MOST_CHUNK) + 1) if elements % n == 0)


@functools.cache
def _update_kernel(storage: int, rule: str) -> Any:
    """The update of cores whose gradients are there already, compiled at its first call."""
    STORAGE, RULE, ELEMENT = storage, RULES[rule], STORAGE_BYTES[storage]
    SCALAR = np.float64 if STORAGE == FLOAT64 else np.float32
    CHUNK, CHUNK_BYTES = _UPDATED, ELEMENT * _UPDATED

    @kernel
    def update(
        gradients,
        touched,
        num_slices,
        slice_bytes,
        core,
        state1,
        state2,
        *numbers,
    ):
        """Updates the slices of one core whose element of `touched` is not 0; `gradients` is laid out like the core."""
        scalars = rounded((*numbers, 0.0), SCALAR)
        whole = slice_bytes - slice_bytes % CHUNK_BYTES
        for t in range(num_slices):
            if load_scalar(touched + t * ELEMENT, STORAGE) == 0:
                continue
            at = t * slice_bytes
            change_slice(
                gradients + at,
                core + at,
                state1 + at,
                state2 + at,
                whole,
                CHUNK_BYTES,
                scalars,
                CHUNK,
                STORAGE,
                RULE,
            )
            at += whole
            change_slice(
                gradients + at,
                core + at,
                state1 + at,
                state2 + at,
                slice_bytes - whole,
                ELEMENT,
                scalars,
                1,
                STORAGE,
                RULE,
            )

    return update
