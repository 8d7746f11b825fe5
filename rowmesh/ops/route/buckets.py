"""Buckets: neighbouring rows, single ones at first, then ever more of them, whose number costs a few instructions.

Rows r are in one bucket where r + 256 has the same exponent and the same first 8 bits of the fraction as a float64: the
rows up to 255 have one each, and in others there are between a 512th and a 256th of r + 256. A table of 10⁹ rows has
5,597. A plan's ranges are short where rows are read often, which is at the beginning, so that few begin in
any bucket.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rowmesh.ops.simd import float_bits, inlined

_BITS = 8
_SINGLE = 1 << _BITS
_SHIFT = 52 - _BITS
_FIRST = (1023 + _BITS) << _BITS


@inlined
def bucket_of(row):
    """The bucket of a row, in a kernel; for rows below 2⁵²."""
    return (float_bits(np.float64(row + _SINGLE)) >> _SHIFT) - _FIRST


def first_rows(num_rows: int) -> NDArray[np.int64]:
    """The first row of every bucket that has rows below `num_rows`.

    >>> first_rows(262).tolist()[-4:]
    [255, 256, 258, 260]
    """
    last = (np.array([num_rows - 1 + _SINGLE], np.float64).view(np.int64)[0] >> _SHIFT) - _FIRST
    values = (np.arange(last + 1) + _FIRST << _SHIFT).view(np.float64)
    return values.astype(np.int64) - _SINGLE
