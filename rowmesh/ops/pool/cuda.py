"""Pool and its backward on a GPU. See [Note: GPU kernels] in `rowmesh.ops.gpu`.

Forward: a program sums a tile of bags of one feature, ids in order, rows where they are: behind the inverse, and behind
a list of slots where that is given. Backward: ids are sorted by their rows, stably (`file_cells`); then every gradient
is read once, every sum stays in registers and is written once.

[Note: rows with many ids]
A row of a small table may have a third of all ids, and one program would add them up for long. So a row's ids are
summed in chunks of CHUNK, counted from its first: the first chunk by the program of the row, each other one by a
program of its own, and the sums of chunks are added in order. The order depends on the ids of that row alone. Up to
CHUNK ids it is that of the CPU, and the sum equal to the bit; beyond that it is equal to rounding.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import MOST_PROGRAMS, Signature, ceil_div, check, compute_dtype, launch, tile_of_rows
from rowmesh.ops.merge_update.handles import DeviceMerged
from rowmesh.ops.pool.handles import WIDEST, Bags, FiledCells

CHUNK = 64
_BLOCK = 1024
MOST_JAGGED = 16  # of a program: with a warp of them or more, triton 3.6 and 3.7 fail on code of their own making
_FEW = 256  # bags of a program that divides in 64 bits, which takes many registers
_STORAGE = (torch.float32, torch.bfloat16, torch.float64)
_INDEX = (torch.int64, torch.int32)
_UNROLL = tl.constexpr(4)  # loads that do not wait for one another
_CHUNK_UNROLL = tl.constexpr(8)


@triton.jit
def bags_of(feature, offsets, bag, is_bag):
    """The first id of each bag, and how many there are."""
    bounds = tl.load(feature + 2)
    size = bag * 0 + tl.load(feature + 3)
    first = tl.load(feature) + bag * size
    if offsets is not None:  # noqa: SIM102 (known when the kernel is compiled; what follows is not)
        if bounds >= 0:
            begin = tl.load(offsets + bounds + bag, mask=is_bag, other=0)
            size = tl.load(offsets + bounds + bag + 1, mask=is_bag, other=0) - begin
            first = tl.load(feature) + begin - tl.load(offsets + bounds)
    return first, tl.where(is_bag, size, 0)


@triton.jit
def factor_of(weights, feature, at, size, here, MEAN: tl.constexpr, DTYPE: tl.constexpr):
    """The weight of an id (1 where there are none), over the bag's size where the feature is a mean."""
    if weights is None:
        factor = tl.zeros(at.shape, tl.float64) + 1
    else:
        factor = tl.load(weights + at, mask=here, other=0).to(tl.float64)
    if MEAN:
        # 64 bits, as on a CPU; one division an id is nothing beside its row.
        factor = factor / tl.where((tl.load(feature + 7) != 0) & here, size, 1).to(tl.float64)
    return factor.to(DTYPE)


@triton.jit
def _vectors_of(
    rows,
    slots,
    inverse,
    weights,
    feature,
    at,
    size,
    here,
    columns,
    is_column,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    MEAN: tl.constexpr,
):
    """The rows of ids `at`, times their factors; zero where there is no id."""
    row = tl.load(inverse + at, mask=here, other=0).to(tl.int64)
    if slots is not None:
        row = tl.load(slots + row, mask=here, other=0).to(tl.int64)
    mask = here[:, None] & is_column[None, :]
    values = tl.load(rows + row[:, None] * DIM + columns[None, :], mask=mask, other=0).to(DTYPE)
    if MEAN or weights is not None:
        values *= factor_of(weights, feature, at, size, here, MEAN, DTYPE)[:, None]
    return values


