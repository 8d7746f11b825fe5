"""Look-up and training of tensor-train rows on a CPU.

`arrange` sorts distinct ids by (i₂, i₁). Ids of equal (i₁, i₂) then stand together, a *prefix*, and prefixes of equal
i₂ too, a *group*: the product of a prefix is made once, all products of a group while their slice of G₂ is in the
cache, and the gradient of that slice is one matrix product over the whole group, which the update can follow at once.

Slices are read in place. Products are `[q₁·q₂, R₂]` each, in the order of the prefixes; rows and their gradients are in
the order of the distinct ids.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from rowmesh.ops.merge_update.cpu import RULES, change_row
from rowmesh.ops.simd import (
    FLOAT64,
    STORAGE_BYTES,
    copy_bytes,
    inlined,
    kernel,
    load_i64,
    load_row,
    load_scalar,
    load_u32,
    scale,
    store_i64,
    store_u32,
)
from rowmesh.ops.tensor_train.tile import lanes, multiply, multiply_transposed, tile_of

NO_RULE = -1
ARRANGED = 5  # int64 values that `arrange` counts
_UPDATED = 16  # elements that an update alone changes at a time
_MOST_CHUNK = 64  # elements that an update changes at a time


@dataclass(frozen=True)
class Constants:
    """What kernels are compiled for.

    Attributes:
        dim_factors: q₁, q₂, q₃.
        ranks: R₁, R₂.
        storage: of the cores and of all arithmetic, FLOAT32 or FLOAT64.
    """

    dim_factors: tuple[int, int, int]
    ranks: tuple[int, int]
    storage: int

    @property
    def slice_elements(self) -> tuple[int, int, int]:
        """Elements of a slice of each core."""
        (q1, q2, q3), (r1, r2) = self.dim_factors, self.ranks
        return q1 * r1, r1 * q2 * r2, q3 * r2

    @property
    def product_elements(self) -> int:
        """Elements of the product of a prefix."""
        return self.dim_factors[0] * self.dim_factors[1] * self.ranks[1]


@inlined
def _sort(keys, order, count, buckets, num_buckets, sorted_order):
    """A stable counting sort of `order` by `keys[order]`; afterwards `buckets[k]` is where k's part ends."""
    for k in range(num_buckets):
        store_u32(buckets + 4 * k, 0)
    for i in range(count):
        cell = buckets + 4 * load_u32(keys + 4 * i)
        store_u32(cell, load_u32(cell) + 1)
    total = 0
    for k in range(num_buckets):
        size = load_u32(buckets + 4 * k)
        store_u32(buckets + 4 * k, total)
        total += size
    for i in range(count):
        position = load_u32(order + 4 * i)
        cell = buckets + 4 * load_u32(keys + 4 * position)
        store_u32(sorted_order + 4 * load_u32(cell), position)
        store_u32(cell, load_u32(cell) + 1)


@inlined
def _touched(buckets, num_buckets, slots, touched):
    """Numbers the keys that occur, in place of where their parts end; returns how many there are."""
    found, begin = 0, 0
    for k in range(num_buckets):
        end = load_u32(buckets + 4 * k)
        store_u32(slots + 4 * k, found)
        if end > begin:
            store_i64(touched + 8 * found, k)
            found += 1
        begin = end
    return found


