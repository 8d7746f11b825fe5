"""Tensor pool: outputs over reused memory, which returns when no tensor and no graph refers to it any more."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import torch
from torch import Tensor

from rowmesh.ops.memory import HUGE_PAGE, Buffer


class TensorPool:
    """Makes tensors over reused memory.

    Every tensor that shares the storage keeps the NumPy array it was made from alive; the array's finalizer puts the
    memory back. A user who keeps an output therefore keeps it intact. Finalizers run in any thread and between any two
    instructions: what is idle is only ever changed by single operations of a deque, which are atomic.

    Args:
        max_idle: buffers that wait for the next use; beyond that, the one that waited longest is freed.
    """

    def __init__(self, max_idle: int = 4) -> None:
        self._idle: deque[Buffer] = deque(maxlen=max_idle)
        self._made: weakref.WeakSet[Buffer] = weakref.WeakSet()
        self._making = threading.Lock()  # a set must not grow while it is gone through

    @property
    def num_bytes(self) -> int:
        """Memory handed out and idle."""
        with self._making:
            return sum(buffer.num_bytes for buffer in self._made)

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """An uninitialised tensor, over an idle buffer of about its size: the last one used first; else a new one."""
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        num_bytes = count * dtype.itemsize
        buffer, unfit = None, list[Buffer]()
        while buffer is None:
            try:
                idle = self._idle.pop()
            except IndexError:
                buffer = self._make(num_bytes)
                break
            if num_bytes <= idle.num_bytes <= 4 * num_bytes + HUGE_PAGE:
                buffer = idle
            else:
                unfit.append(idle)
        self._idle.extend(reversed(unfit))
        array = buffer.bytes[:num_bytes]  # a new array object: its end is the end of the loan
        weakref.finalize(array, self._idle.append, buffer).atexit = False
        return (
            torch.frombuffer(array, dtype=dtype).view(shape).data
        )  # no view, which a program could not change in place

    def _make(self, num_bytes: int) -> Buffer:
        buffer = Buffer(num_bytes + num_bytes // 8)
        with self._making:
            self._made.add(buffer)
        return buffer
