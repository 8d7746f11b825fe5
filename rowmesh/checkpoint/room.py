"""Room: memory that snapshots keep rows in, one snapshot after the other.

Fresh pages take many times the time of a copy. So what was used once stays, and what is likely to be used soon is
touched by a thread that steps do not wait for.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from rowmesh._support.memory import available_bytes
from rowmesh.ops.memory import Buffer, populate

SLAB_BYTES = 16 << 20
BLOCK_BYTES = SLAB_BYTES // 8
"""The size up to which requests leave little of a slab over."""
SLABS_AHEAD = 4
"""Slabs whose pages the writing thread has ready: a first touch costs a step more time than the copy."""
SHARE = 4
"""By default copies take at most this part of the memory that is available."""


class Room:
    """Memory for pre-images, and for copies of rows that are read before the disk wants them.

    Args:
        copy_bytes: of copies, at most; None: a quarter of the memory that is available when a snapshot is taken.
        sharers: processes that take as much of the same memory, this one among them.

    Attributes:
        copies: buffers for these.

    Example:
        >>> room = Room(copy_bytes=0)
        >>> room.tensor(torch.float32, 3, 2).shape
        torch.Size([3, 2])
        >>> room.copies.take(64) is None
        True
    """

    def __init__(self, copy_bytes: int | None = None, *, sharers: int = 1) -> None:
        self._copy_bytes, self._sharers = copy_bytes, sharers
        self._slabs: list[Tensor] = []
        self._slab = self._used = 0
        self._lock = threading.Lock()
        self.copies = CopyBuffers()

    def tensor(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """Numbers that mean nothing, valid until `reset`; of more than `BLOCK_BYTES` they waste memory."""
        num_bytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            while self._slab < len(self._slabs) and self._used + num_bytes > len(self._slabs[self._slab]):
                self._slab, self._used = self._slab + 1, 0
            if self._slab == len(self._slabs):
                self._slabs.append(_fresh(max(SLAB_BYTES, num_bytes)))
            first = self._used
            self._used += -(-num_bytes // 64) * 64
            return self._slabs[self._slab][first : first + num_bytes].view(dtype).view(shape)

    def prepare(self, num_bytes: int, most_slabs: int = 1) -> None:
        """Has memory ready that is likely to be asked for soon; for a thread that no step waits for.

        Args:
            num_bytes: how much may be asked for.
            most_slabs: to make ready now. Steps may take them as fast as the system gives them.
        """
        slabs_ahead = min(SLABS_AHEAD, -(-num_bytes // SLAB_BYTES))
        for _ in range(most_slabs):
            if len(self._slabs) > self._slab + slabs_ahead:
                return
            more = _fresh(SLAB_BYTES)
            populate(more.data_ptr(), SLAB_BYTES)
            with self._lock:
                self._slabs.append(more)

    def reset(self) -> None:
        """All of it is free; its memory stays, as far as it may be kept."""
        self._slab = self._used = 0
        self.copies.reset(self._limit_bytes())

    def _limit_bytes(self) -> int:
        if self._copy_bytes is not None:
            return self._copy_bytes
        return (available_bytes() // self._sharers + self.copies.held_bytes) // SHARE


class CopyBuffers:
    """Buffers, of `limit_bytes` at most in all, for two threads: one takes them, the other gives them back.

    Attributes:
        limit_bytes: of all; 0 until `reset`.
        is_closed: whether `take` gives None.
        has_ended: set where no more are taken until some are given back, or ever.

    Example:
        >>> copies = CopyBuffers()
        >>> copies.reset(128)
        >>> first, second = copies.take(64), copies.take(64)
        >>> copies.give(first)
        >>> copies.take(48) is first, copies.take(256) is None
        (True, True)
    """

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._free: list[Tensor] = []
        self._changed = threading.Condition()
        self.is_closed = True
        self.has_ended = threading.Event()
        self.limit_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(map(len, self._all))

    def reset(self, limit_bytes: int) -> None:
        """All of them are free; as many stay as the limit allows."""
        with self._changed:
            self.limit_bytes, self.is_closed, self._free = limit_bytes, False, list(self._all)
            self._shrink(limit_bytes)
            self.has_ended.clear()

    def take(self, num_bytes: int) -> Tensor | None:
        """A buffer of at least so many bytes, uint8; waits until there is one.

        Returns:
            The buffer; None where the limit is too low for it, and after `close`.

        Raises:
            OSError, MemoryError: the system has no memory.
        """
        with self._changed:
            while num_bytes <= self.limit_bytes and not self.is_closed:
                if fitting := [each for each in self._free if len(each) >= num_bytes]:
                    found = min(fitting, key=len)
                    self._free = [each for each in self._free if each is not found]
                    return found
                self._shrink(self.limit_bytes - num_bytes)
                if self.held_bytes + num_bytes <= self.limit_bytes:
                    self._all.append(_fresh(num_bytes))
                    return self._all[-1]
                self.has_ended.set()
                self._changed.wait()
        return None

    def give(self, buffer: Tensor) -> None:
        """Gives back a buffer that was taken."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """`take` gives None from now on, also where it waits."""
        with self._changed:
            self.is_closed = True
            self.has_ended.set()
            self._changed.notify_all()

    def _shrink(self, num_bytes: int) -> None:
        """Frees buffers that nobody uses, until all together have no more than so many bytes."""
        while self._free and self.held_bytes > num_bytes:
            dropped = self._free.pop()
            self._all = [each for each in self._all if each is not dropped]


def _fresh(num_bytes: int) -> Tensor:
    return Buffer(num_bytes).tensor(torch.uint8, num_bytes)
