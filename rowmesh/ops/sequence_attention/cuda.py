"""Attention of packed sequences on a GPU: no padding, no matrix of weights in memory, and no size read by the host.

[Note: tiles of sequences]

A program has a tile of rows of one sequence and head, and goes over the tiles of columns up to the diagonal. There are
at most N / TILE + B tiles; which sequence each belongs to is found on the device, and programs beyond the last have
nothing to do. Weights are computed again in the backward pass: once by rows, for the gradients of queries, positions
and time, and once by columns, for those of keys and values.

Gradients of tables are sums over all pairs of events. Each program of the pass by rows has a line of its own, of as
many numbers as the table has; lines are added up at the end, in their order. Along a diagonal of a tile all pairs are
equally far apart: a tile is turned so that its diagonals are columns. Pairs below the diagonal through a
tile's corner belong to the distances of that tile, pairs above it to the distances of the tile before. Buckets of time
are few within a tile, and are summed one by one.

Products of float32 are made on the tensor cores, each in three passes of TF32, which come as near as sums in float32
(`rowmesh/ops/interaction/cuda.py`). See [Note: GPU kernels] in `rowmesh.ops.gpu`.
"""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rowmesh.ops.gpu import Signature, ceil_div, check, launch, next_power_of_2
from rowmesh.ops.sequence_attention.bias import Bias, bucket_starts
from rowmesh.ops.sequence_attention.reference import num_channels
from rowmesh.ops.sequence_attention.tiles import (
    BUCKET_COUNT,
    BUCKETS,
    activate,
    add_to,
    buckets_of,
    exponents,
    factor_of,
    load_lines,
    multiply,
    position_weights,
    quotient_of,
    scores_of,
    share_of,
    tile_of,
    time_weights,
)

__all__ = ["MOST_COLUMNS", "SIGNATURES", "backward", "forward"]
DTYPES = (torch.float32, torch.float64)
MOST_COLUMNS = 256
"""Columns of a head's values, queries and keys: a program holds whole lines."""
_FORMS = {"buckets": 1, "power": 2, "exponential": 3}
_TILE, _STEP = 16, 16  # of what a product adds up at once, too: its operands are in registers
_MOST_LINES = 512  # of sums of tables' gradients, over all heads