@triton.jit
def _pool(
    rows,
    slots,
    inverse,
    features,
    offsets,
    weights,
    out,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    MEAN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BAGS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """The sums of BAGS bags of a feature; programs are numbered by tile and feature. UNROLL is 0 for bags of one id."""
    feature = features + tl.program_id(1) * 8
    num_bags = tl.load(feature + 4)
    begin = tl.program_id(0).to(tl.int64) * BAGS
    if begin >= num_bags:
        return
    bag, columns = begin + tl.arange(0, BAGS), tl.arange(0, COLUMNS)
    is_bag, is_column = bag < num_bags, columns < DIM
    first, size = bags_of(feature, offsets, bag, is_bag)
    if UNROLL == 0:
        # Not a loop of one round: there the assembler lets each load wait for the sum before it.
        total = _vectors_of(
            rows, slots, inverse, weights, feature, first, size, is_bag, columns, is_column, DIM, DTYPE, MEAN
        )
    else:
        total = tl.zeros([BAGS, COLUMNS], DTYPE)
        for j in range(0, tl.max(size), UNROLL):
            for k in tl.static_range(UNROLL):
                total += _vectors_of(
                    rows,
                    slots,
                    inverse,
                    weights,
                    feature,
                    first + j + k,
                    size,
                    j + k < size,
                    columns,
                    is_column,
                    DIM,
                    DTYPE,
                    MEAN,
                )
    # The compiler cannot see this, and needs it to write 16 bytes at a time.
    cell = tl.multiple_of(tl.load(feature + 5) + bag * tl.load(feature + 6), ALIGNMENT)
    tl.store(out + cell[:, None] + columns[None, :], total, mask=is_bag[:, None] & is_column[None, :])


def pool(rows: Tensor, inverse: Tensor, bags: Bags, out: Tensor, slots: Tensor | None = None) -> Tensor:
    """The (weighted) sum or mean of each bag's rows; an empty bag is zero.

    Args:
        rows: `[R, D]`, float32, float64 or bfloat16: fetched rows, or a table.
        inverse: int32 `[N]`: the number of each id's row.
        bags: of the ids.
        out: where vectors go; float64 where rows are, else float32.
        slots: int64 or int32 `[U]`: row u is `rows[slots[u]]`; None where it is `rows[u]`.

    Returns:
        `out`, of which only the cells of bags are written.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.

    Example:
        >>> rows = torch.tensor([[1.0, 2.0], [10.0, 20.0]], device=device)
        >>> offsets = torch.tensor([0, 2, 3], device=device)  # one feature: a bag of ids 0 and 1, and one of id 2
        >>> bags = Bags.describe([(0, 3, 0, 0, 2, 0, 2, 0)], device, offsets)
        >>> pool(rows, torch.tensor([0, 1, 1], dtype=torch.int32, device=device), bags, torch.empty_like(rows)).tolist()
        [[11.0, 22.0], [10.0, 20.0]]
    """
    device, compute = rows.device, compute_dtype(rows.dtype)
    check("rows", rows, _STORAGE, 2, device)
    check("inverse", inverse, (torch.int32,), 1, device)
    check("out", out, (compute,), out.dim(), device)
    if slots is not None:
        check("slots", slots, _INDEX, 1, device)
    bags.check(inverse.numel(), device)
    columns, tile = tile_of_rows(rows.shape[1], compute)
    unroll = 0 if bags.is_single else _UNROLL.value
    tile = max(tile // max(unroll, 1), 1)  # as many loads under way, whether of different bags or of one
    tile = tile if bags.offsets is None else min(tile, MOST_JAGGED)
    launch(
        _pool,
        (ceil_div(bags.num_bags, tile), len(bags.features)),
        rows,
        slots,
        inverse,
        bags.features,
        bags.offsets,
        bags.weights,
        out,
        DIM=rows.shape[1],
        DTYPE=_arithmetic(compute),
        MEAN=bags.has_mean,
        ALIGNMENT=bags.alignment,
        BAGS=tile,
        COLUMNS=columns,
        UNROLL=unroll,
    )
    return out


@triton.jit
def _find_cells(
    features, offsets, weights, cells, factors, DTYPE: tl.constexpr, MEAN: tl.constexpr, BAGS: tl.constexpr
):
    """The cell of every id, and its factor, in the order of the ids."""
    feature = features + tl.program_id(1) * 8
    num_bags = tl.load(feature + 4)
    begin = tl.program_id(0).to(tl.int64) * BAGS
    if begin >= num_bags:
        return
    bag = begin + tl.arange(0, BAGS)
    first, size = bags_of(feature, offsets, bag, bag < num_bags)
    cell = tl.load(feature + 5) + bag * tl.load(feature + 6)
    for j in range(tl.max(size)):
        at, here = first + j, j < size
        tl.store(cells + at, cell, mask=here)
        if factors is not None:
            tl.store(factors + at, factor_of(weights, feature, at, size, here, MEAN, DTYPE), mask=here)


@triton.jit(do_not_specialize=("num_ids", "num_features", "num_steps"))
def _cells_of_single(order, features, cells, num_ids, num_features, num_steps, BLOCK: tl.constexpr):
    """The cells of sorted ids, where every bag has one."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(order + place, mask=place < num_ids, other=0)
    low = tl.zeros_like(at)
    high = low + num_features - 1
    for _ in range(num_steps):  # the last feature that begins at or before the id
        middle = (low + high + 1) // 2
        is_later = tl.load(features + middle * 8) <= at
        low = tl.where(is_later, middle, low)
        high = tl.where(is_later, high, middle - 1)
    feature = features + low * 8
    cell = tl.load(feature + 5) + (at - tl.load(feature)) * tl.load(feature + 6)
    tl.store(cells + place, cell, mask=place < num_ids)


@triton.jit(do_not_specialize=("num_ids",))
def _file(order, rows, cells, factors, pointers, filed_cells, filed_factors, num_ids, BLOCK: tl.constexpr):
    """Cells and factors in the order of their rows, and where the entries of each row begin."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_entry = entry < num_ids
    at = tl.load(order + entry, mask=is_entry, other=0)
    tl.store(filed_cells + entry, tl.load(cells + at, mask=is_entry, other=0), mask=is_entry)
    if factors is not None:
        tl.store(filed_factors + entry, tl.load(factors + at, mask=is_entry, other=0), mask=is_entry)
    row = tl.load(rows + entry, mask=is_entry, other=0)
    # Rows between that of the entry before and this one do not occur: they begin, and end, here as well.
    missed = row - tl.load(rows + entry - 1, mask=is_entry & (entry > 0), other=-1)
    missed = tl.where(is_entry, missed, 0)
    for back in range(tl.max(missed)):
        tl.store(pointers + row - back, entry, mask=back < missed)


def file_cells(
    inverse: Tensor, bags: Bags, num_rows: int, dtype: torch.dtype = torch.float32, *, is_covered: bool = True
) -> FiledCells:
    """Files the output cell of every id, and its factor, under its row, in the order of the ids.

    Args:
        inverse: int32 `[N]`.
        bags: of the ids.
        num_rows: an upper bound on the rows; `backward` writes so many sums.
        dtype: of the arithmetic: float32 or float64.
        is_covered: whether every id is in a bag. The sums of rows that have other ids too are not to be used.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.

    Example:
        >>> bags = Bags.describe([(0, 3, -1, 1, 3, 0, 2, 0)], device)  # three bags of one id
        >>> filed = file_cells(torch.tensor([1, 0, 1], dtype=torch.int32, device=device), bags, num_rows=2)
        >>> filed.pointers.tolist(), filed.cells.tolist()
        ([0, 1, 3], [2, 0, 4])
    """
    device, num_ids = inverse.device, inverse.numel()
    check("inverse", inverse, (torch.int32,), 1, device)
    bags.check(num_ids, device)
    cells, factors = _cells_and_factors(bags, num_ids, dtype, is_covered=is_covered)
    filed_cells, filed_factors = (None if each is None else torch.empty_like(each) for each in (cells, factors))
    rows, order = torch.sort(inverse, stable=True)
    pointers = torch.full((num_rows + 1,), num_ids, dtype=torch.int32, device=device)
    launch(
        _file,
        ceil_div(num_ids, _BLOCK),
        order,
        rows,
        cells,
        factors,
        pointers,
        filed_cells,
        filed_factors,
        num_ids,
        BLOCK=_BLOCK,
    )
    assert filed_cells is not None
    return FiledCells(rows, pointers, filed_cells, filed_factors, bags.alignment)


def file_merged(merged: DeviceMerged, bags: Bags, dtype: torch.dtype = torch.float32) -> DeviceMerged:
    """Ids by distinct slot, as entries whose gradients are the cells of an output.

    Args:
        merged: the slots of the ids of bags, each of which is in one.
        bags: of the ids.
        dtype: of the arithmetic: float32 or float64.

    Example:
        >>> bags = Bags.describe([(0, 3, -1, 1, 3, 0, 2, 0)], device)  # three bags of one id
        >>> from rowmesh.ops.merge.cuda import merge_numbers
        >>> merged = merge_numbers(torch.tensor([7, 5, 7], dtype=torch.int32, device=device))
        >>> file_merged(merged, bags).order.tolist()
        [2, 0, 4]
    """
    assert merged.order is not None
    num_ids, factors = merged.order.numel(), None
    bags.check(num_ids, merged.order.device)
    if bags.is_single and not bags.has_factors:
        cells = torch.empty_like(merged.order)
        steps = (len(bags.features) - 1).bit_length()
        launch(
            _cells_of_single,
            ceil_div(num_ids, _BLOCK),
            merged.order,
            bags.features,
            cells,
            num_ids,
            len(bags.features),
            steps,
            BLOCK=_BLOCK,
        )
    else:
        cells, factors = _cells_and_factors(bags, num_ids, dtype)
        cells = cells.index_select(0, merged.order)
        factors = None if factors is None else factors.index_select(0, merged.order)
    return replace(merged, order=cells, factors=factors, cells_alignment=bags.alignment)


def _cells_and_factors(
    bags: Bags, num_ids: int, dtype: torch.dtype, *, is_covered: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The cell of every id, int64 `[N]`, and its factor, `[N]` of a type, or None."""
    device = bags.features.device
    cells = torch.empty(num_ids, dtype=torch.int64, device=device)
    if not is_covered:
        cells.zero_()  # a cell that can be read
    factors = torch.empty(num_ids, dtype=dtype, device=device) if bags.has_factors else None
    launch(
        _find_cells,
        (ceil_div(bags.num_bags, _FEW), len(bags.features)),
        bags.features,
        bags.offsets,
        bags.weights,
        cells,
        factors,
        DTYPE=_arithmetic(dtype),
        MEAN=bags.has_mean,
        BAGS=_FEW,
    )
    return cells, factors


@triton.jit
def _gradient_of(grad, cells, factors, entry, here, columns, is_column, ALIGNMENT: tl.constexpr):
    """The output gradient of an entry's cell, times its factor."""
    cell = tl.multiple_of(tl.load(cells + entry, mask=here, other=0), ALIGNMENT)
    values = tl.load(grad + cell[:, None] + columns[None, :], mask=here[:, None] & is_column[None, :], other=0)
    if factors is not None:
        values *= tl.load(factors + entry, mask=here, other=0)[:, None]
    return values


@triton.jit
def _sum_chunks(
    grad,
    rows,
    pointers,
    cells,
    factors,
    partials,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """`partials[b]` = the sum of the chunk, other than a row's first, that begins in entries b · CHUNK … + CHUNK − 1.

    There is one at most. It belongs to the row of entry b · CHUNK, since a row that begins later in the block has its
    second chunk in a later one; and chunk k of a row that begins at entry s is that of block s // CHUNK + k.
    """
    block = tl.program_id(0)
    begin = block * CHUNK
    row = tl.load(rows + begin)
    row_begin, row_end = tl.load(pointers + row), tl.load(pointers + row + 1)
    first = row_begin + (begin - row_begin + CHUNK - 1) // CHUNK * CHUNK
    last = tl.minimum(first + CHUNK, row_end)
    if (row_begin < begin) & (first < last):
        columns = tl.arange(0, COLUMNS)
        is_column = columns < DIM
        total = tl.zeros([1, COLUMNS], DTYPE)
        for j in range(first, last, UNROLL):
            for k in tl.static_range(UNROLL):
                entry = j + k + tl.arange(0, 1)
                total += _gradient_of(grad, cells, factors, entry, entry < last, columns, is_column, ALIGNMENT)
        at = block.to(tl.int64) * DIM + columns
        tl.store(partials + at[None, :], total, mask=is_column[None, :])


@triton.jit(do_not_specialize=("num_rows",))
def _sum_rows(
    grad,
    pointers,
    cells,
    factors,
    partials,
    out,
    count,
    num_rows,
    DIM: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
    ADDS: tl.constexpr,
):
    """`out[u]` = the sum of row u's entries: one by one up to CHUNK of them, then the sums of chunks.

    With ADDS the sum goes on from what `out[u]` is, and rows without entries are neither read nor written: another
    stream may be reading them.
    """
    end = num_rows
    if count is not None:
        end = tl.minimum(tl.load(count), num_rows)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < DIM
    for tile in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = tile + tl.arange(0, ROWS)
        is_row = row < end
        first = tl.load(pointers + row, mask=is_row, other=0)
        size = tl.load(pointers + row + 1, mask=is_row, other=0) - first
        at = row.to(tl.int64)[:, None] * DIM + columns[None, :]
        written = is_row[:, None] & is_column[None, :]
        total = tl.zeros([ROWS, COLUMNS], DTYPE)
        if ADDS:
            written = written & (size > 0)[:, None]
            total += tl.load(out + at, mask=written, other=0)
        for j in range(0, tl.minimum(tl.max(size), CHUNK), UNROLL):
            for k in tl.static_range(UNROLL):
                here = j + k < tl.minimum(size, CHUNK)
                total += _gradient_of(grad, cells, factors, first + j + k, here, columns, is_column, ALIGNMENT)
        chunks = (size + CHUNK - 1) // CHUNK
        for j in range(1, tl.max(chunks), UNROLL):
            for k in tl.static_range(UNROLL):
                mask = (j + k < chunks)[:, None] & is_column[None, :]
                partial = (first // CHUNK + j + k).to(tl.int64)
                total += tl.load(partials + partial[:, None] * DIM + columns[None, :], mask=mask, other=0)
        tl.store(out + at, total, mask=written)


def backward(
    grad: Tensor, filed: FiledCells, out: Tensor, count: Tensor | None = None, *, adds: bool = False
) -> Tensor:
    """The gradients of rows: sums over the cells that each went into. See [Note: rows with many ids].

    Args:
        grad: of the output of `pool`, of the same shape; float32 or float64.
        filed: the cells by rows.
        out: `[U, D]` of the same dtype, U the `num_rows` of `file_cells`; rows that do not occur become zero.
        count: `[1]` int64 or int32: only the first `count` rows are written. None for all.
        adds: whether sums go on from what is in `out`; rows that do not occur then stay as they are.

    Returns:
        `out`.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a shape, layout or device does not fit.

    Example:
        >>> inverse = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
        >>> filed = file_cells(inverse, Bags.describe([(0, 3, -1, 1, 3, 0, 2, 0)], device), num_rows=2)
        >>> grad = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]], device=device)
        >>> backward(grad, filed, torch.empty(2, 2, device=device)).tolist()
        [[10.0, 20.0], [101.0, 202.0]]
    """
    device, dtype = grad.device, grad.dtype
    check("grad", grad, (torch.float32, torch.float64), grad.dim(), device)
    check("out", out, (dtype,), 2, device)
    num_rows, num_ids, dim = filed.pointers.numel() - 1, filed.cells.numel(), out.shape[1]
    if len(out) != num_rows:
        raise ValueError(f"cells are filed under {num_rows} rows, out has {len(out)}")
    if count is not None:
        check("count", count, _INDEX, 1, device)
    columns, tile = tile_of_rows(dim, dtype)
    tile = max(tile // _UNROLL.value, 1)
    common = {"DIM": dim, "DTYPE": _arithmetic(dtype), "ALIGNMENT": filed.alignment, "COLUMNS": columns, "CHUNK": CHUNK}
    num_chunks = ceil_div(num_ids, CHUNK)
    partials = torch.empty(num_chunks, dim, dtype=dtype, device=device)
    launch(
        _sum_chunks,
        num_chunks,
        grad,
        filed.rows,
        filed.pointers,
        filed.cells,
        filed.factors,
        partials,
        num_warps=max(1, min(4, columns // 128)),
        UNROLL=_CHUNK_UNROLL.value,
        **common,
    )
    launch(
        _sum_rows,
        min(ceil_div(num_rows, tile), 4 * MOST_PROGRAMS),  # those that have rows of many ids would hold up others
        grad,
        filed.pointers,
        filed.cells,
        filed.factors,
        partials,
        out,
        count,
        num_rows,
        ROWS=tile,
        UNROLL=_UNROLL.value,
        ADDS=adds,
        **common,
    )
    return out


def _arithmetic(dtype: torch.dtype) -> tl.dtype:
    return tl.float64 if dtype == torch.float64 else tl.float32


def _signatures(storage: str, compute: str, dim: int, columns: int, tile: int) -> tuple[Signature, ...]:
    alignment = math.gcd(dim, WIDEST)
    common = {"DIM": dim, "DTYPE": tl.dtype(compute), "ALIGNMENT": alignment, "COLUMNS": columns}
    single = {"slots": None, "offsets": None, "weights": None, "MEAN": False, "BAGS": tile, "UNROLL": 0}
    chunks = {"factors": None, "CHUNK": CHUNK, "UNROLL": _CHUNK_UNROLL.value}
    row_sums = {"ROWS": tile // 4, "CHUNK": CHUNK, "UNROLL": _UNROLL.value, "ADDS": False}
    return (
        Signature(_pool, f"*{storage} *i32 *i64 *{compute}", common | single),
        Signature(
            _pool,
            f"*{storage} *i64 *i32 *i64 *i64 *{compute} *{compute}",
            common | {"MEAN": True, "BAGS": min(tile // 4, MOST_JAGGED), "UNROLL": _UNROLL.value},
        ),
        Signature(
            _sum_chunks, f"*{compute} *i32 *i32 *i64 *{compute}", common | chunks, max(1, min(4, columns // 128))
        ),
        Signature(
            _sum_rows, f"*{compute} *i32 *i64 *{compute} *{compute} *i64 i32", common | row_sums | {"factors": None}
        ),
        Signature(_sum_rows, f"*{compute} *i32 *i64 *{compute} *{compute} *{compute} *i64 i32", common | row_sums),
        Signature(
            _sum_rows,
            f"*{compute} *i32 *i64 *{compute} *{compute} *i64 i32",
            common | row_sums | {"factors": None, "ADDS": True},
        ),
    )


SIGNATURES = (
    *_signatures("fp32", "fp32", 64, 64, 32),
    *_signatures("fp32", "fp32", 128, 128, 16),
    *_signatures("bf16", "fp32", 100, 128, 16),
    *_signatures("fp64", "fp64", 3, 4, 256),
    Signature(
        _pool,
        "*fp32 *i32 *i64 *i64 *fp32",
        {
            "DIM": 16,
            "DTYPE": tl.float32,
            "ALIGNMENT": 16,
            "COLUMNS": 16,
            "BAGS": MOST_JAGGED,
            "UNROLL": _UNROLL.value,
            "MEAN": False,
            "slots": None,
            "weights": None,
        },
    ),
    Signature(_find_cells, "*i64 *i64 *fp32 *i64 *fp32", {"DTYPE": tl.float32, "MEAN": True, "BAGS": _FEW}),
    Signature(_cells_of_single, "*i64 *i64 *i64 i32 i32 i32", {"BLOCK": _BLOCK}),
    Signature(_file, "*i64 *i32 *i64 *fp32 *i32 *i64 *fp32 i32", {"BLOCK": _BLOCK}),
)
