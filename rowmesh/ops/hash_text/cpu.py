"""Hash of text on a CPU: XXH64, a value at a time."""

from __future__ import annotations

import numpy as np

from rowmesh.ops.compiled import compiled

_P1, _P2, _P3 = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)
_P4, _P5 = np.uint64(0x85EBCA77C2B2AE63), np.uint64(0x27D4EB2F165667C5)
_LANE = 32  # bytes that four accumulators take at a time


@compiled(nogil=True)
def hash_text(values, offsets, seed, out):
    """See `rowmesh.ops.hash_text.hash_text`."""
    for i in range(len(out)):
        out[i] = np.int64(_hash(values, offsets[i], offsets[i + 1], seed))


@compiled(cache=False, nogil=True, inline="always")
def _rotated(x, bits):
    return (x << np.uint64(bits)) | (x >> np.uint64(64 - bits))


@compiled(cache=False, nogil=True)
def _read(values, first, size):
    """Some bytes as a little-endian number."""
    number = np.uint64(0)
    for k in range(size):
        number |= np.uint64(values[first + k]) << np.uint64(8 * k)
    return number


@compiled(cache=False, nogil=True)
def _round(accumulator, lane):
    return _rotated(accumulator + lane * _P2, 31) * _P1


@compiled(cache=False, nogil=True)
def _hash(values, first, end, seed):
    length, at = np.uint64(end - first), first
    if end - first >= _LANE:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + _LANE <= end:
            a = _round(a, _read(values, at, 8))
            b = _round(b, _read(values, at + 8, 8))
            c = _round(c, _read(values, at + 16, 8))
            d = _round(d, _read(values, at + 24, 8))
            at += _LANE
        h = _rotated(a, 1) + _rotated(b, 7) + _rotated(c, 12) + _rotated(d, 18)
        for lane in (a, b, c, d):
            h = (h ^ _round(np.uint64(0), lane)) * _P1 + _P4
    else:
        h = seed + _P5
    h += length
    while at + 8 <= end:
        h = _rotated(h ^ _round(np.uint64(0), _read(values, at, 8)), 27) * _P1 + _P4
        at += 8
    if at + 4 <= end:
        h = _rotated(h ^ (_read(values, at, 4) * _P1), 23) * _P2 + _P3
        at += 4
    while at < end:
        h = _rotated(h ^ (np.uint64(values[at]) * _P5), 11) * _P1
        at += 1
    h = (h ^ (h >> np.uint64(33))) * _P2
    h = (h ^ (h >> np.uint64(29))) * _P3
    return h ^ (h >> np.uint64(32))
