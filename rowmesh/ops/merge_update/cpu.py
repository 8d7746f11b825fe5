"""The sums of merged gradients fused with the optimizer's update, on a CPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from rowmesh.ops.merge_update.handles import END, HostMerged, Unsummed, UnsummedBySource
from rowmesh.ops.pool.cpu import add_cells, first_cell
from rowmesh.ops.simd import (
    COMPUTE_BYTES,
    FLOAT32,
    FLOAT64,
    STORAGE,
    STORAGE_BYTES,
    add,
    axpy,
    div,
    dot,
    inlined,
    kernel,
    load_i64,
    load_row,
    load_scalar,
    load_u32,
    mul,
    prefetch_far,
    scale,
    splat,
    sqrt_row,
    store_row,
    store_scalar,
)

AHEAD = 32
GRADIENT_AHEAD = 16
SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM = 0, 1, 2, 3
RULES = {"sgd": SGD, "adagrad": ADAGRAD, "row_wise_adagrad": ROW_WISE_ADAGRAD, "adam": ADAM}
NUM_WITHOUT_DECAY = 6  # numbers of a rule; one that decays has one more


# Inlined into the kernels with dim, storage, … as constants. (A kernel that called other compiled closures would miss
# Numba's disk cache, whose key hashes what a closure holds.)
@inlined
def _prefetch_row(slot, arena, state1, state2, rule, row_bytes, state_bytes):
    prefetch_far(arena + slot * row_bytes, row_bytes)
    if rule != SGD:
        prefetch_far(state1 + slot * state_bytes, state_bytes)
        if rule == ADAM:
            prefetch_far(state2 + slot * state_bytes, state_bytes)


@inlined
def change_row(
    gradient,
    slot,
    arena,
    state1,
    state2,
    scalars,
    size,
    dim,
    storage,
    out,
    rule,
    decays,
    row_bytes,
    state_bytes,
):
    """One row and its state, given its summed gradient: formulas of `tables.update_rules`, numbers of `rounded`."""
    lr, scaling, eps, beta1, beta2, rest1, rest2, correction, decay = scalars
    gradient = scale(scaling, gradient)
    address = arena + slot * row_bytes
    row = load_row(address, dim, storage)
    if decays:
        if rule == ADAM:
            row = scale(decay, row)
        else:
            gradient = axpy(decay, row, gradient)
    at1, at2 = state1 + slot * state_bytes, state2 + slot * state_bytes
    if rule == SGD:
        row = axpy(-lr, gradient, row)
    elif rule == ADAGRAD:
        total = add(load_row(at1, dim, out), mul(gradient, gradient))
        store_row(at1, total, out)
        row = axpy(-lr, div(gradient, add(scale(correction, sqrt_row(total)), splat(eps, dim, out))), row)
    elif rule == ROW_WISE_ADAGRAD:
        mean = load_scalar(at1, out) + dot(gradient, gradient) / size
        store_scalar(at1, mean, out)
        row = axpy(-lr / (correction * np.sqrt(mean) + eps), gradient, row)
    else:
        first = axpy(beta1, load_row(at1, dim, out), scale(rest1, gradient))
        second = axpy(beta2, load_row(at2, dim, out), scale(rest2, mul(gradient, gradient)))
        store_row(at1, first, out)
        store_row(at2, second, out)
        root = add(scale(correction, sqrt_row(second)), splat(eps, dim, out))
        row = axpy(-lr, div(first, root), row)
    store_row(address, row, storage)


@inlined
def rounded(numbers, scalar):
    """The numbers of a rule in the arithmetic of rows: lr, scaling, eps, β₁, β₂, 1 − β₁, 1 − β₂, correction, decay."""
    lr, scaling, eps, beta1, beta2, correction, decay = numbers
    rates, betas = (scalar(lr), scalar(scaling), scalar(eps)), (scalar(beta1), scalar(beta2))
    # 1 − β before it is rounded: from a float32 β₂ of 0.999 it would be off by 1e-5.
    rests = scalar(1.0 - beta1), scalar(1.0 - beta2)
    return rates + betas + rests + (scalar(correction), scalar(decay))


@inlined
def _prefetch_gradients(heads, nexts, addresses, m, out_bytes):
    """The first two gradients of a chain, the second only where there is one."""
    soon = load_u32(heads + 4 * m)
    prefetch_far(load_i64(addresses + 8 * soon), out_bytes)
    after = load_u32(nexts + 4 * soon)
    prefetch_far(load_i64(addresses + 8 * (soon if after == END else after)), out_bytes)


@inlined
def _sum_chain(entry, nexts, addresses, node_ends, num_nodes, dim, out):
    """The sum of a chain's gradients: those of a node first, then the sums of the nodes, each in order."""
    part = load_row(load_i64(addresses + 8 * entry), dim, out)
    if num_nodes == 1:
        entry = load_u32(nexts + 4 * entry)
        while entry != END:
            part = add(part, load_row(load_i64(addresses + 8 * entry), dim, out))
            entry = load_u32(nexts + 4 * entry)
        return part
    total, is_first, node = part, True, 0
    while True:
        while entry >= load_i64(node_ends + 8 * node):
            node += 1
        entry = load_u32(nexts + 4 * entry)
        while entry < load_i64(node_ends + 8 * node):
            part = add(part, load_row(load_i64(addresses + 8 * entry), dim, out))
            entry = load_u32(nexts + 4 * entry)
        total = part if is_first else add(total, part)
        if entry == END:
            return total
        is_first = False
        part = load_row(load_i64(addresses + 8 * entry), dim, out)


