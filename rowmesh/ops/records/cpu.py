"""Records on a CPU: copies of constant length, which become a few vector moves each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
from torch import Tensor

from rowmesh.ops.simd import copy_bytes, kernel, load_i64, load_u32, prefetch

MAX_PARTS = 4  # a row, two states, a version
_AHEAD = 12


@functools.cache
def _kernels(*parts: int) -> SimpleNamespace:
    """The kernels for records of parts of so many bytes, at most MAX_PARTS, compiled at their first call.

    Their arguments are addresses, but for `count` and `stride`: uint32 `[count]`, which places; int64 `[MAX_PARTS]`,
    where each part's array begins; and the records, of which number i is at `records + i · stride`.
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


class Records:
    """Arrays whose elements at one place form a record, back to back in the order of the arrays.

    Args:
        arrays: contiguous `[n, …]`, in the host's memory, at most MAX_PARTS.

    Attributes:
        record_bytes: of a record.

    Example:
        >>> import torch
        >>> rows, versions = torch.arange(6, dtype=torch.uint8).view(3, 2), torch.tensor([7, 8, 9], dtype=torch.uint8)
        >>> packed = np.empty((2, 3), np.uint8)
        >>> Records([rows, versions]).pack(np.array([2, 0], np.uint32), packed)
        >>> packed.tolist()
        [[4, 5, 9], [0, 1, 7]]
    """

    def __init__(self, arrays: Sequence[Tensor]) -> None:
        assert len(arrays) <= MAX_PARTS
        assert all(array.is_contiguous() and not array.is_cuda for array in arrays)
        self._arrays = list(arrays)  # keeps the memory
        parts = [array.itemsize * array.shape[1:].numel() for array in arrays]
        self.record_bytes = sum(parts)
        self._kernels = _kernels(*parts)
        self._addresses = np.zeros(MAX_PARTS, np.int64)
        self._addresses[: len(arrays)] = [array.data_ptr() for array in arrays]

    def pack(self, places: np.ndarray, records: np.ndarray) -> None:
        """Gathers records from places.

        Args:
            places: uint32 `[m]`.
            records: uint8 `[m, stride]`, contiguous, out.
        """
        self._copy(self._kernels.pack, places, records)

    def unpack(self, places: np.ndarray, records: np.ndarray) -> None:
        """Scatters records to places; arguments as for `pack`."""
        self._copy(self._kernels.unpack, places, records)

    def _copy(self, kernel: Callable[..., None], places: np.ndarray, records: np.ndarray) -> None:
        assert len(places) == len(records)
        assert records.shape[1] >= self.record_bytes
        assert records.flags.c_contiguous
        kernel(places.ctypes.data, len(places), self._addresses.ctypes.data, records.ctypes.data, records.shape[1])
