"""The optimizer's update of merged slots on a GPU, fused with the sums of their gradients.

`rowmesh.ops.merge` has sorted entries by slot. One tile of distinct slots a program sums their gradients and changes
their rows and states in place: a gradient is read once, a row read and written once, and no sum is stored. Nothing is
added by atomics, and every row belongs to one program, so that replays are equal to the bit.

[Note: hot slots]
A program would be busy for long with a slot of 100,000 entries. So only the first CHUNK entries of a slot are added one
by one by the program that updates it; every CHUNK after them is added up beforehand by a program of its own, in order,
and these sums are added in order too. Chunks are counted from the first entry of the slot: the order of sums depends on
the entries of that slot alone, not on the others of the batch. Slots of up to CHUNK entries are summed as on a CPU;
longer ones come out equal to rounding only.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportInvalidTypeForm=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.gpu import MOST_PROGRAMS, Signature, ceil_div, check, compute_dtype, launch, next_power_of_2
from rowmesh.ops.merge_update.handles import DeviceMerged as Merged

CHUNK = 64
MOST_COLUMNS = 4096
# Elements of a program's tile of rows: two 16-byte loads a thread of two warps and gradient. A long list of entries
# holds up few other slots; and programs are many, since those that have long lists would hold up the rest of theirs.
# Measured on an H200, as was that rows had better not be read before their gradients are added up.
_TILE = 512
_MOST_PROGRAMS = 4 * MOST_PROGRAMS
_UNROLL = tl.constexpr(4)  # entries of a slot whose loads do not wait for one another
_CHUNK_UNROLL = tl.constexpr(8)


@triton.jit
def _gradient_of(
    order,
    factors,
    gradients,
    place,
    here,
    columns,
    inside,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The gradients of sorted entries, times their factors; see `Merged.cells_alignment`."""
    begin = tl.load(order + place, mask=here, other=0)
    begin = begin * D if ALIGNMENT == 0 else tl.multiple_of(begin, ALIGNMENT)
    gradient = tl.load(gradients + begin[:, None] + columns[None, :], mask=here[:, None] & inside, other=0).to(DTYPE)
    if factors is not None:
        gradient *= tl.load(factors + place, mask=here, other=0)[:, None]
    return gradient


@triton.jit
def _sum_nodes(
    order,
    node_ends,
    gradients,
    begin,
    end,
    m,
    columns,
    inside,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    NUM_NODES: tl.constexpr,
):
    """The sums of slots' entries, those of each node first."""
    total = tl.zeros([m.shape[0], columns.shape[0]], DTYPE)
    # `part` is the sum so far of a node; it joins the total when the next node's first entry comes.
    part, node = total, tl.full(m.shape, -1, tl.int32)
    for j in range(tl.max(end - begin)):
        here = begin + j < end
        entry = tl.load(order + begin + j, mask=here, other=0)
        gradient = tl.load(gradients + entry[:, None] * D + columns[None, :], mask=here[:, None] & inside, other=0)
        of = tl.zeros_like(node)
        for n in tl.static_range(NUM_NODES - 1):
            of += (entry >= tl.load(node_ends + n)).to(tl.int32)
        is_new = (here & (of != node))[:, None]
        total = tl.where(is_new, total + part, total)
        part = tl.where(is_new, gradient.to(DTYPE), part + gradient.to(DTYPE))
        node = tl.where(here, of, node)
    return total + part