@inlined
def _sum_by_source(grad, cells, weights, j, end, last, ends, per_node, dim, out, element, out_bytes):
    """The sum of the gradients in cells j … end − 1: of a source first, then of a node, then of all, each in order."""
    source = 0
    while load_u32(cells + 4 * j) >= load_i64(ends + 8 * source):
        source += 1
    row = first_cell(grad, cells, weights, j, last, dim, out, element, out_bytes)
    j += 1
    total, of_node, is_first_node, is_first = row, row, True, True
    while True:
        stop = load_i64(ends + 8 * source)
        k = j
        while k < end and load_u32(cells + 4 * k) < stop:
            k += 1
        row = add_cells(row, grad, cells, weights, j, k, last, dim, out, element, out_bytes)
        of_node = row if is_first else add(of_node, row)
        is_first, j = False, k
        if j == end:
            return of_node if is_first_node else add(total, of_node)
        node = source // per_node
        while load_u32(cells + 4 * j) >= load_i64(ends + 8 * source):
            source += 1
        row = first_cell(grad, cells, weights, j, last, dim, out, element, out_bytes)
        j += 1
        if source // per_node != node:
            total = of_node if is_first_node else add(total, of_node)
            is_first_node, is_first = False, True


@functools.cache
def update_kernels(dim: int, storage: int, rule_name: str, decays: bool = False) -> SimpleNamespace:
    """The update kernels of one rule, with or without decay, for one dimension and storage, compiled at the first call.

    Their last arguments are the learning rate, what gradients are multiplied by, eps, β₁, β₂, a correction, which √v is
    multiplied by before eps is added: c^-½ for a moment scale of c; and the decay, which only those that decay read.
    For Adam the learning rate is lr / (1 − β₁ᵗ) and the correction (c · (1 − β₂ᵗ))^-½; SGD takes no notice of it.
    """
    DIM, STORAGE, RULE, DECAYS = dim, storage, RULES[rule_name], decays
    ROW_BYTES = dim * STORAGE_BYTES[storage]
    ELEMENT = COMPUTE_BYTES[storage]
    OUT = FLOAT64 if storage == FLOAT64 else FLOAT32
    OUT_BYTES = dim * ELEMENT
    STATE_BYTES = ELEMENT if RULE == ROW_WISE_ADAGRAD else OUT_BYTES
    SCALAR = np.float64 if storage == FLOAT64 else np.float32

    @kernel
    def update_merged(
        slots,
        heads,
        nexts,
        addresses,
        first,
        end,
        node_ends,
        num_nodes,
        arena,
        state1,
        state2,
        *numbers,
    ):
        """Sums the chains of the distinct slots first … end − 1 and updates their rows."""
        scalars, size = rounded(numbers, SCALAR), SCALAR(DIM)
        for m in range(first, end):
            ahead = load_u32(slots + 4 * min(m + AHEAD, end - 1))
            _prefetch_row(ahead, arena, state1, state2, RULE, ROW_BYTES, STATE_BYTES)
            _prefetch_gradients(heads, nexts, addresses, min(m + GRADIENT_AHEAD, end - 1), OUT_BYTES)
            total = _sum_chain(load_u32(heads + 4 * m), nexts, addresses, node_ends, num_nodes, DIM, OUT)
            slot = load_u32(slots + 4 * m)
            change_row(
                total,
                slot,
                arena,
                state1,
                state2,
                scalars,
                size,
                DIM,
                STORAGE,
                OUT,
                RULE,
                DECAYS,
                ROW_BYTES,
                STATE_BYTES,
            )

    @kernel
    def update_unsummed(
        grad,
        pointers,
        cells,
        weights,
        uniques,
        slots,
        count,
        arena,
        state1,
        state2,
        *numbers,
    ):
        """Sums the output gradients in the cells of each slot, in order, and updates its row."""
        scalars, size = rounded(numbers, SCALAR), SCALAR(DIM)
        last = load_u32(pointers + 4 * count) - 1
        for m in range(count):
            ahead = load_u32(slots + 4 * min(m + AHEAD, count - 1))
            _prefetch_row(ahead, arena, state1, state2, RULE, ROW_BYTES, STATE_BYTES)
            u = load_u32(uniques + 4 * m)
            j, end = load_u32(pointers + 4 * u), load_u32(pointers + 4 * u + 4)
            total = first_cell(grad, cells, weights, j, last, DIM, OUT, ELEMENT, OUT_BYTES)
            total = add_cells(total, grad, cells, weights, j + 1, end, last, DIM, OUT, ELEMENT, OUT_BYTES)
            change_row(
                total,
                load_u32(slots + 4 * m),
                arena,
                state1,
                state2,
                scalars,
                size,
                DIM,
                STORAGE,
                OUT,
                RULE,
                DECAYS,
                ROW_BYTES,
                STATE_BYTES,
            )

    @kernel
    def update_by_source(
        grad,
        pointers,
        cells,
        weights,
        uniques,
        slots,
        count,
        ends,
        per_node,
        arena,
        state1,
        state2,
        *numbers,
    ):
        """The same, source by source."""
        scalars, size = rounded(numbers, SCALAR), SCALAR(DIM)
        last = load_u32(pointers + 4 * count) - 1
        for m in range(count):
            ahead = load_u32(slots + 4 * min(m + AHEAD, count - 1))
            _prefetch_row(ahead, arena, state1, state2, RULE, ROW_BYTES, STATE_BYTES)
            u = load_u32(uniques + 4 * m)
            j, end = load_u32(pointers + 4 * u), load_u32(pointers + 4 * u + 4)
            total = _sum_by_source(grad, cells, weights, j, end, last, ends, per_node, DIM, OUT, ELEMENT, OUT_BYTES)
            change_row(
                total,
                load_u32(slots + 4 * m),
                arena,
                state1,
                state2,
                scalars,
                size,
                DIM,
                STORAGE,
                OUT,
                RULE,
                DECAYS,
                ROW_BYTES,
                STATE_BYTES,
            )

    return SimpleNamespace(
        update_merged=update_merged, update_unsummed=update_unsummed, update_by_source=update_by_source
    )


