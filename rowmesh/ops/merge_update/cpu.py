"""Merge of duplicate keys fused with the optimizer's update, on a CPU."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from rowmesh.ops.memory import Buffer, Scratch, round_up
from rowmesh.ops.merge_update.handles import HostMerged, Unsummed
from rowmesh.ops.pool.cpu import add_cells, first_cell
from rowmesh.ops.route.cpu import PREFETCHED_ROW_BYTES
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
    prefetch,
    scale,
    splat,
    sqrt_row,
    store_i64,
    store_row,
    store_scalar,
    store_u32,
    zero_row,
)

AHEAD = 16
UNSUMMED_AHEAD = 32
GRADIENT_AHEAD = 6
END = 0xFFFFFFFF
SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM = 0, 1, 2, 3
RULES = {"sgd": SGD, "adagrad": ADAGRAD, "row_wise_adagrad": ROW_WISE_ADAGRAD, "adam": ADAM}
NUM_WITHOUT_DECAY = 6  # numbers of a rule; one that decays has one more
_SOURCE = struct.Struct("=3q")  # addresses of slots, offsets and gradients
_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)


@kernel
def _merge(
    num_segments,
    num_sources,
    sources,
    gradient_bytes,
    arena,
    row_bytes,
    table,
    merged_slots,
    merged_offsets,
    heads,
    tails,
    nexts,
    addresses,
):
    """Chains the requests of all sources for each distinct slot, in the order of the sources.

    sources: int64 `[sources, 3]`, the addresses of each source's slots, segment offsets and gradients, in its own
    numbering; entries are numbered source by source. A cell of the table is slot << 32 | (merged index + 1), and 0
    where it is free. Returns the number of distinct slots.

    The slots of one source are distinct, so where it is alone there is nothing to look for.
    """
    if num_sources == 1:
        slots, offsets, gradients = load_i64(sources), load_i64(sources + 8), load_i64(sources + 16)
        begin = load_i64(offsets)
        for s in range(num_segments + 1):
            store_i64(merged_offsets + 8 * s, load_i64(offsets + 8 * s) - begin)
        count = load_i64(offsets + 8 * num_segments) - begin
        for m in range(count):
            slot = load_u32(slots + 4 * (begin + m))
            store_u32(merged_slots + 4 * m, slot)
            if row_bytes <= PREFETCHED_ROW_BYTES:
                prefetch(arena + slot * row_bytes, 64)
            store_u32(heads + 4 * m, m)
            store_u32(nexts + 4 * m, END)
            store_i64(addresses + 8 * m, gradients + (begin + m) * gradient_bytes)
        return count
    merged = 0
    for s in range(num_segments):
        store_i64(merged_offsets + 8 * s, merged)
        count = 0
        for r in range(num_sources):
            offsets = load_i64(sources + 24 * r + 8)
            count += load_i64(offsets + 8 * s + 8) - load_i64(offsets + 8 * s)
        if count == 0:
            continue
        bits = 4
        while (1 << bits) < 2 * count:
            bits += 1
        shift, mask = np.uint64(64 - bits), (8 << bits) - 1
        for line in range(table, table + (8 << bits), 64):
            store_row(line, zero_row(16, FLOAT32), FLOAT32)
        entry_base = 0
        for r in range(num_sources):
            list_, offsets = load_i64(sources + 24 * r), load_i64(sources + 24 * r + 8)
            gradients = load_i64(sources + 24 * r + 16)
            begin = load_i64(offsets)
            for position in range(load_i64(offsets + 8 * s), load_i64(offsets + 8 * s + 8)):
                entry = entry_base + position - begin
                store_i64(addresses + 8 * entry, gradients + position * gradient_bytes)
                store_u32(nexts + 4 * entry, END)
                slot = load_u32(list_ + 4 * position)
                cell = table + 8 * np.int64((np.uint64(slot) * _FIBONACCI) >> shift)
                while True:
                    held = load_i64(cell)
                    if held == 0:
                        store_i64(cell, (slot << 32) | (merged + 1))
                        store_u32(merged_slots + 4 * merged, slot)
                        if row_bytes <= PREFETCHED_ROW_BYTES:
                            prefetch(arena + slot * row_bytes, 64)
                        store_u32(heads + 4 * merged, entry)
                        store_u32(tails + 4 * merged, entry)
                        merged += 1
                        break
                    if np.uint64(held ^ (slot << 32)) <= np.uint64(0xFFFFFFFF):
                        m = (held & 0xFFFFFFFF) - 1
                        store_u32(nexts + 4 * load_u32(tails + 4 * m), entry)
                        store_u32(tails + 4 * m, entry)
                        break
                    cell = table + (cell - table + 8 & mask)
            entry_base += load_i64(offsets + 8 * num_segments) - begin
    store_i64(merged_offsets + 8 * num_segments, merged)
    return merged


class Merger(HostMerged):
    """Owner-side unique over the requests of all ranks; buffers are kept from step to step.

    Args:
        num_segments: tables of the group.
        arena, row_bytes: the rows that will be read or updated next, for prefetching.

    Attributes:
        merged_offsets: int64 `[S + 1]`, the distinct slots of each segment.
    """

    def __init__(self, num_segments: int, arena: int = 0, row_bytes: int = 1 << 30) -> None:
        self._node_ends = Buffer(64)
        super().__init__(node_ends=self._node_ends.address)
        self.merged_offsets = np.zeros(num_segments + 1, np.int64)
        self._num_segments = num_segments
        self._rows = (arena, row_bytes)
        self._offsets_address: int = self.merged_offsets.ctypes.data
        self._sources = Buffer(64)
        self._most_entries = 0
        self._make_room(16)

    def _make_room(self, num_entries: int) -> None:
        """For all that depends on the number of requests."""
        self._most_entries = num_entries + num_entries // 4
        parts = [round_up(size * self._most_entries, 64) for size in (4, 4, 4, 4, 8, 32)]
        self._memory = Buffer(sum(parts))
        ends = accumulate(parts, initial=self._memory.address)
        self.merged_slots, self.heads, self._tails, self.nexts, self.addresses, self._table, _ = ends

    def __call__(
        self,
        sources: Sequence[tuple[int, int, int]],
        gradient_bytes: int,
        num_entries: int,
        node_ends: Sequence[int] = (),
    ) -> None:
        """Merges.

        Args:
            sources: addresses of each source's slots, segment offsets and gradients, in the source's own numbering.
            gradient_bytes: of one gradient.
            num_entries: requests of all sources together.
            node_ends: where they come from several nodes, one past each node's last entry.
        """
        self.num_nodes = max(len(node_ends), 1)
        if len(node_ends) > 1:
            if 8 * len(node_ends) > self._node_ends.num_bytes:
                self._node_ends = Buffer(8 * len(node_ends))
                self.node_ends = self._node_ends.address
            self._node_ends.array(np.int64, len(node_ends))[:] = node_ends
        if num_entries > self._most_entries:
            self._make_room(num_entries)
        if 24 * len(sources) > self._sources.num_bytes:
            self._sources = Buffer(24 * len(sources))
        for number, source in enumerate(sources):  # one array of all would cost more than merging a small batch
            _SOURCE.pack_into(self._sources.bytes.data, 24 * number, *source)
        self.num_merged = _merge(
            self._num_segments,
            len(sources),
            self._sources.address,
            gradient_bytes,
            *self._rows,
            self._table,
            self.merged_slots,
            self._offsets_address,
            self.heads,
            self._tails,
            self.nexts,
            self.addresses,
        )


# Inlined into the kernels with dim, storage, … as constants. (A kernel that called other compiled closures would miss
# Numba's disk cache, whose key hashes what a closure holds.)
@inlined
def _prefetch_row(slot, arena, state1, state2, rule, row_bytes, state_bytes):
    prefetch(arena + slot * row_bytes, row_bytes)
    if rule != SGD:
        prefetch(state1 + slot * state_bytes, state_bytes)
        if rule == ADAM:
            prefetch(state2 + slot * state_bytes, state_bytes)


@inlined
def change_row(
    gradient,
    slot,
    arena,
    state1,
    state2,
    lr,
    eps,
    beta1,
    beta2,
    rest1,
    rest2,
    correction,
    decay,
    size,
    dim,
    storage,
    out,
    rule,
    decays,
    row_bytes,
    state_bytes,
):
    """One row and its state, given the row's gradient; the formulas of `rowmesh.optim.rules`."""
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
def _prefetch_gradients(heads, nexts, addresses, m, out_bytes):
    """The first two gradients of a chain, the second only where there is one."""
    soon = load_u32(heads + 4 * m)
    prefetch(load_i64(addresses + 8 * soon), out_bytes)
    after = load_u32(nexts + 4 * soon)
    prefetch(load_i64(addresses + 8 * (soon if after == END else after)), out_bytes)


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
        lr_,
        scaling_,
        eps_,
        beta1_,
        beta2_,
        correction_,
        decay_,
    ):
        """Sums the chains of the distinct slots first … end − 1 and updates their rows."""
        lr, eps, beta1, beta2 = SCALAR(lr_), SCALAR(eps_), SCALAR(beta1_), SCALAR(beta2_)
        # 1 − β before it is rounded: from a float32 β₂ of 0.999 it would be off by 1e-5.
        rest1, rest2 = SCALAR(1.0 - beta1_), SCALAR(1.0 - beta2_)
        scaling, correction, decay, size = SCALAR(scaling_), SCALAR(correction_), SCALAR(decay_), SCALAR(DIM)
        for m in range(first, end):
            ahead = load_u32(slots + 4 * min(m + AHEAD, end - 1))
            _prefetch_row(ahead, arena, state1, state2, RULE, ROW_BYTES, STATE_BYTES)
            _prefetch_gradients(heads, nexts, addresses, min(m + GRADIENT_AHEAD, end - 1), OUT_BYTES)
            total = _sum_chain(load_u32(heads + 4 * m), nexts, addresses, node_ends, num_nodes, DIM, OUT)
            slot = load_u32(slots + 4 * m)
            change_row(
                scale(scaling, total),
                slot,
                arena,
                state1,
                state2,
                lr,
                eps,
                beta1,
                beta2,
                rest1,
                rest2,
                correction,
                decay,
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
        lr_,
        scaling_,
        eps_,
        beta1_,
        beta2_,
        correction_,
        decay_,
    ):
        """Sums the output gradients in the cells of each slot, in order, and updates its row."""
        lr, eps, beta1, beta2 = SCALAR(lr_), SCALAR(eps_), SCALAR(beta1_), SCALAR(beta2_)
        rest1, rest2 = SCALAR(1.0 - beta1_), SCALAR(1.0 - beta2_)
        scaling, correction, decay, size = SCALAR(scaling_), SCALAR(correction_), SCALAR(decay_), SCALAR(DIM)
        last = load_u32(pointers + 4 * count) - 1
        for m in range(count):
            ahead = load_u32(slots + 4 * min(m + UNSUMMED_AHEAD, count - 1))
            _prefetch_row(ahead, arena, state1, state2, RULE, ROW_BYTES, STATE_BYTES)
            u = load_u32(uniques + 4 * m)
            j, end = load_u32(pointers + 4 * u), load_u32(pointers + 4 * u + 4)
            total = first_cell(grad, cells, weights, j, last, DIM, OUT, ELEMENT, OUT_BYTES)
            total = add_cells(total, grad, cells, weights, j + 1, end, last, DIM, OUT, ELEMENT, OUT_BYTES)
            change_row(
                scale(scaling, total),
                load_u32(slots + 4 * m),
                arena,
                state1,
                state2,
                lr,
                eps,
                beta1,
                beta2,
                rest1,
                rest2,
                correction,
                decay,
                size,
                DIM,
                STORAGE,
                OUT,
                RULE,
                DECAYS,
                ROW_BYTES,
                STATE_BYTES,
            )

    return SimpleNamespace(update_merged=update_merged, update_unsummed=update_unsummed)


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


