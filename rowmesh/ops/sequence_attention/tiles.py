"""Tiles: common parts of the kernels of packed attention: where a tile is, its biases, scores and their gradients."""

# Triton's language is not typed in a way that a checker could follow.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportInvalidTypeForm=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from rowmesh.ops.sequence_attention.bias import NUM_BUCKETS

BUCKETS, POWER = tl.constexpr(1), tl.constexpr(2)
BUCKET_COUNT = tl.constexpr(NUM_BUCKETS)


@triton.jit
def tile_of(offsets, ends, sequences, number, num_sequences, TILE: tl.constexpr):
    """A tile's sequence, its begin, length and end, and the tile's first row in it; no length beyond the last tile."""
    sequence = tl.load(sequences + number)
    is_tile = sequence < num_sequences
    begin = tl.load(offsets + sequence, mask=is_tile, other=0)
    length = tl.load(offsets + sequence + 1, mask=is_tile, other=0) - begin
    before = tl.load(ends + sequence - 1, mask=is_tile & (sequence > 0), other=0)
    return begin, length, begin + length, (number - before) * TILE


@triton.jit
def load_lines(pointer, i, is_line, d, head, HEADS: tl.constexpr, DIM: tl.constexpr):
    """`[·, ·]`: vectors of events i, of a head; one of i and d is across the other. 0 where there are none."""
    return tl.load(pointer + (i * HEADS + head) * DIM + d, mask=is_line & (d < DIM), other=0)


@triton.jit
def quotient_of(x, y):
    """As a CPU rounds it: `/` of float32 is off by up to two units, or multiplies by a reciprocal."""
    return x / y if y.dtype == tl.float64 else tl.div_rn(x, y)


@triton.jit
def share_of(scores):
    """The logistic function."""
    shrunk = 1 + tl.exp(-scores)
    return quotient_of(tl.full(shrunk.shape, 1, shrunk.dtype), shrunk)


@triton.jit
def exponents(times, asked, i, j, end, dtype: tl.constexpr, UNIT: tl.constexpr, FORM: tl.constexpr):
    """What −b is multiplied by, of functions of time."""
    steps = durations(times, asked, i, j, end).to(dtype)
    steps = quotient_of(steps, tl.full(steps.shape, UNIT, dtype))
    if FORM == POWER:  # the logarithm of 1 + steps, with what the sum lost in rounding
        total = steps + 1
        steps = tl.log(total) + quotient_of(steps - (total - 1), total)
    return steps


@triton.jit
def durations(times, asked, i, j, end):
    """int64: from events j to what is asked after events i; whatever from events that are not before `end`."""
    at = tl.load(asked + i, mask=i < end, other=0)[:, None]
    return tl.abs(at - tl.load(times + j, mask=j < end, other=0)[None, :])


@triton.jit
def buckets_of(times, asked, starts, i, j, end):
    """A logarithm is one off at most, which the starts of buckets put right."""
    duration = durations(times, asked, i, j, end)
    guess = (tl.log(tl.maximum(duration, 1).to(tl.float32)) * (1 / 0.301)).to(tl.int32)
    guess = tl.minimum(guess, BUCKET_COUNT - 1)
    guess -= (duration < tl.load(starts + guess)).to(tl.int32)
    after = tl.minimum(guess + 1, BUCKET_COUNT - 1)
    return tl.where(duration >= tl.load(starts + after), after, guess)


@triton.jit
def time_weights(
    time, starts, times, asked, i, j, end, inside, dtype: tl.constexpr, UNIT: tl.constexpr, FORM: tl.constexpr
):
    """Weights by time of a tile."""
    if FORM == BUCKETS:
        return tl.load(time + buckets_of(times, asked, starts, i, j, end), mask=inside, other=0)
    exponent = exponents(times, asked, i, j, end, dtype, UNIT, FORM)
    return tl.where(inside, tl.load(time) * tl.exp(-tl.load(time + 1) * exponent), 0)


@triton.jit
def position_weights(positions, i, j, inside, LAST: tl.constexpr):
    """Weights by position of a tile."""
    return tl.load(positions + LAST + j[None, :] - i[:, None], mask=inside, other=0)


@triton.jit
def multiply(a, i, is_a, b, j, is_b, head, HEADS: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr):
    """`[rows, columns]`: products of the vectors of lines i of a with those of lines j of b, of a head."""
    dtype: tl.constexpr = a.dtype.element_ty
    precision: tl.constexpr = "ieee" if dtype == tl.float64 else "tf32x3"
    total = tl.zeros([i.shape[0], j.shape[0]], dtype)
    for start in range(0, DIM, STEP):
        d = start + tl.arange(0, STEP)
        left = load_lines(a, i[:, None], is_a[:, None], d[None, :], head, HEADS, DIM)
        right = load_lines(b, j[None, :], is_b[None, :], d[:, None], head, HEADS, DIM)
        total = tl.dot(left, right, total, input_precision=precision, out_dtype=dtype)
    return total


@triton.jit
def scores_of(
    queries,
    keys,
    positions,
    time,
    starts,
    times,
    asked,
    begin,
    end,
    i,
    j,
    inside,
    head,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    LAST: tl.constexpr,
    UNIT: tl.constexpr,
    SEPARATE: tl.constexpr,
    FORM: tl.constexpr,
    STEP: tl.constexpr,
):
    """Products of the queries of rows and the keys of columns, and the biases that are added to them."""
    row, column = begin + i, begin + j
    scores = multiply(queries, row, row < end, keys, column, column < end, head, HEADS, KEY, STEP)
    if not SEPARATE:
        if positions is not None:
            scores += position_weights(positions, i, j, inside, LAST)
        if time is not None:
            scores += time_weights(time, starts, times, asked, row, column, end, inside, scores.dtype, UNIT, FORM)
    return scores


@triton.jit
def factor_of(length, dtype: tl.constexpr, DIVISOR: tl.constexpr):
    """The factors of silu."""
    one = tl.full((), 1, dtype)
    return quotient_of(one, length.to(dtype)) if DIVISOR is None else quotient_of(one, tl.full((), DIVISOR, dtype))


@triton.jit
def activate(scores, of_weights, sums, deltas, row, is_row, factor, inside, SOFTMAX: tl.constexpr):
    """Weights of products and the gradient of their scores, from that of the weights; 0 outside."""
    if SOFTMAX:
        most, total = tl.load(sums + 2 * row, mask=is_row, other=0), tl.load(sums + 2 * row + 1, mask=is_row, other=1)
        delta = tl.load(deltas + row, mask=is_row, other=0)
        weights = tl.exp(scores - most[:, None])
        weights = tl.where(inside, quotient_of(weights, tl.broadcast_to(total[:, None], weights.shape)), 0)
        return weights, weights * (of_weights - delta[:, None])
    share = share_of(scores)
    slope = tl.where(inside, factor * share * (1 + scores * (1 - share)), 0)
    return tl.where(inside, factor * scores * share, 0), of_weights * slope


@triton.jit
def add_to(line, distance, values, is_there):
    """Adds to a program's own line of sums."""
    total = tl.load(line + distance, mask=is_there, other=0) + values
    tl.debug_barrier()  # where a tile has fewer distances than the program threads, several warps read a place
    tl.store(line + distance, total, mask=is_there)
