"""Look-up and training of tensor-train rows on a GPU.

Ids are sorted by (i₂, i₁, i₃). Ids of equal (i₁, i₂) then stand together, a *prefix*, and prefixes of equal i₂ too, a
*group*. The product of a prefix is made once, and prefixes of a group are multiplied by their slice of G₂ together: one
matrix product a tile of prefixes, in which that slice is read once. A last core's slices differ from id to id, so that
the products with them have no matrix to share and are summed directly; they are limited by memory.

Backward makes the gradients of products, id after id of each prefix, and from them those of the cores. A slice of G₂
has all of its gradient in one program, which updates it at once, so that no gradient of the largest core is stored;
those of G₁ and G₃ are sums over prefixes and ids, made in two steps of fixed order. Nothing is added by atomics:
replays are equal to the bit.

[Note: precision of products]
Matrix products of float32 follow `torch.get_float32_matmul_precision()`, as torch's own do: "highest" computes in
float32 outside of the tensor cores, "high" in three passes of TF32, which come within some 1e-6, "medium" in one, which
has 1e-3. Everything else is float32 always; float64 is float64.

See [Note: GPU kernels] in `rowmesh.ops.gpu`.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import MOST_PROGRAMS, Signature, ceil_div, check, launch, next_power_of_2
from rowmesh.ops.merge_update.cuda import change
from rowmesh.ops.prefixes.cuda import arrange, starts_of, tile_of
from rowmesh.ops.prefixes.handles import Arrangement
from rowmesh.ops.tensor_train.shape import LINES, STEP, Shape

__all__ = ["SIGNATURES", "Arrangement", "arrange", "backward", "forward", "multiply", "update"]

_GRADIENT_LINES = 32  # of a program that sums gradients of products, whose addresses take registers too
_IDS = tl.constexpr(4)  # likewise, ids of a prefix
_PARTS = tl.constexpr(4)  # likewise, parts of a slice's gradient
_SEARCHED = 256  # segments that a program looks at at a time
_SLICE = 256  # elements of a slice that a program finishes


@triton.jit(do_not_specialize=("num_groups",))
def _multiply(
    core1,
    core2,
    firsts,
    group_starts,
    products,
    num_groups,
    Q1: tl.constexpr,
    R1: tl.constexpr,
    WIDTH: tl.constexpr,
    PREFIXES: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SEARCHED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of up to PREFIXES prefixes of a group with COLUMNS columns of its slice, WIDTH = Q₂ · R₂ wide."""
    group, begin, end = tile_of(group_starts, num_groups, tl.program_id(0), PREFIXES, SEARCHED)
    if begin < end:
        line = tl.arange(0, LINES)
        prefix = begin + line // Q1
        is_line = (line < PREFIXES * Q1) & (prefix < end)
        first = tl.load(firsts + prefix, mask=is_line, other=0).to(tl.int64)
        left = core1 + (first * Q1 + line % Q1) * R1
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        right = core2 + group.to(tl.int64) * R1 * WIDTH + column
        total = tl.zeros([LINES, COLUMNS], products.dtype.element_ty)
        for k in range(0, R1, STEP):
            r = k + tl.arange(0, STEP)
            a = tl.load(left[:, None] + r[None, :], mask=is_line[:, None] & (r < R1)[None, :], other=0)
            b = tl.load(
                right[None, :] + r[:, None] * WIDTH, mask=(r < R1)[:, None] & (column < WIDTH)[None, :], other=0
            )
            total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
        at = (prefix.to(tl.int64) * Q1 + line % Q1)[:, None] * WIDTH + column[None, :]
        tl.store(products + at, total, mask=is_line[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _multiply_last(
    core3,
    products,
    order,
    prefixes,
    lasts,
    starts,
    num_prefixes,
    rows,
    Q12: tl.constexpr,
    Q3: tl.constexpr,
    R2: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Rows of some ids: every line of a product, of R₂ values, with the Q₃ columns of the id's last slice."""
    end, column = tl.load(starts + tl.load(num_prefixes)).to(tl.int64) * Q12, tl.arange(0, COLUMNS)
    for begin in range(tl.program_id(0).to(tl.int64) * LINES, end, tl.num_programs(0) * LINES):
        line = begin + tl.arange(0, LINES)
        is_line = line < end
        i = line // Q12
        prefix = tl.load(prefixes + i, mask=is_line, other=0).to(tl.int64)
        last = tl.load(lasts + i, mask=is_line, other=0).to(tl.int64)
        position = tl.load(order + i, mask=is_line, other=0)
        total = tl.zeros([LINES, COLUMNS], rows.dtype.element_ty)
        for k in range(0, R2, STEP):
            r = k + tl.arange(0, STEP)
            inside = is_line[:, None] & (r < R2)[None, :]
            product = tl.load(products + ((prefix * Q12 + line % Q12) * R2)[:, None] + r[None, :], mask=inside, other=0)
            for c0 in range(0, Q3, TERMS):
                for u in tl.static_range(TERMS):
                    c = c0 + u
                    slice_ = tl.load(core3 + ((last * Q3 + c) * R2)[:, None] + r[None, :], mask=inside, other=0)
                    found = tl.sum(product * slice_, axis=1)
                    total += tl.where(column[None, :] == c, found[:, None], 0)
        at = (position * Q12 + line % Q12)[:, None] * Q3 + column[None, :]
        tl.store(rows + at, total, mask=is_line[:, None] & (column < Q3)[None, :])


@triton.jit
def _product_gradients(
    core3,
    row_gradients,
    order,
    lasts,
    starts,
    num_prefixes,
    gradients,
    Q12: tl.constexpr,
    Q3: tl.constexpr,
    R2: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Gradients of products: Σ over a prefix's ids, in order, of the row's gradient times its last slice."""
    end_line, r = tl.load(num_prefixes).to(tl.int64) * Q12, tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    for first in range(tl.program_id(0).to(tl.int64) * LINES, end_line, tl.num_programs(0) * LINES):
        line = first + tl.arange(0, LINES)
        is_line = line < end_line
        prefix = line // Q12
        begin = tl.load(starts + prefix, mask=is_line, other=0)
        end = tl.load(starts + prefix + 1, mask=is_line, other=0)
        total = tl.zeros([LINES, COLUMNS], gradients.dtype.element_ty)
        for j in range(0, tl.max(end - begin), _IDS):  # at most p₃ ids, where they are distinct
            for v in tl.static_range(_IDS):
                here = begin + j + v < end
                position = tl.load(order + begin + j + v, mask=here, other=0)
                last = tl.load(lasts + begin + j + v, mask=here, other=0).to(tl.int64)
                for c0 in range(0, Q3, TERMS):
                    for u in tl.static_range(TERMS):
                        c = c0 + u
                        g = tl.load(row_gradients + (position * Q12 + line % Q12) * Q3 + c, mask=here, other=0)
                        at = ((last * Q3 + c) * R2)[:, None] + r[None, :]
                        slice_ = tl.load(core3 + at, mask=here[:, None] & (r < R2)[None, :], other=0)
                        total = tl.fma(g[:, None] + tl.zeros_like(total), slice_, total)
        tl.store(gradients + line[:, None] * R2 + r[None, :], total, mask=is_line[:, None] & (r < R2)[None, :])


@triton.jit(do_not_specialize=("num_groups",))
def _first_parts(
    core2,
    product_gradients,
    group_starts,
    parts,
    num_groups,
    Q1: tl.constexpr,
    R1: tl.constexpr,
    WIDTH: tl.constexpr,
    PREFIXES: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SEARCHED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds each prefix to the gradient of its slice of G₁: the gradient of its product times G₂'s, transposed."""
    group, begin, end = tile_of(group_starts, num_groups, tl.program_id(0), PREFIXES, SEARCHED)
    if begin < end:
        line = tl.arange(0, LINES)
        prefix = begin + line // Q1
        is_line = (line < PREFIXES * Q1) & (prefix < end)
        at = prefix.to(tl.int64) * Q1 + line % Q1
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        right = core2 + (group.to(tl.int64) * R1 + column) * WIDTH
        total = tl.zeros([LINES, COLUMNS], parts.dtype.element_ty)
        for k in range(0, WIDTH, STEP):
            r = k + tl.arange(0, STEP)
            inside = is_line[:, None] & (r < WIDTH)[None, :]
            a = tl.load(product_gradients + at[:, None] * WIDTH + r[None, :], mask=inside, other=0)
            b = tl.load(right[None, :] + r[:, None], mask=(r < WIDTH)[:, None] & (column < R1)[None, :], other=0)
            total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
        tl.store(parts + at[:, None] * R1 + column[None, :], total, mask=is_line[:, None] & (column < R1)[None, :])


@triton.jit(do_not_specialize=("num_slices",))
def _last_parts(
    products,
    row_gradients,
    order,
    prefixes,
    by_last,
    last_starts,
    parts,
    num_slices,
    Q12: tl.constexpr,
    Q3: tl.constexpr,
    R2: tl.constexpr,
    IDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    SEARCHED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds up to IDS ids to the gradient of a slice of G₃: their rows' gradients, transposed, times products."""
    tile = tl.program_id(0)
    _, begin, end = tile_of(last_starts, num_slices, tile, IDS, SEARCHED)
    if begin < end:
        num_lines = tl.minimum(end - begin, IDS) * Q12
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        c = tl.arange(0, ROWS)
        total = tl.zeros([ROWS, COLUMNS], parts.dtype.element_ty)
        for k in range(0, num_lines, STEP):
            line = k + tl.arange(0, STEP)
            is_line = line < num_lines
            i = tl.load(by_last + begin + line // Q12, mask=is_line, other=0)
            position = tl.load(order + i, mask=is_line, other=0)
            prefix = tl.load(prefixes + i, mask=is_line, other=0).to(tl.int64)
            at = ((position * Q12 + line % Q12) * Q3)[None, :] + c[:, None]
            a = tl.load(row_gradients + at, mask=(c < Q3)[:, None] & is_line[None, :], other=0)
            at = ((prefix * Q12 + line % Q12) * R2)[:, None] + column[None, :]
            b = tl.load(products + at, mask=is_line[:, None] & (column < R2)[None, :], other=0)
            total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
        at = (tile.to(tl.int64) * Q3 + c)[:, None] * R2 + column[None, :]
        tl.store(parts + at, total, mask=(c < Q3)[:, None] & (column < R2)[None, :])


@triton.jit
def _finish_second(
    core1,
    product_gradients,
    firsts,
    group_starts,
    core2,
    out,
    state1,
    state2,
    lr: tl.float64,
    scaling: tl.float64,
    eps: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    rest1: tl.float64,
    rest2: tl.float64,
    correction: tl.float64,
    Q1: tl.constexpr,
    R1: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    RULE: tl.constexpr,
):
    """A part of a slice of G₂: its gradient over all prefixes of the group; stored, or with a rule applied at once."""
    group = tl.program_id(0)
    begin, end = tl.load(group_starts + group) * Q1, tl.load(group_starts + group + 1) * Q1
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], core1.dtype.element_ty)
    for k in range(begin, end, STEP):
        line = k + tl.arange(0, STEP)
        is_line = line < end
        first = tl.load(firsts + line // Q1, mask=is_line, other=0).to(tl.int64)
        at = ((first * Q1 + line % Q1) * R1)[None, :] + n[:, None]
        a = tl.load(core1 + at, mask=(n < R1)[:, None] & is_line[None, :], other=0)
        at = line.to(tl.int64)[:, None] * WIDTH + column[None, :]
        b = tl.load(product_gradients + at, mask=is_line[:, None] & (column < WIDTH)[None, :], other=0)
        total = tl.dot(a, b, total, input_precision=PRECISION, out_dtype=total.dtype)
    inside = (n < R1)[:, None] & (column < WIDTH)[None, :]
    at = (group.to(tl.int64) * R1 + n)[:, None] * WIDTH + column[None, :]
    if RULE is None:
        tl.store(out + at, total, mask=inside)
    elif begin < end:
        total *= tl.full((), scaling, total.dtype)
        change(
            total,
            core2,
            state1,
            state2,
            at,
            inside,
            n,
            n < R1,
            lr,
            eps,
            beta1,
            beta2,
            rest1,
            rest2,
            correction,
            0.0,
            1,
            total.dtype,
            RULE,
            False,
        )


@triton.jit
def _finish(
    parts,
    order,
    starts,
    core,
    out,
    state1,
    state2,
    lr: tl.float64,
    scaling: tl.float64,
    eps: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    rest1: tl.float64,
    rest2: tl.float64,
    correction: tl.float64,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
):
    """A part of a slice of G₁ or G₃: the sum, in order, of what prefixes or chunks of ids add to its gradient.

    With `order`, parts are those of the prefixes that it lists; without, those of the tiles of CHUNK ids of `tile_of`.
    """
    slice_ = tl.program_id(0) + tl.arange(0, 1)
    begin, end = tl.load(starts + slice_), tl.load(starts + slice_ + 1)
    count = (end - begin + CHUNK - 1) // CHUNK
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([1, COLUMNS], parts.dtype.element_ty)
    for j0 in range(0, tl.max(count), _PARTS):
        for u in tl.static_range(_PARTS):
            here = j0 + u < count
            if order is None:
                part = (begin // CHUNK + slice_ + j0 + u).to(tl.int64)
            else:
                part = tl.load(order + begin + j0 + u, mask=here, other=0)
            at = part[:, None] * SIZE + column[None, :]
            total += tl.load(parts + at, mask=here[:, None] & (column < SIZE)[None, :], other=0)
    at = slice_.to(tl.int64)[:, None] * SIZE + column[None, :]
    if RULE is None:
        tl.store(out + at, total, mask=(column < SIZE)[None, :])
    else:
        inside = (count > 0)[:, None] & (column < SIZE)[None, :]
        total *= tl.full((), scaling, total.dtype)
        change(
            total,
            core,
            state1,
            state2,
            at,
            inside,
            slice_,
            count > 0,
            lr,
            eps,
            beta1,
            beta2,
            rest1,
            rest2,
            correction,
            0.0,
            1,
            total.dtype,
            RULE,
            False,
        )


def multiply(cores: Sequence[Tensor], arrangement: Arrangement, *, precision: str | None = None) -> Tensor:
    """The products of prefixes, `[P, q₁ · q₂, R₂]`, without the rows; arguments as for `forward`."""
    shape, p2 = Shape.of(cores, precision), arrangement.row_factors[1]
    num_products = arrangement.firsts.numel()
    products = cores[0].new_empty(num_products, shape.q12, shape.r2)
    launch(
        _multiply,
        (num_products // shape.prefixes + p2, ceil_div(shape.width, shape.columns(shape.width))),
        cores[0],
        cores[1],
        arrangement.firsts,
        arrangement.group_starts,
        products,
        p2,
        **shape.tile(shape.width),
        STEP=shape.step(shape.r1),
        SEARCHED=_SEARCHED,
        PRECISION=shape.precision,
    )
    return products


def forward(
    cores: Sequence[Tensor], arrangement: Arrangement, rows: Tensor | None = None, *, precision: str | None = None
) -> tuple[Tensor, Tensor]:
    """The rows of the arranged ids.

    Args:
        cores: G₁ `[p₁, q₁, R₁]`, G₂ `[p₂, R₁, q₂, R₂]`, G₃ `[p₃, q₃, R₂]`, float32 or float64, contiguous.
        arrangement: of the ids.
        rows: of their dtype, of which row `order[i]` is written for sorted id i, `[N, D]` where that is its position;
            made where it is None. Rows of ids that are not valid stay as they are.
        precision: of matrix products, one of torch's; see [Note: precision of products].

    Returns:
        `rows`, in the order of the ids, and the products of prefixes, `[P, q₁ · q₂, R₂]`, which backward reads.

    Source: EL-Rec (SC'22) §III-A.
    """
    shape = Shape.of(cores, precision)
    num_ids = arrangement.order.numel()
    rows = cores[0].new_empty(num_ids, shape.dim) if rows is None else rows
    check("rows", rows, (cores[0].dtype,), 2, cores[0].device)
    products = multiply(cores, arrangement, precision=precision)
    launch(
        _multiply_last,
        min(ceil_div(num_ids * shape.q12, LINES), MOST_PROGRAMS),
        cores[2],
        products,
        arrangement.order,
        arrangement.prefixes,
        arrangement.lasts,
        arrangement.starts,
        arrangement.num_prefixes,
        rows,
        Q12=shape.q12,
        Q3=shape.q3,
        R2=shape.r2,
        LINES=LINES,
        COLUMNS=next_power_of_2(shape.q3),
        STEP=min(LINES, next_power_of_2(shape.r2)),
        TERMS=shape.terms,
    )
    return rows, products


def backward(
    cores: Sequence[Tensor],
    arrangement: Arrangement,
    products: Tensor,
    row_gradients: Tensor,
    out: Sequence[Tensor] | None = None,
    *,
    precision: str | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of the cores.

    Args:
        cores, arrangement, precision: as for `forward`.
        products: what it returned.
        row_gradients: `[N, D]`, of the rows, those of equal ids summed.
        out: where they go, contiguous, of the shapes of the cores; made where it is None.
    """
    found = tuple(torch.empty_like(core) for core in cores) if out is None else tuple(out)
    for gradient, core in zip(found, cores, strict=True):
        check("out", gradient, (core.dtype,), core.dim(), core.device)
    work = _Backward(cores, arrangement, products, row_gradients, precision)
    work.finish(None, (0.0,) * 6, [(out, None, None) for out in found])
    return found


def update(
    cores: Sequence[Tensor],
    states: Sequence[tuple[Tensor, ...]],
    arrangement: Arrangement,
    products: Tensor,
    row_gradients: Tensor,
    rule: str,
    numbers: tuple[float, ...],
    *,
    precision: str | None = None,
) -> None:
    """Updates the slices of the cores that the ids touch, in place.

    Args:
        cores, arrangement, products, row_gradients, precision: as for `backward`.
        states: of each core, as `rowmesh.ops.merge_update.cuda.update` takes them; of the shape of the core.
        rule: the name of an update rule that keeps state by element.
        numbers: what its `numbers` returned.

    Source: EL-Rec (SC'22) §III-B "Fused TT core Update".
    """
    work = _Backward(cores, arrangement, products, row_gradients, precision)
    work.finish(rule, numbers, [(None, *(*state, None, None)[:2]) for state in states])


class _Backward:
    """The parts that gradients of cores are made of; nothing is changed yet."""

    def __init__(
        self,
        cores: Sequence[Tensor],
        arrangement: Arrangement,
        products: Tensor,
        row_gradients: Tensor,
        precision: str | None,
    ) -> None:
        self.cores, self.arrangement, self.products = cores, arrangement, products
        self.shape = shape = Shape.of(cores, precision)
        check("row_gradients", row_gradients, (cores[0].dtype,), 2, cores[0].device)
        check("products", products, (cores[0].dtype,), 3, cores[0].device)
        a = arrangement
        p1, p2, p3 = a.row_factors
        self.gradients = torch.empty_like(products)
        columns = min(next_power_of_2(shape.r2), LINES)
        programs = min(ceil_div(len(products) * shape.q12, _GRADIENT_LINES), MOST_PROGRAMS)
        launch(
            _product_gradients,
            (programs, ceil_div(shape.r2, columns)),
            cores[2],
            row_gradients,
            a.order,
            a.lasts,
            a.starts,
            a.num_prefixes,
            self.gradients,
            Q12=shape.q12,
            Q3=shape.q3,
            R2=shape.r2,
            LINES=_GRADIENT_LINES,
            COLUMNS=columns,
            TERMS=shape.terms,
        )
        self.first_parts = cores[0].new_empty(len(products), shape.q1, shape.r1)
        launch(
            _first_parts,
            (len(products) // shape.prefixes + p2, ceil_div(shape.r1, shape.columns(shape.r1))),
            cores[1],
            self.gradients,
            a.group_starts,
            self.first_parts,
            p2,
            **shape.tile(shape.r1),
            STEP=shape.step(shape.width),
            SEARCHED=_SEARCHED,
            PRECISION=shape.precision,
        )
        firsts, self.by_first = torch.sort(_narrow(a.firsts, p1), stable=True)
        lasts, by_last = torch.sort(_narrow(a.lasts, p3), stable=True)
        self.first_starts, self.last_starts = starts_of(firsts, p1), starts_of(lasts, p3)
        num_tiles = a.order.numel() // shape.ids + p3
        self.last_parts = cores[0].new_empty(num_tiles, shape.q3, shape.r2)
        launch(
            _last_parts,
            (num_tiles, ceil_div(shape.r2, shape.columns(shape.r2))),
            products,
            row_gradients,
            a.order,
            a.prefixes,
            by_last,
            self.last_starts,
            self.last_parts,
            p3,
            Q12=shape.q12,
            Q3=shape.q3,
            R2=shape.r2,
            IDS=shape.ids,
            ROWS=max(next_power_of_2(shape.q3), 16),
            COLUMNS=shape.columns(shape.r2),
            STEP=STEP,
            SEARCHED=_SEARCHED,
            PRECISION=shape.precision,
        )

    def finish(self, rule: str | None, numbers: tuple[float, ...], places: Sequence[tuple[Tensor | None, ...]]) -> None:
        """Stores the gradients, or updates the cores: G₂ first, whose gradient reads G₁ as it was.

        Args:
            rule, numbers: of the update; None for none.
            places: of each core, where its gradient goes, and its states.
        """
        lr, scaling, eps, beta1, beta2, correction = numbers
        scalars = lr, scaling, eps, beta1, beta2, 1.0 - beta1, 1.0 - beta2, correction
        shape, (core1, core2, core3) = self.shape, self.cores
        p1, p2, p3 = self.arrangement.row_factors
        rows, columns = shape.columns(shape.r1), shape.columns(shape.width)
        launch(
            _finish_second,
            (p2, ceil_div(shape.r1, rows), ceil_div(shape.width, columns)),
            core1,
            self.gradients,
            self.arrangement.firsts,
            self.arrangement.group_starts,
            core2,
            *places[1],
            *scalars,
            Q1=shape.q1,
            R1=shape.r1,
            WIDTH=shape.width,
            ROWS=rows,
            COLUMNS=columns,
            STEP=STEP,
            PRECISION=shape.precision,
            RULE=rule,
        )
        for p, core, place, parts, order, starts, chunk in (
            (p1, core1, places[0], self.first_parts, self.by_first, self.first_starts, 1),
            (p3, core3, places[2], self.last_parts, None, self.last_starts, shape.ids),
        ):
            size = core[0].numel()
            columns = min(next_power_of_2(size), _SLICE)
            launch(
                _finish,
                (p, ceil_div(size, columns)),
                parts,
                order,
                starts,
                core,
                *place,
                *scalars,
                SIZE=size,
                CHUNK=chunk,
                COLUMNS=columns,
                RULE=rule,
            )


def _narrow(keys: Tensor, most: int) -> Tensor:
    """Keys in 16 bits where they fit: two passes of a sort instead of four."""
    return keys.to(torch.int16) if most < 2**15 else keys


_NUMBERS = " fp64" * 8


def _signatures(shape: Shape, storage: str = "fp32", rule: str = "sgd") -> tuple[Signature, ...]:
    """The signatures of the kernels that are compiled for a shape."""
    f, searched = f"*{storage}", {"SEARCHED": _SEARCHED, "PRECISION": shape.precision}
    last = {"Q12": shape.q12, "Q3": shape.q3, "R2": shape.r2}
    step = min(LINES, next_power_of_2(shape.r2))
    rows, columns = shape.columns(shape.r1), shape.columns(shape.width)
    updated = {"RULE": rule, "out": None, "state1": None, "state2": None}
    second = {
        "Q1": shape.q1,
        "R1": shape.r1,
        "WIDTH": shape.width,
        "ROWS": rows,
        "COLUMNS": columns,
        "STEP": STEP,
        "PRECISION": shape.precision,
        **updated,
    }
    return (
        Signature(
            _multiply,
            f"{f} {f} *i32 *i32 {f} i32",
            {**shape.tile(shape.width), "STEP": shape.step(shape.r1), **searched},
        ),
        Signature(
            _multiply_last,
            f"{f} {f} *i64 *i32 *i32 *i32 *i32 {f}",
            {**last, "LINES": LINES, "COLUMNS": next_power_of_2(shape.q3), "STEP": step, "TERMS": shape.terms},
        ),
        Signature(
            _product_gradients,
            f"{f} {f} *i64 *i32 *i32 *i32 {f}",
            {**last, "LINES": _GRADIENT_LINES, "COLUMNS": step, "TERMS": shape.terms},
        ),
        Signature(
            _first_parts,
            f"{f} {f} *i32 {f} i32",
            {**shape.tile(shape.r1), "STEP": shape.step(shape.width), **searched},
        ),
        Signature(
            _last_parts,
            f"{f} {f} *i64 *i32 *i64 *i32 {f} i32",
            {
                **last,
                "IDS": shape.ids,
                "ROWS": max(next_power_of_2(shape.q3), 16),
                "COLUMNS": shape.columns(shape.r2),
                "STEP": STEP,
                **searched,
            },
        ),
        Signature(_finish_second, f"{f} {f} *i32 *i32 {f}{_NUMBERS}", second),
    )


def _finish_signature(rule: str | None, num_states: int) -> Signature:
    constants = {"SIZE": 256, "CHUNK": 1, "COLUMNS": _SLICE, "RULE": rule}
    missing = [*["state1", "state2"][num_states:], "core" if rule is None else "out"]
    types = "*fp32 *i64 *i32 *fp32" + " *fp32" * num_states + _NUMBERS
    return Signature(_finish, types, {**constants, **dict.fromkeys(missing)})


SIGNATURES = (
    *_signatures(Shape(4, 4, 4, 64, 64, "ieee")),
    *_signatures(Shape(4, 4, 8, 128, 128, "tf32x3")),
    *_signatures(Shape(1, 1, 17, 16, 16, "ieee"), "fp64"),
    _finish_signature(None, 0),
    _finish_signature("adam", 2),
)
