"""Merge of duplicate keys fused with the optimizer's update, on a CPU."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import numpy as np
from numba import njit

from rowmesh.ops.memory import Scratch
from rowmesh.ops.simd import (
    COMPUTE_BYTES,
    FLOAT32,
    FLOAT64,
    KERNEL,
    STORAGE_BYTES,
    add,
    axpy,
    div,
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
    sum_squares,
)

AHEAD = 16
GRADIENT_AHEAD = 6
END = 0xFFFFFFFF
SGD, ADAGRAD, ROW_WISE_ADAGRAD, ADAM = 0, 1, 2, 3
RULES = {"sgd": SGD, "adagrad": ADAGRAD, "row_wise_adagrad": ROW_WISE_ADAGRAD, "adam": ADAM}
_FIBONACCI = np.uint64(0x9E3779B97F4A7C15)


@njit(**KERNEL)
def _merge(
    num_segments, num_sources, slots, segment_offsets, gradients, gradient_bytes,
    table, epoch, merged_slots, merged_offsets, heads, tails, nexts, addresses,
):  # fmt: skip
    """Chains the requests of all sources for each distinct slot, in the order of the sources.

    slots, segment_offsets, gradients: int64 `[sources]`, addresses of lists in each source's own numbering; entries
    are numbered source by source. Returns (distinct slots, last epoch).
    """
    merged = 0
    for s in range(num_segments):
        store_i64(merged_offsets + 8 * s, merged)
        count = 0
        for r in range(num_sources):
            offsets = load_i64(segment_offsets + 8 * r)
            count += load_i64(offsets + 8 * s + 8) - load_i64(offsets + 8 * s)
        if count == 0:
            continue
        epoch += 1
        bits = 4
        while (1 << bits) < 2 * count:
            bits += 1
        shift, mask = np.uint64(64 - bits), (16 << bits) - 1
        entry_base = 0
        for r in range(num_sources):
            offsets, list_, grad = (
                load_i64(segment_offsets + 8 * r),
                load_i64(slots + 8 * r),
                load_i64(gradients + 8 * r),
            )
            begin = load_i64(offsets)
            for position in range(load_i64(offsets + 8 * s), load_i64(offsets + 8 * s + 8)):
                entry = entry_base + position - begin
                store_i64(addresses + 8 * entry, grad + position * gradient_bytes)
                store_u32(nexts + 4 * entry, END)
                slot = load_u32(list_ + 4 * position)
                cell = table + 16 * np.int64((np.uint64(slot) * _FIBONACCI) >> shift)
                while True:
                    meta = load_i64(cell + 8)
                    if (meta >> 32) != epoch:
                        store_i64(cell, slot)
                        store_i64(cell + 8, (epoch << 32) | merged)
                        store_u32(merged_slots + 4 * merged, slot)
                        store_u32(heads + 4 * merged, entry)
                        store_u32(tails + 4 * merged, entry)
                        merged += 1
                        break
                    if load_i64(cell) == slot:
                        m = meta & 0xFFFFFFFF
                        store_u32(nexts + 4 * load_u32(tails + 4 * m), entry)
                        store_u32(tails + 4 * m, entry)
                        break
                    cell = table + (cell - table + 16 & mask)
            entry_base += load_i64(offsets + 8 * num_segments) - begin
    store_i64(merged_offsets + 8 * num_segments, merged)
    return merged, epoch


class Merger:
    """Owner-side unique over the requests of all ranks; buffers are kept from step to step."""

    def __init__(self, num_segments: int) -> None:
        self.num_segments = num_segments
        self.merged_offsets = np.zeros(num_segments + 1, np.int64)
        self.num_merged = 0
        self.merged_slots = self.heads = self.nexts = self.addresses = 0
        self._scratch = [Scratch() for _ in range(5)]
        self._table = Scratch()
        self._epoch = 0

    def __call__(
        self, slots: np.ndarray, segment_offsets: np.ndarray, gradients: np.ndarray, gradient_bytes: int, num_entries: int
    ) -> None:  # fmt: skip
        """Merges; `num_entries` is the number of requests of all sources together."""
        self.merged_slots, self.heads, tails, self.nexts, self.addresses = (
            scratch.reserve(num_entries * size) for scratch, size in zip(self._scratch, (4, 4, 4, 4, 8), strict=True)
        )
        before = self._table.num_bytes
        table = self._table.reserve(64 * max(num_entries, 16))
        if self._table.num_bytes != before:
            self._epoch = 0  # fresh memory is zero
        elif self._epoch + self.num_segments >= (1 << 31) - 1:
            self._table.buffer.bytes[:] = 0
            self._epoch = 0
        self.num_merged, self._epoch = _merge(
            self.num_segments, len(slots), slots.ctypes.data, segment_offsets.ctypes.data, gradients.ctypes.data,
            gradient_bytes, table, self._epoch, self.merged_slots, self.merged_offsets.ctypes.data,
            self.heads, tails, self.nexts, self.addresses,
        )  # fmt: skip


# Inlined into the kernels with dim, storage, … as constants. (A kernel that called other compiled closures would miss
# Numba's disk cache, whose key hashes what a closure holds.)
@njit(inline="always", **KERNEL)
def _prefetch_row(slot, arena, state1, state2, rule, row_bytes, state_bytes):
    prefetch(arena + slot * row_bytes, row_bytes)
    if rule != SGD:
        prefetch(state1 + slot * state_bytes, state_bytes)
        if rule == ADAM:
            prefetch(state2 + slot * state_bytes, state_bytes)


@njit(inline="always", **KERNEL)
def _change_row(
    gradient, slot, arena, state1, state2, lr, eps, beta1, beta2, rest1, rest2, correction, size,
    dim, storage, out, rule, row_bytes, state_bytes,
):  # fmt: skip
    """One row and its state, given the row's gradient; the formulas of `rowmesh.optim.rules`."""
    address = arena + slot * row_bytes
    row = load_row(address, dim, storage)
    at1, at2 = state1 + slot * state_bytes, state2 + slot * state_bytes
    if rule == SGD:
        row = axpy(-lr, gradient, row)
    elif rule == ADAGRAD:
        total = add(load_row(at1, dim, out), mul(gradient, gradient))
        store_row(at1, total, out)
        row = axpy(-lr, div(gradient, add(sqrt_row(total), splat(eps, dim, out))), row)
    elif rule == ROW_WISE_ADAGRAD:
        mean = load_scalar(at1, out) + sum_squares(gradient) / size
        store_scalar(at1, mean, out)
        row = axpy(-lr / (np.sqrt(mean) + eps), gradient, row)
    else:
        first = axpy(beta1, load_row(at1, dim, out), scale(rest1, gradient))
        second = axpy(beta2, load_row(at2, dim, out), scale(rest2, mul(gradient, gradient)))
        store_row(at1, first, out)
        store_row(at2, second, out)
        root = add(scale(correction, sqrt_row(second)), splat(eps, dim, out))
        row = axpy(-lr, div(first, root), row)
    store_row(address, row, storage)


