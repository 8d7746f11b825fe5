"""Numbers of columns: text is parsed by one rule, whatever the column is for; `1_000` is no number in any."""

# pyright: reportAttributeAccessIssue=false
# (pyarrow.compute makes its functions when it is imported)

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rowmesh.data.plain_columns import is_text


def floats_of(column: pa.Array) -> tuple[NDArray[np.float64], list[int]]:
    """The values of a plain column, NaN where missing or no number; and which rows of text are no numbers.

    >>> floats_of(pa.array(["1.5", "", "1_000", None]))
    (array([1.5, nan, nan, nan]), [2])
    """
    if not is_text(column.type):
        return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), []
    values, bad = parse_numbers(column, pa.float64())
    return values.to_numpy(zero_copy_only=False), bad


def parse_numbers(column: pa.Array, kind: pa.DataType, first: int = 0) -> tuple[pa.Array, list[int]]:
    """Parses text, or casts what is none; where some value is no number, halves the column until it is found.

    Returns:
        The numbers, null where there is none; and which are no numbers, from `first` on.
    """
    try:
        if is_text(column.type):
            text = pc.ascii_trim_whitespace(column.cast(pa.string()))
            if pa.types.is_integer(kind) and pc.any(pc.match_substring(text, "x", ignore_case=True)).as_py():
                raise pa.ArrowInvalid("0x10, which Arrow reads among integers, and not among floats")
            column = pc.if_else(pc.equal(text, ""), None, text)
        return column.cast(kind), []
    except pa.ArrowInvalid:
        if len(column) == 1:
            return pa.nulls(1, kind), [first]
        half = len(column) // 2
        low, low_bad = parse_numbers(column[:half], kind, first)
        high, high_bad = parse_numbers(column[half:], kind, first + half)
        return pa.concat_arrays([low, high]), low_bad + high_bad