def update(
    rows: Tensor,
    state: Sequence[Tensor],
    merged: HostMerged,
    rule: str,
    numbers: tuple[float, ...],
    part: tuple[int, int] | None = None,
) -> None:
    """Changes the rows of merged slots and their states; see `rowmesh.ops.merge_update.update`."""
    if rows.is_cuda or rows.dim() != 2 or not rows.is_contiguous():
        raise ValueError(f"rows must be contiguous [R, D] in the host's memory, got {tuple(rows.shape)} {rows.device}")
    first, end = part or (0, merged.num_merged)
    state1 = state[0].data_ptr() if state else 0
    state2 = state[1].data_ptr() if len(state) > 1 else 0
    decays = len(numbers) > NUM_WITHOUT_DECAY
    numbers = numbers if decays else (*numbers, 0.0)
    kernels = update_kernels(rows.shape[1], STORAGE[rows.dtype], rule, decays)
    if isinstance(merged, Unsummed):
        if part is not None:
            raise ValueError(f"slots whose gradients are not summed are updated all at once, not the part {part}")
        grad, slots = merged.gradient.data_ptr(), merged.merged_slots
        cells = grad, merged.pointers, merged.cells, merged.weights, merged.uniques, slots, merged.num_merged
        if isinstance(merged, UnsummedBySource):
            sources = merged.ends.ctypes.data, merged.per_node
            kernels.update_by_source(*cells, *sources, rows.data_ptr(), state1, state2, *numbers)
        else:
            kernels.update_unsummed(*cells, rows.data_ptr(), state1, state2, *numbers)
        return
    kernels.update_merged(
        merged.merged_slots,
        merged.heads,
        merged.nexts,
        merged.addresses,
        first,
        end,
        merged.node_ends,
        merged.num_nodes,
        rows.data_ptr(),
        state1,
        state2,
        *numbers,
    )