@functools.cache
def update_kernels(dim: int, storage: int, rule_name: str) -> SimpleNamespace:
    """The update kernels of one rule, for one dimension and storage, compiled at their first call.

    Their last arguments are the learning rate, what gradients are multiplied by, eps, β₁, β₂ and a correction. For Adam
    the learning rate is lr / (1 − β₁ᵗ) and the correction 1 / √(1 − β₂ᵗ); other rules take no notice of it.
    """
    DIM, STORAGE, RULE = dim, storage, RULES[rule_name]
    ROW_BYTES = dim * STORAGE_BYTES[storage]
    ELEMENT = COMPUTE_BYTES[storage]
    OUT = FLOAT64 if storage == FLOAT64 else FLOAT32
    OUT_BYTES = dim * ELEMENT
    STATE_BYTES = ELEMENT if RULE == ROW_WISE_ADAGRAD else OUT_BYTES
    SCALAR = np.float64 if storage == FLOAT64 else np.float32

    @njit(**KERNEL)
    def update_merged(
        slots, heads, nexts, addresses, num_merged, arena, state1, state2,
        lr_, scaling_, eps_, beta1_, beta2_, correction_,
    ):  # fmt: skip
        """Sums the chain of each distinct slot and updates its row."""
        lr, eps, beta1, beta2 = SCALAR(lr_), SCALAR(eps_), SCALAR(beta1_), SCALAR(beta2_)
        # 1 − β before it is rounded: from a float32 β₂ of 0.999 it would be off by 1e-5.
        rest1, rest2 = SCALAR(1.0 - beta1_), SCALAR(1.0 - beta2_)
        scaling, correction, size = SCALAR(scaling_), SCALAR(correction_), SCALAR(DIM)
        last = num_merged - 1
        for m in range(num_merged):
            ahead = load_u32(slots + 4 * min(m + AHEAD, last))
            _prefetch_row(ahead, arena, state1, state2, RULE, ROW_BYTES, STATE_BYTES)
            soon = load_u32(heads + 4 * min(m + GRADIENT_AHEAD, last))
            prefetch(load_i64(addresses + 8 * soon), OUT_BYTES)
            entry = load_u32(heads + 4 * m)
            total = load_row(load_i64(addresses + 8 * entry), DIM, OUT)
            entry = load_u32(nexts + 4 * entry)
            while entry != END:
                total = add(total, load_row(load_i64(addresses + 8 * entry), DIM, OUT))
                entry = load_u32(nexts + 4 * entry)
            slot = load_u32(slots + 4 * m)
            _change_row(
                scale(scaling, total), slot, arena, state1, state2, lr, eps, beta1, beta2, rest1, rest2, correction,
                size, DIM, STORAGE, OUT, RULE, ROW_BYTES, STATE_BYTES,
            )  # fmt: skip

    return SimpleNamespace(update_merged=update_merged)