@kernel
def arrange(
    ids, count, num_rows, p1, p2, p3, keys, order, buckets,
    arranged, lasts, last_slots, starts, firsts, first_slots, group_starts, touched1, touched2, touched3, counts,
):  # fmt: skip
    """Sorts distinct ids by (i₂, i₁) and says where prefixes and groups begin.

    Args:
        ids: int64 `[count]`, distinct.
        keys, order: uint32 `[3 · count]` and `[count]`, scratch.
        buckets: uint32 `[2 · max(p₁, p₂, p₃)]`, scratch.
        arranged: uint32 `[count]` out: the position in `ids` of each id in sorted order.
        lasts: uint32 `[count]` out: i₃ of each, in that order; `last_slots`: which of the distinct i₃ that is.
        starts: uint32 `[prefixes + 1]` out: where each prefix begins in that order.
        firsts: uint32 `[prefixes]` out: i₁ of each; `first_slots`: which of the distinct i₁ that is.
        group_starts: uint32 `[groups + 1]` out: where each group begins among the prefixes.
        touched1, touched2, touched3: int64 out: the distinct i₁, i₂ (one a group) and i₃, ascending.
        counts: int64 `[5]` out: prefixes, groups, distinct i₁, distinct i₃, prefixes of the largest group.

    Returns:
        −1, or the position of an id that is not in [0, num_rows); nothing else is valid then.
    """
    keys2, keys3 = keys + 4 * count, keys + 8 * count
    for i in range(count):
        row = load_i64(ids + 8 * i)
        if row < 0 or row >= num_rows:
            return i
        prefix = row // p3
        first = prefix // p2
        store_u32(keys + 4 * i, first)
        store_u32(keys2 + 4 * i, prefix - first * p2)
        store_u32(keys3 + 4 * i, row - prefix * p3)
        store_u32(arranged + 4 * i, i)
    slots = buckets + 4 * max(p1, p2, p3)
    _sort(keys3, arranged, count, buckets, p3, order)
    store_i64(counts + 24, _touched(buckets, p3, slots, touched3))
    for i in range(count):  # for now by position in `ids`; the keys themselves are wanted in sorted order below
        store_u32(lasts + 4 * i, load_u32(slots + 4 * load_u32(keys3 + 4 * i)))
    _sort(keys, arranged, count, buckets, p1, order)
    store_i64(counts + 16, _touched(buckets, p1, slots, touched1))
    _sort(keys2, order, count, buckets, p2, arranged)
    for i in range(count):
        store_u32(last_slots + 4 * i, load_u32(lasts + 4 * load_u32(arranged + 4 * i)))
    prefixes, groups, largest, group_start = 0, 0, 0, 0
    before1, before2 = -1, -1
    for i in range(count):
        position = load_u32(arranged + 4 * i)
        first, second = load_u32(keys + 4 * position), load_u32(keys2 + 4 * position)
        store_u32(lasts + 4 * i, load_u32(keys3 + 4 * position))
        if second != before2:
            store_u32(group_starts + 4 * groups, prefixes)
            store_i64(touched2 + 8 * groups, second)
            groups += 1
            largest = max(largest, prefixes - group_start)
            group_start = prefixes
        if first != before1 or second != before2:
            store_u32(starts + 4 * prefixes, i)
            store_u32(firsts + 4 * prefixes, first)
            store_u32(first_slots + 4 * prefixes, load_u32(slots + 4 * first))
            prefixes += 1
        before1, before2 = first, second
    store_u32(starts + 4 * prefixes, count)
    store_u32(group_starts + 4 * groups, prefixes)
    store_i64(counts, prefixes)
    store_i64(counts + 8, groups)
    store_i64(counts + 32, max(largest, prefixes - group_start))
    return -1