@functools.cache
def sum_kernels(dim: int, storage: int) -> SimpleNamespace:
    """The kernels that sum chains without updating, for one dimension and storage."""
    DIM = dim
    OUT = FLOAT64 if storage == FLOAT64 else FLOAT32
    OUT_BYTES = dim * COMPUTE_BYTES[storage]

    @kernel
    def sum_merged(heads, nexts, addresses, first, end, node_ends, num_nodes, out):
        """`out[i]` = the sum that `update_merged` would apply to distinct slot first + i."""
        for m in range(first, end):
            _prefetch_gradients(heads, nexts, addresses, min(m + GRADIENT_AHEAD, end - 1), OUT_BYTES)
            total = _sum_chain(load_u32(heads + 4 * m), nexts, addresses, node_ends, num_nodes, DIM, OUT)
            store_row(out + (m - first) * OUT_BYTES, total, OUT)

    return SimpleNamespace(sum_merged=sum_merged)


def sum_merged(merged: HostMerged, out: Tensor, row: int, part: tuple[int, int] | None) -> None:
    """Sums gradients; see `rowmesh.ops.merge_update.sum_merged`."""
    if isinstance(merged, Unsummed):
        raise TypeError("gradients that the update sums are nowhere else; sum the look-up first")
    dim, (first, end) = out.shape[1], part or (0, merged.num_merged)
    chains, nodes = (merged.heads, merged.nexts, merged.addresses), (merged.node_ends, merged.num_nodes)
    of_row = sum_kernels(dim, STORAGE[out.dtype])
    of_row.sum_merged(*chains, first, end, *nodes, out.data_ptr() + row * dim * out.itemsize)


def copy_slots(merged: HostMerged, out: Tensor, at: int, part: tuple[int, int] | None) -> None:
    """Copies distinct slots; see `rowmesh.ops.merge_update.copy_slots`."""
    first, end = part or (0, merged.num_merged)
    if end > first:
        ctypes.memmove(out.data_ptr() + 4 * at, merged.merged_slots + 4 * first, 4 * (end - first))
