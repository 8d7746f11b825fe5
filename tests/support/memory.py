"""Memory for tests of kernels: guarded, poisoned, or so far away that 32 bits cannot address it."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_GUARD = 64


class Poisoned:
    """An output full of NaN (or of a number that no result has) between guards that must stay as they are.

    A kernel that leaves an element out, or writes past the end, is found.
    """

    def __init__(self, dtype: torch.dtype, *shape: int, device: torch.device | str = "cpu") -> None:
        self._poison = float("nan") if dtype.is_floating_point else -7
        count = torch.Size(shape).numel()
        self._whole = torch.full((count + 2 * _GUARD,), self._poison, dtype=dtype, device=device)
        self.tensor = self._whole[_GUARD : _GUARD + count].view(shape)

    @property
    def address(self) -> int:
        """Where a kernel writes."""
        return self.tensor.data_ptr()

    def result(self) -> Tensor:
        """What was written."""
        for guard in (self._whole[:_GUARD], self._whole[-_GUARD:]):
            untouched = guard.isnan() if self._whole.dtype.is_floating_point else guard == self._poison
            assert bool(untouched.all()), "the kernel wrote outside its output"
        return self.tensor


class Vast:
    """Gigabytes of addresses of which only the pages that are touched cost memory."""

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._map = mmap.mmap(-1, num_bytes, flags=flags)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.bytes.data_ptr()

    def tensor(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """A view of its beginning."""
        return self.bytes[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