@functools.cache
def forward_kernel(constants: Constants) -> Any:
    """The look-up, compiled at its first call."""
    (Q1, Q2, Q3), (R1, R2), STORAGE = constants.dim_factors, constants.ranks, constants.storage
    ELEMENT = STORAGE_BYTES[STORAGE]
    SLICE1, SLICE2, SLICE3 = (ELEMENT * n for n in constants.slice_elements)
    Q12, COLUMNS = Q1 * Q2, Q2 * R2
    PRODUCT, ROW, LINE, RANK1, RANK2, THIRD = (
        ELEMENT * n for n in (constants.product_elements, Q12 * Q3, COLUMNS, R1, R2, Q3)
    )
    BLOCK = min(tile_of(Q1, COLUMNS, STORAGE)[1], COLUMNS)
    BLOCKS, REST = divmod(COLUMNS, BLOCK)
    BLOCK_BYTES = ELEMENT * BLOCK

    @kernel
    def forward(
        core1, core2, core3, arranged, lasts, starts, firsts, group_starts, seconds, num_groups, keep, products, rows,
    ):  # fmt: skip
        """Products of all prefixes and rows of all distinct ids.

        `products` has room for all of them where `keep`, else for those of the largest group.
        """
        for g in range(num_groups):
            slice2 = core2 + load_i64(seconds + 8 * g) * SLICE2
            begin, end = load_u32(group_starts + 4 * g), load_u32(group_starts + 4 * g + 4)
            out = products + begin * PRODUCT if keep else products
            for j in range(BLOCKS):  # a block of G₂'s columns stays in the first-level cache for all of the group
                for p in range(begin, end):
                    multiply(
                        out + (p - begin) * PRODUCT + j * BLOCK_BYTES, core1 + load_u32(firsts + 4 * p) * SLICE1,
                        slice2 + j * BLOCK_BYTES, R1, Q1, BLOCK, LINE, RANK1, ELEMENT, LINE, 1, STORAGE,
                    )  # fmt: skip
            if REST:
                for p in range(begin, end):
                    multiply(
                        out + (p - begin) * PRODUCT + BLOCKS * BLOCK_BYTES,
                        core1 + load_u32(firsts + 4 * p) * SLICE1, slice2 + BLOCKS * BLOCK_BYTES,
                        R1, Q1, REST, LINE, RANK1, ELEMENT, LINE, 1, STORAGE,
                    )  # fmt: skip
            for p in range(begin, end):
                for i in range(load_u32(starts + 4 * p), load_u32(starts + 4 * p + 4)):
                    multiply_transposed(
                        rows + load_u32(arranged + 4 * i) * ROW, out + (p - begin) * PRODUCT,
                        core3 + load_u32(lasts + 4 * i) * SLICE3, Q12, Q3, R2, THIRD, RANK2, RANK2, 1, STORAGE,
                    )  # fmt: skip

    return forward


@inlined
def _change_slice(
    gradient, weight, state1, state2, slice_bytes, chunk_bytes,
    lr, scaling, eps, beta1, beta2, rest1, rest2, correction, chunk, storage, rule,
):  # fmt: skip
    """A slice of a core and its state, given its gradient, a chunk of elements after the other as if they were rows."""
    for at in range(0, slice_bytes, chunk_bytes):
        change_row(
            scale(scaling, load_row(gradient + at, chunk, storage)), 0, weight + at, state1 + at, state2 + at,
            lr, eps, beta1, beta2, rest1, rest2, correction, chunk, chunk, storage, storage, rule, 0, 0,
        )  # fmt: skip


@inlined
def _change_slices(
    count, slices, gradients, core, state1, state2, slice_bytes, chunk_bytes,
    lr, scaling, eps, beta1, beta2, rest1, rest2, correction, chunk, storage, rule,
):  # fmt: skip
    """The slices of a core that are touched; their gradients follow each other."""
    for t in range(count):
        at = load_i64(slices + 8 * t) * slice_bytes
        _change_slice(
            gradients + t * slice_bytes, core + at, state1 + at, state2 + at, slice_bytes, chunk_bytes,
            lr, scaling, eps, beta1, beta2, rest1, rest2, correction, chunk, storage, rule,
        )  # fmt: skip


def _chunk(elements: int) -> int:
    """The most elements, up to a limit, that a slice divides into."""
    return max(n for n in range(1, min(elements, _MOST_CHUNK) + 1) if elements % n == 0)


