"""Pre-images on a CPU: copies of rows of any size, prefetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from numba import types
from torch import Tensor

from rowmesh.ops.simd import (
    c_function,
    kernel,
    load_i64,
    load_u8,
    load_u32,
    prefetch,
    store_u8,
    store_u32,
    stream_end,
    stream_line,
)

AHEAD = 12
CLAIMED = 2
"""What `claim` makes of a 1."""
_memcpy = c_function("memcpy", types.int64, types.int64, types.int64, types.int64)

Slots = npt.NDArray[np.uint32]


class Block(NamedTuple):
    """The pre-images that one update made.

    Attributes:
        first: the number of the first of them.
        rows: `[n, …]`, contiguous.
    """

    first: int
    rows: Tensor


def claim(is_free: npt.NDArray[np.uint8], places: Slots, slots: Slots, at: Slots, first: int) -> Slots:
    """Marks those of the slots that are free as claimed, and numbers them.

    Args:
        is_free: uint8 `[S]`, by slot: 1 where it is free, `CLAIMED` after that; changed. Slots past its end are not.
        places: uint32 `[S]`; set to one more than the number of each slot that was free.
        slots: uint32 `[N]`.
        at: uint32 `[N]`, anything beside them.
        first: the number of the first.

    Returns:
        The values beside the slots that were free, in their order, each once.

    Example:
        >>> is_free, places = np.array([1, 0, 1], np.uint8), np.zeros(3, np.uint32)
        >>> slots, at = (np.array(numbers, np.uint32) for numbers in ([2, 1, 2, 9], [5, 6, 7, 8]))
        >>> claim(is_free, places, slots, at, 7).tolist(), is_free.tolist(), places.tolist()
        ([5], [1, 0, 2], [0, 0, 8])
    """
    assert len(is_free) == len(places), (len(is_free), len(places))
    assert len(slots) == len(at), (len(slots), len(at))
    slots, at = np.ascontiguousarray(slots, np.uint32), np.ascontiguousarray(at, np.uint32)
    found = np.empty(len(slots), np.uint32)
    addresses = [_address(each) for each in (is_free, places, slots, at)]
    return found[: _claim(*addresses, len(slots), len(is_free), first, _address(found))]


def settle(is_free: npt.NDArray[np.uint8], places: Slots, slots: range | Slots) -> Slots:
    """Marks slots as not free, and gives the places of those that were claimed.

    Args:
        is_free: as for `claim`; 0 for the slots after it.
        places: as for `claim`.
        slots: some of them, below `[S]`; a range has the step 1.

    Returns:
        uint32 `[n]`: their places, 0 for slots that were not claimed; empty where none was.

    Example:
        >>> is_free, places = np.array([2, 1, 2], np.uint8), np.array([4, 9, 5], np.uint32)
        >>> settle(is_free, places, range(0, 2)).tolist(), settle(is_free, places, range(1, 2)).tolist()
        ([4, 0], [])
        >>> is_free.tolist()
        [0, 0, 2]
    """
    assert len(is_free) == len(places), (len(is_free), len(places))
    found, first, at = np.empty(len(slots), np.uint32), 0, 0
    if isinstance(slots, range):
        assert slots.step == 1, slots
        first, last = slots.start, slots.stop - 1
    else:
        slots = np.ascontiguousarray(slots, np.uint32)
        at, last = _address(slots), int(slots.max(initial=0))
    assert not len(slots) or 0 <= last < len(is_free), "slots that there are"
    any_claimed = _settle(_address(is_free), _address(places), first, at, len(slots), _address(found))
    return found[: len(slots) * any_claimed]


def copy_all(sources: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Copies each tensor to one of the same size, all without the interpreter's lock, and past the caches.

    Other threads keep what they have in them. As fast as the memory where `outs` begin at multiples of 64 bytes.
    """
    for source, out in zip(sources, outs, strict=True):
        assert source.is_contiguous(), source.stride()
        assert out.is_contiguous(), out.stride()
        assert (out.dtype, out.shape) == (source.dtype, source.shape), (out.dtype, out.shape)
    jobs = np.array(
        [(out.data_ptr(), of.data_ptr(), of.nbytes) for of, out in zip(sources, outs, strict=True)], np.int64
    )
    _copy_all(_address(jobs), len(jobs))


