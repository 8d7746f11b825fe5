"""Look-up and training of tensor-train rows on a CPU.

Ids are sorted by (i₂, i₁) (`rowmesh.ops.prefixes.cpu`). Ids of equal (i₁, i₂) then stand together, a *prefix*, and
prefixes of equal i₂ too, a *group*: the product of a prefix is made once, all products of a group while their slice of
G₂ is in the cache, and the gradient of that slice is one matrix product over the whole group, which the update can
follow at once.

Slices are read in place. Products are `[q₁·q₂, R₂]` each, in the order of the prefixes; rows and their gradients are in
the order of the distinct ids.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.merge_update.cpu import RULES, rounded
from rowmesh.ops.prefixes.cpu import HostPrefixes, Loan
from rowmesh.ops.simd import FLOAT64, STORAGE, STORAGE_BYTES, copy_bytes, kernel, load_i64, load_u32
from rowmesh.ops.tensor_train.tile import lanes, multiply, multiply_transposed, tile_of
from rowmesh.ops.update_slices.cpu import change_slice, change_slices, chunk_of

NO_RULE = -1
_NO_UPDATE = (None, (0,) * 6, (0.0,) * 6)  # rule, addresses of states, numbers


@dataclass(frozen=True)
class Constants:
    """The constants that kernels are compiled for.

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


@functools.cache
def _constants_of(
    shape1: tuple[int, ...], shape2: tuple[int, ...], shape3: tuple[int, ...], dtype: torch.dtype
) -> Constants:
    (_, q1, r1), (_, _, q2, r2), (_, q3, _) = shape1, shape2, shape3
    return Constants((q1, q2, q3), (r1, r2), STORAGE[dtype])


def _constants(cores: Sequence[Tensor]) -> Constants:
    core1, core2, core3 = cores
    return _constants_of(core1.shape, core2.shape, core3.shape, core1.dtype)


def dim_of(cores: Sequence[Tensor]) -> int:
    """D: columns of the table."""
    return cores[0].shape[1] * cores[1].shape[2] * cores[2].shape[1]


def forward(cores: Sequence[Tensor], prefixes: HostPrefixes, out: Tensor | int, *, keep: bool) -> None:
    """Writes the rows of distinct ids; see `rowmesh.ops.tensor_train.Lookup.rows`."""
    constants, workspace = _constants(cores), prefixes.workspace
    product_bytes = constants.product_elements * STORAGE_BYTES[constants.storage]
    if keep:
        prefixes.products = Loan(workspace.products, prefixes.num_prefixes * product_bytes)
        products = prefixes.products.buffer.address
    else:
        products = workspace.scratch["products"].reserve(prefixes.largest_group * product_bytes)
    rows = out if isinstance(out, int) else out.data_ptr()
    core1, core2, core3 = cores
    by_prefix = (prefixes.starts, prefixes.firsts, prefixes.group_starts, prefixes.touched[1], prefixes.num_groups)
    addresses = (core1.data_ptr(), core2.data_ptr(), core3.data_ptr(), prefixes.arranged, prefixes.lasts)
    forward_kernel(constants)(*addresses, *by_prefix, keep, products, rows)


def backward(cores: Sequence[Tensor], prefixes: HostPrefixes, row_gradients: Tensor, out: Sequence[Tensor]) -> None:
    """Adds gradients of the cores to zeros; see `rowmesh.ops.tensor_train.Lookup.fill_gradients`."""
    addresses = [gradient.data_ptr() for gradient in out]
    stride2 = out[1][0].numel() * out[1].itemsize
    _backward(cores, prefixes, row_gradients, addresses, (False, stride2), _NO_UPDATE)