@functools.cache
def backward_kernel(constants: Constants, rule: str | None) -> Any:
    """The gradients of the cores, and their update where there is a rule; compiled at its first call."""
    (Q1, Q2, Q3), (R1, R2), STORAGE = constants.dim_factors, constants.ranks, constants.storage
    RULE, ELEMENT = NO_RULE if rule is None else RULES[rule], STORAGE_BYTES[STORAGE]
    SCALAR = np.float64 if STORAGE == FLOAT64 else np.float32
    SLICE1, SLICE2, SLICE3 = (ELEMENT * n for n in constants.slice_elements)
    CHUNK1, CHUNK2, CHUNK3 = (_chunk(n) for n in constants.slice_elements)
    CHUNK1_BYTES, CHUNK2_BYTES, CHUNK3_BYTES = (ELEMENT * n for n in (CHUNK1, CHUNK2, CHUNK3))
    Q12, COLUMNS = Q1 * Q2, Q2 * R2
    PRODUCT, ROW, LINE, RANK1, RANK2, THIRD = (
        ELEMENT * n for n in (constants.product_elements, Q12 * Q3, COLUMNS, R1, R2, Q3)
    )
    BLOCK = min(lanes(STORAGE), R1)
    BLOCKS, REST = divmod(R1, BLOCK)
    BLOCK_LINES, BLOCK_BYTES = BLOCK * LINE, BLOCK * ELEMENT

    @kernel
    def backward(
        core1, core2, core3, arranged, lasts, last_slots, starts, firsts, first_slots, group_starts, seconds,
        num_groups, products, row_gradients, product_gradients, group_slices,
        gradient1, gradient2, gradient3, compact, stride2,
        touched1, num_touched1, touched3, num_touched3, state11, state12, state21, state22, state31, state32,
        lr_, scaling_, eps_, beta1_, beta2_, correction_,
    ):  # fmt: skip
        """From the summed gradients of the distinct ids' rows to those of the cores, or to updated cores.

        `gradient1` and `gradient3` must be zero. Slices of the gradients are numbered by what is touched where
        `compact`, else as the cores' are. A rule's update takes the gradient of a slice of G₂ as soon as it is there,
        so that `gradient2` need not hold more than one (`stride2` 0); those of G₁ and G₃ are complete at the end.
        `product_gradients` and `group_slices` have room for the largest group.
        """
        lr, scaling, eps, beta1, beta2 = SCALAR(lr_), SCALAR(scaling_), SCALAR(eps_), SCALAR(beta1_), SCALAR(beta2_)
        # 1 − β before it is rounded: from a float32 β₂ of 0.999 it would be off by 1e-5.
        rest1, rest2, correction = SCALAR(1.0 - beta1_), SCALAR(1.0 - beta2_), SCALAR(correction_)
        for g in range(num_groups):
            second = load_i64(seconds + 8 * g)
            slice2 = core2 + second * SLICE2
            begin, end = load_u32(group_starts + 4 * g), load_u32(group_starts + 4 * g + 4)
            for p in range(begin, end):
                product, target = products + p * PRODUCT, product_gradients + (p - begin) * PRODUCT
                start = load_u32(starts + 4 * p)
                for i in range(start, load_u32(starts + 4 * p + 4)):
                    row = row_gradients + load_u32(arranged + 4 * i) * ROW
                    last = load_u32(lasts + 4 * i)
                    slice3 = core3 + last * SLICE3
                    if i == start:
                        multiply(target, row, slice3, Q3, Q12, R2, RANK2, THIRD, ELEMENT, RANK2, 1, STORAGE)
                    else:
                        multiply(target, row, slice3, Q3, Q12, R2, RANK2, THIRD, ELEMENT, RANK2, 0, STORAGE)
                    slot = load_u32(last_slots + 4 * i) if compact else last
                    to = gradient3 + slot * SLICE3
                    multiply(to, row, product, Q12, Q3, R2, RANK2, ELEMENT, THIRD, RANK2, 0, STORAGE)
                copy_bytes(
                    group_slices + (p - begin) * SLICE1, core1 + load_u32(firsts + 4 * p) * SLICE1, SLICE1
                )  # fmt: skip
            for j in range(BLOCKS):  # a block of G₂'s lines stays in the first-level cache for all of the group
                for p in range(begin, end):
                    slot = load_u32((first_slots if compact else firsts) + 4 * p)
                    multiply_transposed(
                        gradient1 + slot * SLICE1 + j * BLOCK_BYTES, product_gradients + (p - begin) * PRODUCT,
                        slice2 + j * BLOCK_LINES, Q1, BLOCK, COLUMNS, RANK1, LINE, LINE, 0, STORAGE,
                    )  # fmt: skip
            if REST:
                for p in range(begin, end):
                    slot = load_u32((first_slots if compact else firsts) + 4 * p)
                    multiply_transposed(
                        gradient1 + slot * SLICE1 + BLOCKS * BLOCK_BYTES,
                        product_gradients + (p - begin) * PRODUCT, slice2 + BLOCKS * BLOCK_LINES,
                        Q1, REST, COLUMNS, RANK1, LINE, LINE, 0, STORAGE,
                    )  # fmt: skip
            to = gradient2 + (g if compact else second) * stride2
            multiply(
                to, group_slices, product_gradients, (end - begin) * Q1,
                R1, COLUMNS, LINE, ELEMENT, RANK1, LINE, 1, STORAGE,
            )  # fmt: skip
            if RULE != NO_RULE:
                at = second * SLICE2
                _change_slice(
                    to, core2 + at, state21 + at, state22 + at, SLICE2, CHUNK2_BYTES,
                    lr, scaling, eps, beta1, beta2, rest1, rest2, correction, CHUNK2, STORAGE, RULE,
                )  # fmt: skip
        if RULE != NO_RULE:
            _change_slices(
                num_touched1, touched1, gradient1, core1, state11, state12, SLICE1, CHUNK1_BYTES,
                lr, scaling, eps, beta1, beta2, rest1, rest2, correction, CHUNK1, STORAGE, RULE,
            )  # fmt: skip
            _change_slices(
                num_touched3, touched3, gradient3, core3, state31, state32, SLICE3, CHUNK3_BYTES,
                lr, scaling, eps, beta1, beta2, rest1, rest2, correction, CHUNK3, STORAGE, RULE,
            )  # fmt: skip

    return backward