class PreImages:
    """The pre-images of the rows of one array.

    Example:
        >>> import torch
        >>> rows, kept = torch.arange(6.0).view(3, 2), PreImages()
        >>> kept.keep(rows, np.array([2, 0], np.uint32), torch.empty(2, 2))
        >>> later = rows + 10
        >>> kept.restore(np.array([2, 0, 1], np.uint32), later, kept.blocks)
        >>> later.tolist()
        [[0.0, 1.0], [12.0, 13.0], [4.0, 5.0]]
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._num = 0

    def keep(self, rows: Tensor, at: Slots, out: Tensor) -> None:
        """Copies `rows[at]`, of the host's or a device's memory, to `out`, which is kept: the next pre-images."""
        assert rows.is_contiguous(), rows.stride()
        assert out.is_contiguous(), out.stride()
        assert out.dtype == rows.dtype, (out.dtype, rows.dtype)
        assert out.shape == (len(at), *rows.shape[1:]), out.shape
        assert not len(at) or int(at.max()) < len(rows), "rows that there are"
        at = np.ascontiguousarray(at, np.uint32)
        if rows.device.type == "cpu":
            _keep(rows.data_ptr(), _address(at), len(at), _row_bytes(rows), out.data_ptr())
        else:
            out.copy_(rows[torch.from_numpy(at.astype(np.int64)).to(rows.device)])
        self.blocks.append(Block(self._num, out))
        self._num += len(at)

    @staticmethod
    def restore(places: Slots, out: Tensor, blocks: list[Block]) -> None:
        """Puts pre-images over the rows `[n, …]` that have one.

        Args:
            places: uint32 `[n]`: one more than the number of a row's pre-image; 0 where it has none.
            out: changed.
            blocks: where they are, some of `blocks` from the first on.
        """
        assert out.is_contiguous(), out.stride()
        assert len(places) == len(out), (len(places), len(out))
        if not blocks:
            return
        num = blocks[-1].first + len(blocks[-1].rows)
        places = np.ascontiguousarray(places, np.uint32)
        firsts = np.array([each.first for each in blocks], np.int64)
        addresses = np.array([each.rows.data_ptr() for each in blocks], np.int64)
        of_blocks = _address(firsts), _address(addresses), len(blocks)
        is_right = _restore(_address(places), len(places), *of_blocks, num, _row_bytes(out), out.data_ptr())
        assert is_right, "pre-images that there are"


def _address(array: npt.NDArray) -> int:
    return array.ctypes.data


def _row_bytes(rows: Tensor) -> int:
    return rows.itemsize * rows.shape[1:].numel()


@kernel
def _claim(is_free, places, slots, at, num_slots, stop, first, found):
    """Arguments are addresses, but the numbers `num_slots`, `stop` (past the last slot) and `first`."""
    count = 0
    for i in range(num_slots):
        prefetch(is_free + min(load_u32(slots + 4 * min(i + AHEAD, num_slots - 1)), stop - 1), 1)
        slot = load_u32(slots + 4 * i)
        if slot < stop and load_u8(is_free + slot) == 1:
            store_u8(is_free + slot, CLAIMED)
            store_u32(found + 4 * count, load_u32(at + 4 * i))
            count += 1
            store_u32(places + 4 * slot, first + count)
    return count


@kernel
def _settle(is_free, places, first, slots, count, found):
    """Arguments are addresses, but numbers; without `slots` these are `count` from `first` on."""
    any_claimed = 0
    for i in range(count):
        slot = load_u32(slots + 4 * i) if slots else first + i
        is_claimed = load_u8(is_free + slot) == CLAIMED
        store_u8(is_free + slot, 0)
        store_u32(found + 4 * i, load_u32(places + 4 * slot) if is_claimed else 0)
        any_claimed |= is_claimed
    return any_claimed


@kernel
def _copy_all(jobs, count):
    """Copies for each job, which has the address to write to, the address to read from, and a number of bytes."""
    for job in range(jobs, jobs + 24 * count, 24):
        to, source, num_bytes = load_i64(job), load_i64(job + 8), load_i64(job + 16)
        streamed = 0 if to % 64 else num_bytes // 64 * 64
        for line in range(0, streamed, 64):
            stream_line(to + line, source + line)
        _memcpy(to + streamed, source + streamed, num_bytes - streamed)
    stream_end()


@kernel
def _keep(rows, at, count, row_bytes, out):
    """`out[i] = rows[at[i]]`; arguments are addresses, but `count` and `row_bytes`."""
    is_streamed = row_bytes % 64 == 0 and out % 64 == 0
    for i in range(count):
        ahead = rows + load_u32(at + 4 * min(i + AHEAD, count - 1)) * row_bytes
        for line in range(0, row_bytes, 64):
            prefetch(ahead + line, 1)
        to, source = out + i * row_bytes, rows + load_u32(at + 4 * i) * row_bytes
        if is_streamed:
            for line in range(0, row_bytes, 64):
                stream_line(to + line, source + line)
        else:
            _memcpy(to, source, row_bytes)
    stream_end()


@kernel
def _restore(places, count, firsts, addresses, num_blocks, num, row_bytes, out):
    """Arguments are addresses, but numbers and sizes; returns whether there are `num` pre-images at least."""
    for i in range(count):
        place = load_u32(places + 4 * i)
        if place > num:
            return False
        if place:
            low, high = 0, num_blocks
            while high - low > 1:
                middle = (low + high) // 2
                if load_i64(firsts + 8 * middle) < place:
                    low = middle
                else:
                    high = middle
            kept = load_i64(addresses + 8 * low) + (place - 1 - load_i64(firsts + 8 * low)) * row_bytes
            _memcpy(out + i * row_bytes, kept, row_bytes)
    return True