@triton.jit
def _sum_in_order(
    order,
    factors,
    partials,
    gradients,
    begin,
    end,
    m,
    columns,
    inside,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The sums of slots' entries: one by one up to CHUNK of them, then those of chunks."""
    total = tl.zeros([m.shape[0], columns.shape[0]], DTYPE)
    first_end = tl.minimum(end, begin + CHUNK)
    for j in range(0, tl.max(first_end - begin), _UNROLL):
        for u in tl.static_range(_UNROLL):
            place = begin + j + u
            total += _gradient_of(
                order, factors, gradients, place, place < first_end, columns, inside, D, DTYPE, ALIGNMENT
            )
    if partials is not None:
        chunks = (end - begin + CHUNK - 1) // CHUNK
        for k in range(1, tl.max(chunks), _UNROLL):
            for u in tl.static_range(_UNROLL):
                here = k + u < chunks
                at = (begin // CHUNK + k + u).to(tl.int64)
                total += tl.load(partials + at[:, None] * D + columns[None, :], mask=here[:, None] & inside, other=0)
    return total


@triton.jit
def _sum_entries(
    order,
    factors,
    starts,
    node_ends,
    partials,
    gradients,
    m,
    is_slot,
    columns,
    inside,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_NODES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """The sums of the gradients of distinct slots `m`, `[ROWS, COLUMNS]`; see `Merged` for what may be missing."""
    if starts is None:
        entry = m.to(tl.int64)
        if order is not None:
            entry = tl.load(order + m, mask=is_slot, other=0)
        total = tl.load(gradients + entry[:, None] * D + columns[None, :], mask=inside, other=0).to(DTYPE)
    else:
        begin = tl.load(starts + m, mask=is_slot, other=0)
        end = tl.load(starts + m + 1, mask=is_slot, other=0)
        if NUM_NODES > 1:
            total = _sum_nodes(
                order, node_ends, gradients, begin, end, m, columns, inside, D=D, DTYPE=DTYPE, NUM_NODES=NUM_NODES
            )
        else:
            total = _sum_in_order(
                order, factors, partials, gradients, begin, end, m, columns, inside, D, DTYPE, CHUNK, ALIGNMENT
            )
    return total


@triton.jit
def _sum_chunks(
    order,
    factors,
    starts,
    ranks,
    gradients,
    partials,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """`partials[b]` = the sum of the chunk, not the first of its slot, that begins at a sorted entry from b · CHUNK on.

    There is at most one in a block: it belongs to the slot of entry b · CHUNK, as any slot that begins later in the
    block has its second chunk in a later one. Chunk k of a slot that begins at s is found in block s // CHUNK + k.
    """
    dtype: tl.constexpr = partials.dtype.element_ty
    block = tl.program_id(0) + tl.arange(0, 1)  # a tile of one row
    m = tl.load(ranks + block * CHUNK) - 1
    begin, end = tl.load(starts + m, mask=m >= 0, other=0), tl.load(starts + m + 1, mask=m >= 0, other=0)
    first = begin + (block * CHUNK - begin + CHUNK - 1) // CHUNK * CHUNK
    last = tl.where(begin < block * CHUNK, tl.minimum(first + CHUNK, end), first)
    columns = tl.arange(0, COLUMNS)
    total = tl.zeros([1, COLUMNS], dtype)
    for j in range(0, tl.max(last - first), _CHUNK_UNROLL):
        for u in tl.static_range(_CHUNK_UNROLL):
            place = first + j + u
            inside = (columns < D)[None, :]
            total += _gradient_of(order, factors, gradients, place, place < last, columns, inside, D, dtype, ALIGNMENT)
    inside = (first < last)[:, None] & (columns < D)[None, :]
    tl.store(partials + block.to(tl.int64)[:, None] * D + columns[None, :], total, mask=inside)


@triton.jit
def _root_of(x):
    """√x, correctly rounded: a fast root may take subnormal numbers for 0, and steps without eps divide by it."""
    return tl.sqrt(x) if x.dtype == tl.float64 else tl.sqrt_rn(x)


@triton.jit
def _quotient_of(x, y):
    """The quotient as a CPU rounds it: `/` of float32 is off by up to two units, or multiplies by a reciprocal."""
    return x / y if x.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def change(
    g,
    rows,
    state1,
    state2,
    at,
    inside,
    slot,
    is_slot,
    lr_,
    eps_,
    beta1_,
    beta2_,
    rest1_,
    rest2_,
    correction_,
    decay_,
    D: tl.constexpr,
    DTYPE: tl.constexpr,
    RULE: tl.constexpr,
    DECAYS: tl.constexpr,
):
    """Rows and their states, given the gradients; the formulas of `rowmesh.tables.update_rules`.

    `at` are offsets of elements, `slot` those of whole rows. Numbers come as float64, so that 1 − β is exact before it
    is rounded, and states are of the type of the arithmetic.
    """
    lr, eps, correction = tl.full((), lr_, DTYPE), tl.full((), eps_, DTYPE), tl.full((), correction_, DTYPE)
    row = tl.load(rows + at, mask=inside, other=0)
    storage: tl.constexpr = row.dtype
    row = row.to(DTYPE)
    if DECAYS:
        if RULE == "adam":
            row *= tl.full((), decay_, DTYPE)
        else:
            g += tl.full((), decay_, DTYPE) * row
    if RULE == "sgd":
        row -= lr * g
    elif RULE == "adagrad":
        total = tl.load(state1 + at, mask=inside, other=1) + g * g
        tl.store(state1 + at, total, mask=inside)
        row -= _quotient_of(lr * g, correction * _root_of(total) + eps)
    elif RULE == "row_wise_adagrad":
        squares = tl.sum(tl.where(inside, g * g, 0), axis=1)
        mean = tl.load(state1 + slot, mask=is_slot, other=1) + _quotient_of(squares, tl.full((), D, DTYPE))
        tl.debug_barrier()  # several warps have read the state of a long row; one of them changes it
        tl.store(state1 + slot, mean, mask=is_slot)
        row -= _quotient_of(lr, correction * _root_of(mean) + eps)[:, None] * g
    else:
        tl.static_assert(RULE == "adam")
        beta1, beta2 = tl.full((), beta1_, DTYPE), tl.full((), beta2_, DTYPE)
        rest1, rest2 = tl.full((), rest1_, DTYPE), tl.full((), rest2_, DTYPE)
        first = beta1 * tl.load(state1 + at, mask=inside, other=0) + rest1 * g
        second = beta2 * tl.load(state2 + at, mask=inside, other=1) + rest2 * (g * g)
        tl.store(state1 + at, first, mask=inside)
        tl.store(state2 + at, second, mask=inside)
        row -= _quotient_of(lr * first, correction * _root_of(second) + eps)
    tl.store(rows + at, row.to(storage), mask=inside)


@triton.jit
def _update_merged(
    num,
    order,
    factors,
    slots,
    starts,
    node_ends,
    partials,
    gradients,
    rows,
    state1,
    state2,
    # Numbers would be passed as float32 where nothing else is said.
    lr: tl.float64,
    scaling: tl.float64,
    eps: tl.float64,
    beta1: tl.float64,
    beta2: tl.float64,
    rest1: tl.float64,
    rest2: tl.float64,
    correction: tl.float64,
    decay: tl.float64,
    D: tl.constexpr,
    RULE: tl.constexpr,
    DECAYS: tl.constexpr,
    NUM_NODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Sums the gradients of ROWS distinct slots and updates their rows."""
    dtype: tl.constexpr = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    count, columns = tl.load(num), tl.arange(0, COLUMNS)
    for begin in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        m = begin + tl.arange(0, ROWS)
        is_slot = m < count
        inside = is_slot[:, None] & (columns < D)[None, :]
        slot = tl.load(slots + m, mask=is_slot, other=0)
        total = _sum_entries(
            order,
            factors,
            starts,
            node_ends,
            partials,
            gradients,
            m,
            is_slot,
            columns,
            inside,
            D,
            dtype,
            CHUNK,
            NUM_NODES,
            ALIGNMENT,
        )
        change(
            total * tl.full((), scaling, dtype),
            rows,
            state1,
            state2,
            slot[:, None] * D + columns[None, :],
            inside,
            slot,
            is_slot,
            lr,
            eps,
            beta1,
            beta2,
            rest1,
            rest2,
            correction,
            decay,
            D,
            dtype,
            RULE,
            DECAYS,
        )


@triton.jit
def _store_sums(
    num,
    order,
    factors,
    starts,
    node_ends,
    partials,
    gradients,
    out,
    D: tl.constexpr,
    NUM_NODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Sums the gradients of ROWS distinct slots."""
    dtype: tl.constexpr = out.dtype.element_ty
    count, columns = tl.load(num), tl.arange(0, COLUMNS)
    for begin in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        m = begin + tl.arange(0, ROWS)
        is_slot = m < count
        inside = is_slot[:, None] & (columns < D)[None, :]
        total = _sum_entries(
            order,
            factors,
            starts,
            node_ends,
            partials,
            gradients,
            m,
            is_slot,
            columns,
            inside,
            D,
            dtype,
            CHUNK,
            NUM_NODES,
            ALIGNMENT,
        )
        tl.store(out + m.to(tl.int64)[:, None] * D + columns[None, :], total, mask=inside)


def update(
    rows: Tensor, state: tuple[Tensor, ...], merged: Merged, gradients: Tensor, rule: str, numbers: tuple[float, ...]
) -> None:
    """Changes the rows of merged slots and their states, in place.

    Args:
        rows: `[R, D]`, float32, float64 or bfloat16, contiguous.
        state: of the rule, in the order of its `state`; float32, or float64 where rows are: `[R, D]`, or `[R]` where it
            has one value a row.
        merged: what `merge` returned.
        gradients: `[M, D]` of the entries that were merged, contiguous, of the type of states or of rows; or what
            `Merged.cells_alignment` says.
        rule: the name of an update rule.
        numbers: what its `numbers` returned.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a layout or device does not fit.
        ConfigurationError: rows are longer than 4,096.
    """
    compute = compute_dtype(rows.dtype)
    check("rows", rows, (torch.float32, torch.float64, torch.bfloat16), 2, rows.device)
    check("gradients", gradients, (compute, rows.dtype), 2, rows.device)
    for tensor in state:
        check("state", tensor, (compute,), tensor.dim(), rows.device)
    lr, scaling, eps, beta1, beta2, correction, *decay = numbers
    shape = _shape_of(rows.shape[1])
    launch(
        _update_merged,
        _programs_of(merged, shape),
        merged.num,
        merged.order,
        merged.factors,
        merged.slots,
        merged.starts,
        merged.node_ends,
        _partials(merged, gradients, shape["D"], compute),
        gradients,
        rows,
        *(*state, None, None)[:2],
        lr,
        scaling,
        eps,
        beta1,
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        correction,
        *(decay or (0.0,)),
        RULE=rule,
        DECAYS=bool(decay),
        num_warps=_tile_warps(shape["COLUMNS"]),
        NUM_NODES=merged.num_nodes,
        ALIGNMENT=merged.cells_alignment,
        **shape,
    )


def sum_merged(merged: Merged, gradients: Tensor, out: Tensor) -> Tensor:
    """The sums that `update` would apply, one a distinct slot.

    Args:
        merged, gradients: as for `update`.
        out: `[M, D]`, float32 or float64, of the type of the arithmetic; the first `num` rows are written.

    Returns:
        `out`.
    """
    check("out", out, (torch.float32, torch.float64), 2, gradients.device)
    check("gradients", gradients, (gradients.dtype,), 2, gradients.device)
    shape = _shape_of(out.shape[1])
    launch(
        _store_sums,
        _programs_of(merged, shape),
        merged.num,
        merged.order,
        merged.factors,
        merged.starts,
        merged.node_ends,
        _partials(merged, gradients, shape["D"], out.dtype),
        gradients,
        out,
        num_warps=_tile_warps(shape["COLUMNS"]),
        NUM_NODES=merged.num_nodes,
        ALIGNMENT=merged.cells_alignment,
        **shape,
    )
    return out


def _partials(merged: Merged, gradients: Tensor, dim: int, compute: torch.dtype) -> Tensor | None:
    """The sums of chunks that are not a slot's first; None where no slot has more than one."""
    if merged.most <= CHUNK or merged.num_nodes > 1:
        return None
    assert merged.order is not None
    num_blocks = ceil_div(merged.order.numel(), CHUNK)
    partials = torch.empty(num_blocks, dim, dtype=compute, device=gradients.device)
    columns = next_power_of_2(dim)
    launch(
        _sum_chunks,
        num_blocks,
        merged.order,
        merged.factors,
        merged.starts,
        merged.ranks,
        gradients,
        partials,
        D=dim,
        COLUMNS=columns,
        CHUNK=CHUNK,
        ALIGNMENT=merged.cells_alignment,
        num_warps=_warps_of(columns),
    )
    return partials


def _programs_of(merged: Merged, shape: dict[str, int]) -> int:
    assert merged.num_nodes == 1 or not merged.cells_alignment, "sums of nodes are of entries, not of cells"
    return min(ceil_div(merged.slots.numel(), shape["ROWS"]), _MOST_PROGRAMS)


def _warps_of(columns: int) -> int:
    """Warps for one row: 16 bytes a thread."""
    return max(1, min(4, columns // 128))


def _tile_warps(columns: int) -> int:
    """Warps for a tile of rows."""
    return 2 if columns <= _TILE else 4


def _shape_of(dim: int) -> dict[str, int]:
    """Rows and columns of a program's tile; the columns are all of a row's, rounded up to a power of two."""
    columns = next_power_of_2(dim)
    if columns > MOST_COLUMNS:
        raise ConfigurationError(
            f"a row of {dim} values does not fit into one program; dim may be up to {MOST_COLUMNS}: split the table"
        )
    return {"D": dim, "ROWS": max(1, _TILE // columns), "COLUMNS": columns, "CHUNK": CHUNK}


def _chunks_signature(*, alignment: int = 0, has_factors: bool = False) -> Signature:
    types = "*i64 *fp32 *i32 *i32 *fp32 *fp32" if has_factors else "*i64 *i32 *i32 *fp32 *fp32"
    missing = {} if has_factors else {"factors": None}
    constants = {"D": 128, "COLUMNS": 128, "CHUNK": CHUNK, "ALIGNMENT": alignment}
    return Signature(_sum_chunks, types, constants | missing, _warps_of(128))


def _update_signature(
    storage: str,
    rule: str,
    dim: int,
    num_nodes: int = 1,
    num_states: int = 0,
    *,
    decays: bool = False,
    is_single: bool = False,
    alignment: int = 0,
    has_factors: bool = False,
) -> Signature:
    compute = "fp64" if storage == "fp64" else "fp32"
    missing = dict.fromkeys(["state1", "state2"][num_states:])
    missing |= {"partials" if num_nodes > 1 else "node_ends": None}
    if is_single:
        missing |= dict.fromkeys(["order", "factors", "starts", "partials"])
        before = "*i64 *i64"
    else:
        missing |= {} if has_factors else {"factors": None}
        factors = f" *{compute}" if has_factors else ""
        before = f"*i32 *i64{factors} *i64 *i32 " + ("*i64" if num_nodes > 1 else f"*{compute}")
    types = f"{before} *{compute} *{storage}" + f" *{compute}" * num_states + " fp64" * 9
    kind = {"RULE": rule, "DECAYS": decays, "NUM_NODES": num_nodes, "ALIGNMENT": alignment}
    shape = _shape_of(dim)
    return Signature(_update_merged, types, {**kind, **shape, **missing}, _tile_warps(shape["COLUMNS"]))


SIGNATURES = (
    _chunks_signature(),
    _chunks_signature(alignment=16),
    _chunks_signature(alignment=16, has_factors=True),
    Signature(
        _store_sums,
        "*i32 *i64 *i32 *fp32 *fp32 *fp32",
        {"NUM_NODES": 1, "node_ends": None, "factors": None, "ALIGNMENT": 0, **_shape_of(64)},
        _tile_warps(64),
    ),
    _update_signature("fp32", "sgd", 128),
    _update_signature("fp32", "sgd", 128, is_single=True),
    _update_signature("fp32", "sgd", 128, alignment=16),
    _update_signature("fp32", "row_wise_adagrad", 64, num_states=1, alignment=16, has_factors=True),
    _update_signature("fp32", "row_wise_adagrad", 64, num_states=1, is_single=True),
    _update_signature("bf16", "adagrad", 128, num_states=1),
    _update_signature("fp32", "row_wise_adagrad", 64, num_states=1),
    _update_signature("fp32", "row_wise_adagrad", 128, num_nodes=4, num_states=1),
    _update_signature("fp32", "row_wise_adagrad", 1024, num_states=1),
    _update_signature("fp32", "adam", 100, num_states=2),
    _update_signature("fp64", "adam", 64, num_states=2),
    _update_signature("fp32", "row_wise_adagrad", 64, num_states=1, decays=True),
    _update_signature("bf16", "adam", 64, num_states=2, decays=True),
)