@functools.cache
def update_kernel(storage: int, rule: str) -> Any:
    """The update of cores whose gradients are there already, compiled at its first call.

    To the bit what `backward_kernel` does with a rule.
    """
    STORAGE, RULE, ELEMENT = storage, RULES[rule], STORAGE_BYTES[storage]
    SCALAR = np.float64 if STORAGE == FLOAT64 else np.float32
    CHUNK, CHUNK_BYTES = _UPDATED, ELEMENT * _UPDATED

    @kernel
    def update(
        gradients, touched, num_slices, slice_bytes, core, state1, state2,
        lr_, scaling_, eps_, beta1_, beta2_, correction_,
    ):  # fmt: skip
        """Updates the slices of one core whose element of `touched` is not 0; `gradients` is laid out like the core."""
        lr, scaling, eps, beta1, beta2 = SCALAR(lr_), SCALAR(scaling_), SCALAR(eps_), SCALAR(beta1_), SCALAR(beta2_)
        rest1, rest2, correction = SCALAR(1.0 - beta1_), SCALAR(1.0 - beta2_), SCALAR(correction_)
        whole = slice_bytes - slice_bytes % CHUNK_BYTES
        for t in range(num_slices):
            if load_scalar(touched + t * ELEMENT, STORAGE) == 0:
                continue
            at = t * slice_bytes
            _change_slice(
                gradients + at, core + at, state1 + at, state2 + at, whole, CHUNK_BYTES,
                lr, scaling, eps, beta1, beta2, rest1, rest2, correction, CHUNK, STORAGE, RULE,
            )  # fmt: skip
            at += whole
            _change_slice(
                gradients + at, core + at, state1 + at, state2 + at, slice_bytes - whole, ELEMENT,
                lr, scaling, eps, beta1, beta2, rest1, rest2, correction, 1, STORAGE, RULE,
            )  # fmt: skip

    return update