def sparse_gradients(cores: Sequence[Tensor], prefixes: HostPrefixes, row_gradients: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the cores as sparse tensors of the touched slices."""
    found = [core.new_zeros(n, *core.shape[1:]) for n, core in zip(prefixes.num_touched, cores, strict=True)]
    stride2 = found[1][0].numel() * found[1].itemsize if prefixes.num_groups else 0
    addresses = [gradient.data_ptr() for gradient in found]
    _backward(cores, prefixes, row_gradients, addresses, (True, stride2), _NO_UPDATE)
    how: Any = {"is_coalesced": True, "check_invariants": False}
    return tuple(
        torch.sparse_coo_tensor(prefixes.touched_slices(k).unsqueeze(0), found[k], core.shape, **how)
        for k, core in enumerate(cores)
    )


def make_room_to_update(cores: Sequence[Tensor], prefixes: HostPrefixes) -> None:
    """Takes the memory that `update` needs; see `rowmesh.ops.tensor_train.Lookup.make_room_to_update`."""
    constants, scratch = _constants(cores), prefixes.workspace.scratch
    n1, n2, n3 = (STORAGE_BYTES[constants.storage] * n for n in constants.slice_elements)
    scratch["gradients"].reserve(prefixes.num_touched[0] * n1 + prefixes.num_touched[2] * n3)
    scratch["slice"].reserve(n2)
    _products_and_room(cores, prefixes)


def _products_and_room(cores: Sequence[Tensor], prefixes: HostPrefixes) -> tuple[int, int, int]:
    """Addresses of the products of prefixes, and of room for what a backward computes of a group of them."""
    constants, scratch = _constants(cores), prefixes.workspace.scratch
    if prefixes.products is None:
        rows = torch.empty(prefixes.num_unique, dim_of(cores), dtype=cores[0].dtype, device="cpu")
        forward(cores, prefixes, rows, keep=True)
    assert prefixes.products is not None
    group_bytes = prefixes.largest_group * STORAGE_BYTES[constants.storage]
    product_gradients = scratch["group"].reserve(group_bytes * constants.product_elements)
    slices = scratch["slices"].reserve(group_bytes * constants.slice_elements[0])
    return prefixes.products.buffer.address, product_gradients, slices


def update(
    cores: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    prefixes: HostPrefixes,
    row_gradients: Tensor,
    rule: str,
    numbers: tuple[float, ...],
) -> None:
    """Updates the touched slices of the cores in place; see `rowmesh.ops.tensor_train.Lookup.update`."""
    constants, scratch = _constants(cores), prefixes.workspace.scratch
    n1, n2, n3 = (STORAGE_BYTES[constants.storage] * n for n in constants.slice_elements)
    size1, size3 = prefixes.num_touched[0] * n1, prefixes.num_touched[2] * n3
    gradients = scratch["gradients"]
    gradient1 = gradients.reserve(size1 + size3)
    gradients.buffer.bytes[: size1 + size3] = 0
    addresses = (gradient1, scratch["slice"].reserve(n2), gradient1 + size1)
    of_states = tuple(kept[k].data_ptr() if k < len(kept) else 0 for kept in states for k in range(2))
    _backward(cores, prefixes, row_gradients, addresses, (True, 0), (rule, of_states, numbers))


def _backward(
    cores: Sequence[Tensor],
    prefixes: HostPrefixes,
    row_gradients: Tensor,
    gradients: Sequence[int],
    layout: tuple[bool, int],
    change: tuple[str | None, Sequence[int], tuple[float, ...]],
) -> None:
    """Runs the kernel; `layout` is its `compact` and `stride2`, `change` a rule, addresses of states and numbers."""
    products, product_gradients, slices = _products_and_room(cores, prefixes)
    (rule, states, numbers), constants = change, _constants(cores)
    p, (core1, core2, core3) = prefixes, cores
    by_id = (p.arranged, p.lasts, p.last_slots)
    by_prefix = (p.starts, p.firsts, p.first_slots, p.group_starts, p.touched[1], p.num_groups)
    read = (products, row_gradients.data_ptr(), product_gradients, slices)
    touched = (p.touched[0], p.num_touched[0], p.touched[2], p.num_touched[2])
    addresses = (core1.data_ptr(), core2.data_ptr(), core3.data_ptr())
    run = backward_kernel(constants, rule)
    run(*addresses, *by_id, *by_prefix, *read, *gradients, *layout, *touched, *states, *numbers)


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
        core1, core2, core3, arranged, lasts, starts, firsts, group_starts, seconds, num_groups, keep, products, rows
    ):
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
                        out + (p - begin) * PRODUCT + j * BLOCK_BYTES,
                        core1 + load_u32(firsts + 4 * p) * SLICE1,
                        slice2 + j * BLOCK_BYTES,
                        R1,
                        Q1,
                        BLOCK,
                        LINE,
                        RANK1,
                        ELEMENT,
                        LINE,
                        1,
                        STORAGE,
                    )
            if REST:
                for p in range(begin, end):
                    multiply(
                        out + (p - begin) * PRODUCT + BLOCKS * BLOCK_BYTES,
                        core1 + load_u32(firsts + 4 * p) * SLICE1,
                        slice2 + BLOCKS * BLOCK_BYTES,
                        R1,
                        Q1,
                        REST,
                        LINE,
                        RANK1,
                        ELEMENT,
                        LINE,
                        1,
                        STORAGE,
                    )
            for p in range(begin, end):
                for i in range(load_u32(starts + 4 * p), load_u32(starts + 4 * p + 4)):
                    multiply_transposed(
                        rows + load_u32(arranged + 4 * i) * ROW,
                        out + (p - begin) * PRODUCT,
                        core3 + load_u32(lasts + 4 * i) * SLICE3,
                        Q12,
                        Q3,
                        R2,
                        THIRD,
                        RANK2,
                        RANK2,
                        1,
                        STORAGE,
                    )

    return forward


@functools.cache
def backward_kernel(constants: Constants, rule: str | None) -> Any:
    """The gradients of the cores, and their update where there is a rule; compiled at its first call."""
    (Q1, Q2, Q3), (R1, R2), STORAGE = constants.dim_factors, constants.ranks, constants.storage
    RULE, ELEMENT = NO_RULE if rule is None else RULES[rule], STORAGE_BYTES[STORAGE]
    SCALAR = np.float64 if STORAGE == FLOAT64 else np.float32
    SLICE1, SLICE2, SLICE3 = (ELEMENT * n for n in constants.slice_elements)
    CHUNK1, CHUNK2, CHUNK3 = (chunk_of(n) for n in constants.slice_elements)
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
        core1,
        core2,
        core3,
        arranged,
        lasts,
        last_slots,
        starts,
        firsts,
        first_slots,
        group_starts,
        seconds,
        num_groups,
        products,
        row_gradients,
        product_gradients,
        group_slices,
        gradient1,
        gradient2,
        gradient3,
        compact,
        stride2,
        touched1,
        num_touched1,
        touched3,
        num_touched3,
        state11,
        state12,
        state21,
        state22,
        state31,
        state32,
        *numbers,
    ):
        """From the summed gradients of the distinct ids' rows to those of the cores, or to updated cores.

        `gradient1` and `gradient3` must be zero. Slices of the gradients are numbered by what is touched where
        `compact`, else as the cores' are. A rule's update takes the gradient of a slice of G₂ as soon as it is there,
        so that `gradient2` need not hold more than one (`stride2` 0); those of G₁ and G₃ are complete at the end.
        `product_gradients` and `group_slices` have room for the largest group.
        """
        scalars = rounded((*numbers, 0.0), SCALAR)
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
                copy_bytes(group_slices + (p - begin) * SLICE1, core1 + load_u32(firsts + 4 * p) * SLICE1, SLICE1)
            for j in range(BLOCKS):  # a block of G₂'s lines stays in the first-level cache for all of the group
                for p in range(begin, end):
                    slot = load_u32((first_slots if compact else firsts) + 4 * p)
                    multiply_transposed(
                        gradient1 + slot * SLICE1 + j * BLOCK_BYTES,
                        product_gradients + (p - begin) * PRODUCT,
                        slice2 + j * BLOCK_LINES,
                        Q1,
                        BLOCK,
                        COLUMNS,
                        RANK1,
                        LINE,
                        LINE,
                        0,
                        STORAGE,
                    )
            if REST:
                for p in range(begin, end):
                    slot = load_u32((first_slots if compact else firsts) + 4 * p)
                    multiply_transposed(
                        gradient1 + slot * SLICE1 + BLOCKS * BLOCK_BYTES,
                        product_gradients + (p - begin) * PRODUCT,
                        slice2 + BLOCKS * BLOCK_LINES,
                        Q1,
                        REST,
                        COLUMNS,
                        RANK1,
                        LINE,
                        LINE,
                        0,
                        STORAGE,
                    )
            to = gradient2 + (g if compact else second) * stride2
            multiply(
                to,
                group_slices,
                product_gradients,
                (end - begin) * Q1,
                R1,
                COLUMNS,
                LINE,
                ELEMENT,
                RANK1,
                LINE,
                1,
                STORAGE,
            )
            if RULE != NO_RULE:
                at = second * SLICE2
                change_slice(
                    to,
                    core2 + at,
                    state21 + at,
                    state22 + at,
                    SLICE2,
                    CHUNK2_BYTES,
                    scalars,
                    CHUNK2,
                    STORAGE,
                    RULE,
                )
        if RULE != NO_RULE:
            change_slices(
                num_touched1,
                touched1,
                gradient1,
                core1,
                state11,
                state12,
                SLICE1,
                CHUNK1_BYTES,
                scalars,
                CHUNK1,
                STORAGE,
                RULE,
            )
            change_slices(
                num_touched3,
                touched3,
                gradient3,
                core3,
                state31,
                state32,
                SLICE3,
                CHUNK3_BYTES,
                scalars,
                CHUNK3,
                STORAGE,
                RULE,
            )

    return backward
