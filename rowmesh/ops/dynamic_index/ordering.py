"""The smallest of many keys in ascending order: in buckets by what tells them apart, again and again.

A row is (score, last step, id, slot), of which the first three are its key. Keys are distinct.
"""

from __future__ import annotations

import numpy as np

from rowmesh.ops.simd import inlined, kernel

_KEY, _ROW = 3, 4  # numbers
_FEW = 32
_MOST_BUCKETS = 2048
_PER_BUCKET = 4
NUM_ENDS = _MOST_BUCKETS + 1


@inlined
def less(a0, a1, a2, b0, b1, b2):
    """Whether a key is the smaller one."""
    return a0 < b0 or (a0 == b0 and (a1 < b1 or (a1 == b1 and a2 < b2)))


@inlined
def _insertion_sort(rows, first, last):
    for at in range(first + 1, last):
        e0, e1, e2, e3 = rows[at, 0], rows[at, 1], rows[at, 2], rows[at, 3]
        to = at
        while to > first and less(e0, e1, e2, rows[to - 1, 0], rows[to - 1, 1], rows[to - 1, 2]):
            for k in range(_ROW):
                rows[to, k] = rows[to - 1, k]
            to -= 1
        rows[to, 0], rows[to, 1], rows[to, 2], rows[to, 3] = e0, e1, e2, e3


@inlined
def _range_of(rows, first, last):
    """The first number of the keys that is not the same in all, its smallest value and its largest."""
    column, least, most = 0, rows[first, 0], rows[first, 0]
    for k in range(_KEY):
        if least == most:
            column, least, most = k, rows[first, k], rows[first, k]
            for i in range(first, last):
                least, most = min(least, rows[i, k]), max(most, rows[i, k])
    return column, least, most


@kernel
def _distribute(rows, first, last, wanted, ends, scratch):
    """Sorts `[first, last)` by buckets, those that hold what is `wanted`; returns their number.

    `ends` gets where each ends.
    """
    column, least, most = _range_of(rows, first, last)
    buckets = 8
    while buckets < _MOST_BUCKETS and buckets * _PER_BUCKET < last - first:
        buckets *= 2
    shift, span = np.uint64(0), np.uint64(most) - np.uint64(least)
    while span >> shift >= np.uint64(buckets):
        shift += np.uint64(1)
    ends[: buckets + 1] = 0
    for i in range(first, last):
        ends[np.int64((np.uint64(rows[i, column]) - np.uint64(least)) >> shift) + 1] += 1
    ends[0], used = first, 0
    for bucket in range(buckets):
        ends[bucket + 1] += ends[bucket]
        if ends[bucket] < min(wanted, last):
            used = bucket + 1
    for i in range(first, last):
        bucket = np.int64((np.uint64(rows[i, column]) - np.uint64(least)) >> shift)
        if bucket < used:
            for k in range(_ROW):
                scratch[ends[bucket], k] = rows[i, k]
            ends[bucket] += 1
    for i in range(first, ends[used - 1]):  # slices would bring their errors' texts, which take seconds to compile
        for k in range(_ROW):
            rows[i, k] = scratch[i, k]
    return used


@kernel
def order(rows, count, wanted, scratch, ends, stack):
    """Moves the `wanted` smallest of `count` rows to the front, in ascending order; what follows them is lost.

    Args:
        rows: int64 `[≥ count, 4]`.
        scratch: as large.
        ends: int64 `[NUM_ENDS]`, scratch.
        stack: int64 `[≥ 1 + count / 32, 2]`, scratch: ranges that are to be sorted.
    """
    depth = 1
    stack[0, 0], stack[0, 1] = 0, count
    while depth > 0:
        depth -= 1
        first, last = stack[depth, 0], stack[depth, 1]
        if last - first <= _FEW:
            _insertion_sort(rows, first, last)
            continue
        used = _distribute(rows, first, last, wanted, ends, scratch)
        for bucket in range(used):
            if ends[bucket] - first > _FEW:
                stack[depth, 0], stack[depth, 1] = first, ends[bucket]
                depth += 1
            else:
                _insertion_sort(rows, first, ends[bucket])
            first = ends[bucket]