def merge(merger: Merger, slots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Merges lists of slots; see `rowmesh.ops.merge_update.merge`."""
    sizes = [len(part) for part in slots]
    offsets = np.zeros((len(sizes), 2), np.int64)
    offsets[:, 1] = sizes
    begin, addresses = offsets.ctypes.data, [part.data_ptr() for part in gradients] or [0] * len(sizes)
    sources = [
        (part.data_ptr(), begin + 16 * number, address)
        for number, (part, address) in enumerate(zip(slots, addresses, strict=True))
    ]
    merger(sources, gradients[0].shape[1] * gradients[0].itemsize if gradients else 0, sum(sizes))


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


@kernel
def chain_singles(count, gradients, gradient_bytes, heads, nexts, addresses):
    """Chains of one entry each, gradient after gradient, for slots that are distinct already."""
    for m in range(count):
        store_u32(heads + 4 * m, m)
        store_u32(nexts + 4 * m, END)
        store_i64(addresses + 8 * m, gradients + m * gradient_bytes)


class Singles(HostMerged):
    """Distinct slots with one gradient each."""

    def __init__(self) -> None:
        super().__init__()
        self._scratch = [Scratch() for _ in range(3)]

    def __call__(self, slots: int, gradients: int, gradient_bytes: int, count: int) -> None:
        """`slots` and `gradients` are addresses: uint32 `[count]`, and one gradient after the other."""
        self.merged_slots, self.num_merged = slots, count
        self.heads, self.nexts, self.addresses = (
            scratch.reserve(count * size) for scratch, size in zip(self._scratch, (4, 4, 8), strict=True)
        )
        chain_singles(count, gradients, gradient_bytes, self.heads, self.nexts, self.addresses)
