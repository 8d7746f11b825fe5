"""Records on a CPU: copies of constant length, which become a few vector moves each."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from rowmesh.ops.simd import copy_bytes, kernel, load_i64, load_u32, prefetch

MAX_PARTS = 4  # a row, two states, a version
_AHEAD = 12


@functools.cache
def record_kernels(*parts: int) -> SimpleNamespace:
    """The kernels for records of parts of so many bytes, at most MAX_PARTS, compiled at their first call.

    Their arguments are addresses, but for `count` and `stride`:

        pack(places, count, arrays, records, stride)
        unpack(places, count, arrays, records, stride)

    `places` are uint32 `[count]`; `arrays` are int64 `[MAX_PARTS]`, where each part's array begins; record i is at
    `records + i · stride`.
    """
    A, B, C, D = (*parts, *[0] * (MAX_PARTS - len(parts)))
    AB, ABC = A + B, A + B + C

    @kernel
    def pack(places, count, arrays, records, stride):
        a, b, c, d = load_i64(arrays), load_i64(arrays + 8), load_i64(arrays + 16), load_i64(arrays + 24)
        for i in range(count):
            ahead = load_u32(places + 4 * min(i + _AHEAD, count - 1))
            prefetch(a + ahead * A, A)
            prefetch(b + ahead * B, B)
            place, record = load_u32(places + 4 * i), records + i * stride
            copy_bytes(record, a + place * A, A)
            copy_bytes(record + A, b + place * B, B)
            copy_bytes(record + AB, c + place * C, C)
            copy_bytes(record + ABC, d + place * D, D)

    @kernel
    def unpack(places, count, arrays, records, stride):
        a, b, c, d = load_i64(arrays), load_i64(arrays + 8), load_i64(arrays + 16), load_i64(arrays + 24)
        for i in range(count):
            place, record = load_u32(places + 4 * i), records + i * stride
            copy_bytes(a + place * A, record, A)
            copy_bytes(b + place * B, record + A, B)
            copy_bytes(c + place * C, record + AB, C)
            copy_bytes(d + place * D, record + ABC, D)

    return SimpleNamespace(pack=pack, unpack=unpack)