@triton.jit
def _forward(
    values,
    queries,
    keys,
    positions,
    time,
    starts,
    times,
    asked,
    offsets,
    ends,
    sequences,
    out,
    sums,
    num_sequences,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEY: tl.constexpr,
    LAST: tl.constexpr,
    DIVISOR: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SEPARATE: tl.constexpr,
    FORM: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Programs: tiles × heads. For a softmax, `sums` receives each row's maximum and sum."""
    dtype: tl.constexpr = values.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float64 else "tf32x3"
    begin, length, end, first = tile_of(offsets, ends, sequences, tl.program_id(0), num_sequences, TILE)
    if first < length:
        head = tl.program_id(1)
        i, d = first + tl.arange(0, TILE), tl.arange(0, DIMS)
        is_row = i < length
        most, total = tl.full([TILE], float("-inf"), dtype), tl.zeros([TILE], dtype)
        products = tl.zeros([TILE, DIMS], dtype)
        by_position, by_time = tl.zeros([TILE, DIMS], dtype), tl.zeros([TILE, DIMS], dtype)
        for start in range(0, first + TILE, TILE):
            j = start + tl.arange(0, TILE)
            inside = (j[None, :] <= i[:, None]) & is_row[:, None]
            is_column = j < length
            v = load_lines(values, (begin + j)[:, None], is_column[:, None], d[None, :], head, HEADS, DIM)
            if queries is not None:
                biases = positions, time, starts, times, asked
                at = begin, end, i, j, inside, head
                scores = scores_of(queries, keys, *biases, *at, HEADS, KEY, LAST, UNIT, SEPARATE, FORM, STEP)
                if SOFTMAX:
                    scores = tl.where(inside, scores, float("-inf"))
                    highest = tl.maximum(most, tl.max(scores, axis=1))
                    base = tl.where(highest == float("-inf"), 0, highest)  # of rows that are not there
                    shrink = tl.exp(most - base)
                    weights = tl.exp(scores - base[:, None])
                    total, most = total * shrink + tl.sum(weights, axis=1), highest
                    products *= shrink[:, None]
                else:
                    weights = tl.where(inside, scores * share_of(scores), 0)
                products = tl.dot(weights, v, products, input_precision=precision, out_dtype=dtype)
            if SEPARATE:
                if positions is not None:
                    weights = position_weights(positions, i, j, inside, LAST)
                    by_position = tl.dot(weights, v, by_position, input_precision=precision, out_dtype=dtype)
                if time is not None:
                    weights = time_weights(
                        time, starts, times, asked, begin + i, begin + j, end, inside, dtype, UNIT, FORM
                    )
                    by_time = tl.dot(weights, v, by_time, input_precision=precision, out_dtype=dtype)
        total = tl.where(is_row, total, 1)
        line = (begin + i)[:, None] * CHANNELS
        is_out = is_row[:, None] & (d < DIM)[None, :]
        if queries is not None:
            if SOFTMAX:
                products = quotient_of(products, tl.broadcast_to(total[:, None], products.shape))
                row = (begin + i) * HEADS + head
                tl.store(sums + 2 * row, most, mask=is_row)
                tl.store(sums + 2 * row + 1, total, mask=is_row)
            else:
                products *= factor_of(length, dtype, DIVISOR)
            tl.store(out + (line * HEADS + head) * DIM + d[None, :], products, mask=is_out)
        if SEPARATE:
            if positions is not None:
                at = (line + FIRST_BIAS) * HEADS + head
                tl.store(out + at * DIM + d[None, :], by_position, mask=is_out)
            if time is not None:
                at = (line + CHANNELS - 1) * HEADS + head
                tl.store(out + at * DIM + d[None, :], by_time, mask=is_out)


@triton.jit
def _backward_rows(
    values,
    queries,
    keys,
    positions,
    time,
    starts,
    times,
    asked,
    offsets,
    ends,
    sequences,
    grad,
    sums,
    deltas,
    of_queries,
    of_positions,
    of_time,
    num_sequences,
    num_tiles,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEY: tl.constexpr,
    LAST: tl.constexpr,
    DIVISOR: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SEPARATE: tl.constexpr,
    FORM: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Programs: lines of sums × heads, each of every so manieth tile. Gradients of queries, positions and time."""
    dtype: tl.constexpr = values.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float64 else "tf32x3"
    head, step = tl.program_id(1), tl.arange(0, TILE)
    own = (tl.program_id(0) * HEADS + head).to(tl.int64)
    key = tl.arange(0, KEYS)
    bucket = tl.arange(0, BUCKET_COUNT)
    by_bucket = tl.zeros([BUCKET_COUNT], tl.float64)
    of_a, of_b = tl.zeros([TILE], tl.float64), tl.zeros([TILE], tl.float64)
    for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        begin, length, end, first = tile_of(offsets, ends, sequences, number, num_sequences, TILE)
        if first < length:
            i = first + step
            is_row, event = i < length, begin + i
            total = tl.zeros([TILE, KEYS], dtype)
            above = tl.zeros([TILE], tl.float64)
            for ahead in range(0, first + TILE, TILE):
                start = first - ahead
                j = start + step
                inside = (j[None, :] <= i[:, None]) & is_row[:, None]
                is_column = j < length
                column = begin + j
                of_scores = tl.zeros([TILE, TILE], dtype)
                if queries is not None:
                    biases = positions, time, starts, times, asked
                    at = begin, end, i, j, inside, head
                    scores = scores_of(queries, keys, *biases, *at, HEADS, KEY, LAST, UNIT, SEPARATE, FORM, STEP)
                    line = event * CHANNELS
                    of_weights = multiply(grad, line, is_row, values, column, is_column, head, HEADS, DIM, STEP)
                    factor = factor_of(length, dtype, DIVISOR)
                    row = event * HEADS + head
                    _, of_scores = activate(scores, of_weights, sums, deltas, row, is_row, factor, inside, SOFTMAX)
                    k = load_lines(keys, column[:, None], is_column[:, None], key[None, :], head, HEADS, KEY)
                    total = tl.dot(of_scores, k, total, input_precision=precision, out_dtype=dtype)
                if positions is not None:
                    if SEPARATE:
                        line = event * CHANNELS + FIRST_BIAS
                        of_scores = multiply(grad, line, is_row, values, column, is_column, head, HEADS, DIM, STEP)
                        of_scores = tl.where(inside, of_scores, 0)
                    # Turned: element (r, s) is that of row r and column r − s, modulo TILE.
                    columns = (step[:, None] - step[None, :] + TILE) % TILE
                    turned = tl.gather(of_scores, columns, axis=1).to(tl.float64)
                    is_near = step[:, None] >= step[None, :]
                    to = of_positions + own * (LAST + 1)
                    distance = ahead - TILE + step
                    nearer = above + tl.sum(tl.where(is_near, 0, turned), axis=0)
                    add_to(to, distance, nearer, (distance >= 0) & (distance <= LAST))
                    above = tl.sum(tl.where(is_near, turned, 0), axis=0)
                if time is not None:
                    if SEPARATE:
                        line = event * CHANNELS + CHANNELS - 1
                        of_scores = multiply(grad, line, is_row, values, column, is_column, head, HEADS, DIM, STEP)
                        of_scores = tl.where(inside, of_scores, 0)
                    if FORM == BUCKETS:
                        found = buckets_of(times, asked, starts, event, column, end)
                        lowest = tl.min(tl.min(tl.where(inside, found, BUCKET_COUNT), axis=1), axis=0)
                        highest = tl.max(tl.max(tl.where(inside, found, -1), axis=1), axis=0)
                        for number_of in range(lowest, highest + 1):
                            chosen = tl.where(found == number_of, of_scores, 0).to(tl.float64)
                            by_bucket += tl.where(bucket == number_of, tl.sum(tl.sum(chosen, axis=1), axis=0), 0)
                    else:
                        a, b = tl.load(time), tl.load(time + 1)
                        exponent = exponents(times, asked, event, column, end, dtype, UNIT, FORM)
                        each = of_scores * tl.exp(-b * exponent)
                        of_a += tl.sum(each.to(tl.float64), axis=1)
                        of_b -= tl.sum((a * each * exponent).to(tl.float64), axis=1)
            if positions is not None:
                distance = (first // TILE) * TILE + step
                add_to(of_positions + own * (LAST + 1), distance, above, distance <= LAST)
            if queries is not None:
                to = of_queries + ((event * HEADS + head) * KEY)[:, None] + key[None, :]
                tl.store(to, total, mask=is_row[:, None] & (key < KEY)[None, :])
        tl.debug_barrier()  # the next tile's threads read sums that others wrote
    if time is not None:
        if FORM == BUCKETS:
            tl.store(of_time + own * BUCKET_COUNT + bucket, by_bucket)
        else:
            tl.store(of_time + own * 2, tl.sum(of_a, axis=0))
            tl.store(of_time + own * 2 + 1, tl.sum(of_b, axis=0))


@triton.jit
def _backward_columns(
    values,
    queries,
    keys,
    positions,
    time,
    starts,
    times,
    asked,
    offsets,
    ends,
    sequences,
    grad,
    sums,
    deltas,
    of_values,
    of_keys,
    num_sequences,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KEY: tl.constexpr,
    LAST: tl.constexpr,
    DIVISOR: tl.constexpr,
    UNIT: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SEPARATE: tl.constexpr,
    FORM: tl.constexpr,
    CHANNELS: tl.constexpr,
    FIRST_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Programs: tiles of columns × heads. Gradients of values and keys."""
    dtype: tl.constexpr = values.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float64 else "tf32x3"
    begin, length, end, first = tile_of(offsets, ends, sequences, tl.program_id(0), num_sequences, TILE)
    if first < length:
        head = tl.program_id(1)
        j, d, key = first + tl.arange(0, TILE), tl.arange(0, DIMS), tl.arange(0, KEYS)
        is_column, event = j < length, (begin + j)[:, None]
        total, total_of_keys = tl.zeros([TILE, DIMS], dtype), tl.zeros([TILE, KEYS], dtype)
        for start in range(first, length, TILE):
            i = start + tl.arange(0, TILE)
            is_row, row = i < length, (begin + i)[:, None]
            inside = (j[None, :] <= i[:, None]) & is_row[:, None]
            if queries is not None:
                q = load_lines(queries, row, is_row[:, None], key[None, :], head, HEADS, KEY)
                g = load_lines(grad, row * CHANNELS, is_row[:, None], d[None, :], head, HEADS, DIM)
                biases = positions, time, starts, times, asked
                at = begin, end, i, j, inside, head
                scores = scores_of(queries, keys, *biases, *at, HEADS, KEY, LAST, UNIT, SEPARATE, FORM, STEP)
                line = (begin + i) * CHANNELS
                column = begin + j
                of_weights = multiply(grad, line, is_row, values, column, is_column, head, HEADS, DIM, STEP)
                factor = factor_of(length, dtype, DIVISOR)
                at = (begin + i) * HEADS + head
                weights, found = activate(scores, of_weights, sums, deltas, at, is_row, factor, inside, SOFTMAX)
                total = tl.dot(tl.trans(weights), g, total, input_precision=precision, out_dtype=dtype)
                total_of_keys = tl.dot(tl.trans(found), q, total_of_keys, input_precision=precision, out_dtype=dtype)
            if SEPARATE:
                if positions is not None:
                    line = row * CHANNELS + FIRST_BIAS
                    g = load_lines(grad, line, is_row[:, None], d[None, :], head, HEADS, DIM)
                    weights = position_weights(positions, i, j, inside, LAST)
                    total = tl.dot(tl.trans(weights), g, total, input_precision=precision, out_dtype=dtype)
                if time is not None:
                    line = row * CHANNELS + CHANNELS - 1
                    g = load_lines(grad, line, is_row[:, None], d[None, :], head, HEADS, DIM)
                    weights = time_weights(
                        time, starts, times, asked, begin + i, begin + j, end, inside, dtype, UNIT, FORM
                    )
                    total = tl.dot(tl.trans(weights), g, total, input_precision=precision, out_dtype=dtype)
        is_value = is_column[:, None] & (d < DIM)[None, :]
        tl.store(of_values + (event * HEADS + head) * DIM + d[None, :], total, mask=is_value)
        if queries is not None:
            is_key = is_column[:, None] & (key < KEY)[None, :]
            tl.store(of_keys + (event * HEADS + head) * KEY + key[None, :], total_of_keys, mask=is_key)


@dataclass(frozen=True)
class _Call:
    """The arguments that the three kernels have in common.

    Attributes:
        num_tiles: at most so many.
        num_sequences: B.
        tensors: the arguments that all begin with, by name.
        sizes: the constants.
    """

    num_tiles: int
    num_sequences: int
    tensors: dict[str, Tensor | None]
    sizes: dict[str, Any]


def forward(
    values: Tensor,
    offsets: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    activation: str,
    divisor: float | None,
    bias: Bias,
) -> tuple[Tensor, Tensor | None]:
    """`[N, C, H, D]` as `rowmesh.ops.sequence_attention.attend` has it, and what `backward` needs of a softmax.

    All are contiguous, float32 or float64, of N, H and D of at least 1; no gradients are recorded.

    Raises:
        TypeError: a dtype is wrong.
        ValueError: a layout or device does not fit, or a head has more than MOST_COLUMNS columns.
    """
    call = _prepare(values, offsets, queries, keys, activation, divisor, bias)
    out = values.new_empty(values.shape[0], call.sizes["CHANNELS"], *values.shape[1:])
    sums = values.new_empty(*values.shape[:2], 2) if call.sizes["SOFTMAX"] else None
    programs = (call.num_tiles, values.shape[1])
    launch(
        _forward,
        programs,
        *call.tensors.values(),
        out,
        sums,
        call.num_sequences,
        num_warps=_warps(values.dtype),
        **call.sizes,
    )
    return out, sums


def backward(
    values: Tensor,
    offsets: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    activation: str,
    divisor: float | None,
    bias: Bias,
    out: Tensor,
    sums: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of values, queries, keys, positions and time; None where there is no such argument.

    Arguments are those of `forward`, its result, and the contiguous gradient of its output. Gradients of positions
    and time are float64.
    """
    call = _prepare(values, offsets, queries, keys, activation, divisor, bias)
    check("grad", grad, (values.dtype,), 4, values.device)
    heads, sizes = values.shape[1], call.sizes
    deltas = (grad[:, 0] * out[:, 0]).sum(-1) if sizes["SOFTMAX"] else None
    of_queries, of_keys = (None if each is None else torch.empty_like(each) for each in (queries, keys))
    num_lines = min(call.num_tiles, max(_MOST_LINES // heads, 1))
    zeros = functools.partial(values.new_zeros, dtype=torch.float64)
    of_positions = None if bias.positions is None else zeros(num_lines * heads, sizes["LAST"] + 1)
    of_time = None if bias.time is None else zeros(num_lines * heads, bias.time.shape[0])
    of_values, warps = torch.empty_like(values), _warps(values.dtype)
    last = (grad, sums, deltas, of_queries, of_positions, of_time, call.num_sequences, call.num_tiles)
    for part in _parts([name for name, each in call.tensors.items() if each is not None], bias.separate):
        tensors = [each if name in part else None for name, each in call.tensors.items()]
        launch(_backward_rows, (num_lines, heads), *tensors, *last, num_warps=warps, **sizes)
    last = (grad, sums, deltas, of_values, of_keys, call.num_sequences)
    programs = (call.num_tiles, heads)
    launch(_backward_columns, programs, *call.tensors.values(), *last, num_warps=warps, **sizes)
    if of_positions is not None:
        nearest = of_positions.sum(0)
        of_positions = torch.cat([nearest.flip(0), nearest.new_zeros(sizes["LAST"])])
    return of_values, of_queries, of_keys, of_positions, None if of_time is None else of_time.sum(0)


def _prepare(
    values: Tensor,
    offsets: Tensor,
    queries: Tensor | None,
    keys: Tensor | None,
    activation: str,
    divisor: float | None,
    bias: Bias,
) -> _Call:
    device = values.device
    check("values", values, DTYPES, 3, device)
    check("offsets", offsets, (torch.int64,), 1, device)
    asked = bias.times if bias.query_times is None else bias.query_times
    floats = {"queries": (queries, 3), "keys": (keys, 3), "positions": (bias.positions, 1), "time": (bias.time, 1)}
    for name, (each, dim) in floats.items():
        if each is not None:
            check(name, each, (values.dtype,), dim, device)
    for name, each in (("times", bias.times), ("query_times", asked)):
        if each is not None:
            check(name, each, (torch.int64,), 1, device)
    num_events, heads, dim = values.shape
    key = 0 if queries is None else queries.shape[2]
    if max(dim, key) > MOST_COLUMNS:
        raise ValueError(f"a head has {max(dim, key)} columns, more than the {MOST_COLUMNS} that a program holds")
    last = 0 if bias.positions is None else bias.positions.shape[0] // 2
    sizes = _sizes(heads, dim, key, last, divisor, bias, activation == "softmax")
    tiles = (offsets.diff() + (sizes["TILE"] - 1)) // sizes["TILE"]
    if bias.positions is not None and tiles.shape[0]:
        message = f"a sequence has more events than the {last + 1} that positions have weights for"
        torch.ops.aten._assert_async.msg(offsets.diff().max() <= last + 1, message)
    ends, num_tiles = tiles.cumsum(0), ceil_div(num_events, sizes["TILE"]) + tiles.shape[0]
    sequences = torch.searchsorted(ends, torch.arange(num_tiles, device=device), right=True)
    tensors = {
        "values": values,
        "queries": queries,
        "keys": keys,
        "positions": bias.positions,
        "time": bias.time,
        "starts": None if bias.time is None else _starts(device),
        "times": None if bias.time is None else bias.times,
        "asked": None if bias.time is None else asked,
        "offsets": offsets,
        "ends": ends,
        "sequences": sequences,
    }
    return _Call(num_tiles, tiles.shape[0], tensors, sizes)


def _parts(names: Sequence[str], separate: bool) -> list[set[str]]:
    """The arguments of each pass by rows: one a channel, or registers would not do for channels of their own."""
    channels = [{"queries", "keys"}, {"positions"}, {"time", "starts", "times", "asked"}]
    shared = set(names) - set().union(*channels)
    if not separate:
        return [set(names)] if len(shared) < len(names) else []
    return [shared | channel for channel in channels if channel <= set(names)]


def _sizes(
    heads: int, dim: int, key: int, last: int, divisor: float | None, bias: Bias, softmax: bool
) -> dict[str, Any]:
    return {
        "HEADS": heads,
        "DIM": dim,
        "KEY": max(key, 1),
        "LAST": last,
        "DIVISOR": divisor,
        "UNIT": bias.unit,
        "SOFTMAX": softmax and key > 0,
        "SEPARATE": bias.separate,
        "FORM": 0 if bias.time is None else _FORMS[bias.form],
        "CHANNELS": num_channels(key > 0, bias),
        "FIRST_BIAS": int(key > 0),
        "TILE": _TILE,
        "DIMS": max(next_power_of_2(dim), 16),
        "KEYS": max(next_power_of_2(key), 16),
        "STEP": _STEP,
    }


def _warps(dtype: torch.dtype) -> int:
    """So many that registers do, or nearly, as `benchmarks.gpu_compile` finds."""
    return 16 if dtype == torch.float64 else 4


@functools.cache
def _starts(device: torch.device) -> Tensor:
    return bucket_starts().to(device)


def _signatures() -> Iterator[Signature]:
    """What HSTU, SASRec and FuXi launch, of small and large heads."""
    single, double = torch.float32, torch.float64
    for dim, dtype, form in (
        (25, single, "power"),
        (64, single, "power"),
        (128, single, "exponential"),
        (16, double, "exponential"),
    ):
        buckets = Bias(time=_EMPTY, positions=_EMPTY)
        yield from _of_model(dim, dtype, buckets, False, True)  # HSTU
        yield from _of_model(dim, dtype, Bias(), True, True)  # SASRec
        yield from _of_model(dim, dtype, dataclasses.replace(buckets, separate=True), False, True)  # FuXi-α
        yield from _of_model(dim, dtype, dataclasses.replace(buckets, form=form, separate=True), False, False)  # FuXi-β


def _of_model(dim: int, dtype: torch.dtype, bias: Bias, softmax: bool, has_products: bool) -> Iterator[Signature]:
    sizes = _sizes(2, dim, dim if has_products else 0, 49, 50.0, bias, softmax)
    number = "*fp64" if dtype == torch.float64 else "*fp32"
    missing = [
        *(() if has_products else ("queries", "keys", "of_queries", "of_keys")),
        *(() if bias.positions is not None else ("positions", "of_positions")),
        *(() if bias.time is not None else ("time", "of_time", "starts", "times", "asked")),
        *(() if softmax else ("sums", "deltas")),
    ]
    for kernel in (_forward, _backward_rows, _backward_columns):
        names = [name for name in kernel.arg_names if name not in sizes]
        there = set(names).difference(missing)
        for part in _parts(list(there), bias.separate and kernel is _backward_rows) or [there]:
            constants = sizes | dict.fromkeys(set(names) - part)
            types = [_type(name, number) for name in names if name in part]
            yield Signature(kernel, " ".join(types), constants, _warps(dtype))


def _type(name: str, number: str) -> str:
    if name.startswith("num_"):
        return "i32"
    if name in ("of_positions", "of_time"):
        return "*fp64"
    return "*i64" if name in ("starts", "times", "asked", "offsets", "ends", "sequences") else number


_EMPTY = torch.empty(0)
SIGNATURES = tuple(_signatures())
