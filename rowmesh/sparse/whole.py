"""whole_numbers: ids and offsets as int64, or an error; nothing is cut to a whole number."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import DataError

_WHOLE = (
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
_BOUND = 1 << 63


def whole_numbers(values: Tensor | np.ndarray | Iterable[int], what: str) -> Tensor:
    """The same numbers as int64; a tensor of int64 is not copied.

    Args:
        values: a tensor or an array of any type of integers, of which those of 64 bits without a sign keep their bits;
            or Python's integers.
        what: they are called in errors.

    Raises:
        DataError: one is no whole number of 64 bits.

    Example:
        >>> whole_numbers([3, -1], "ids of 'user'").tolist()
        [3, -1]
    """
    if isinstance(values, np.ndarray) and values.dtype.kind in "iu":
        values = torch.from_numpy(np.array(values, values.dtype.newbyteorder("="), order="C"))
    if isinstance(values, Tensor):
        if values.dtype not in _WHOLE and values.numel():  # torch.tensor([]) is of floats
            raise DataError(f"{what} must be whole numbers, got {values.dtype}, which would be cut: give integers")
        return values.long()
    return torch.tensor([_whole(value, what) for value in values], dtype=torch.int64, device="cpu")


def _whole(value: object, what: str) -> int:
    try:
        number = operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise DataError(f"{what} must be whole numbers, got {value!r}") from None
    if not -_BOUND <= number < _BOUND:
        raise DataError(f"{what} must be whole numbers of 64 bits, got {number}")
    return number
