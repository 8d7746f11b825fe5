"""Memory for tables and buffers: 64-byte aligned, on huge pages where the system has them, reused.

Fresh memory costs a page fault every 4 KB; on a training step that is up to half of the time. So buffers grow and are
kept.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Kinds = Sequence[tuple[torch.dtype, tuple[int, ...]]]  # of tensors with equally many rows: dtype, and shape of a row
HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25

if sys.platform == "linux":  # as where it is used
    _libc = ctypes.CDLL(None, use_errno=True)
    _libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below value.

    >>> round_up(65, 64)
    128
    """
    return -(-value // multiple) * multiple


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Asks for huge pages before memory is first touched; the system may decline, which costs speed only."""
    if sys.platform == "linux" and num_bytes >= HUGE_PAGE:
        _libc.madvise(address, num_bytes, _MADV_HUGEPAGE)


def populate(address: int, num_bytes: int) -> None:
    """Touches pages for writing, contents as they are, without the interpreter's lock (Linux ≥ 5.14; else no-op).

    A huge page at a time: other threads that map memory wait meanwhile.
    """
    if sys.platform == "linux":
        for begin in range(0, num_bytes, HUGE_PAGE):
            _libc.madvise(address + begin, min(HUGE_PAGE, num_bytes - begin), _MADV_POPULATE_WRITE)


def collapse_huge_pages(address: int, num_bytes: int) -> None:
    """Makes huge pages of memory that is already touched (Linux ≥ 6.1; elsewhere nothing happens).

    Works on shared memory too, also where the system offers it no huge pages at the first touch.
    """
    if sys.platform == "linux" and num_bytes >= HUGE_PAGE:
        populate(address, num_bytes)
        _libc.madvise(address, num_bytes, _MADV_COLLAPSE)


class Memory:
    """A buffer, private or shared.

    Attributes:
        address: where it begins.
        num_bytes: its size.
        bytes: it, as uint8.
    """

    address: int
    num_bytes: int
    bytes: np.ndarray

    def array(self, dtype: Any, *shape: int, offset: int = 0) -> np.ndarray:
        """A NumPy view; `offset` in bytes."""
        num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.bytes[offset : offset + num_bytes].view(dtype).reshape(shape)

    def tensor(self, dtype: torch.dtype, *shape: int, offset: int = 0) -> Tensor:
        """A torch view, of none of its bytes where the shape has no elements; `offset` in bytes."""
        if not (count := math.prod(shape)):
            return torch.empty(shape, dtype=dtype, device="cpu")
        return torch.frombuffer(self.bytes, dtype=dtype, offset=offset, count=count).view(shape)

    def items(self, item_bytes: int, count: int, first: int = 0, offset: int = 0) -> Tensor:
        """uint8 `[count, item_bytes]`: items from number `first` on, which begin at byte `offset`."""
        return self.tensor(torch.uint8, count, item_bytes, offset=offset + first * item_bytes)


class Buffer(Memory):
    """Private memory with a stable address, aligned to 64 bytes (to 2 MiB where it is that big).

    Args:
        num_bytes: its size.
        is_sparse: whether little of it may ever be used: no huge pages are asked for.

    Example:
        >>> buffer = Buffer(64)
        >>> buffer.array(np.int64, 8)[:] = 1
        >>> buffer.address % 64
        0
    """

    def __init__(self, num_bytes: int, *, is_sparse: bool = False) -> None:
        self.num_bytes = max(num_bytes, 64)
        alignment = HUGE_PAGE if self.num_bytes >= HUGE_PAGE else 64
        self._map = _private_map(round_up(self.num_bytes, mmap.PAGESIZE) + alignment)
        whole = np.frombuffer(self._map, np.uint8)
        start = -whole.ctypes.data % alignment
        self.bytes = whole[start : start + self.num_bytes]
        self.address: int = self.bytes.ctypes.data
        if not is_sparse:
            advise_huge_pages(self.address, self.num_bytes)


def _private_map(num_bytes: int) -> mmap.mmap:
    """Memory of this process alone; shared memory, the usual default, gets no huge pages and outlives a fork."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, num_bytes)
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class Scratch:
    """A buffer that grows to the largest size asked for and is never given back; contents do not survive growth."""

    def __init__(self) -> None:
        self._buffer = Buffer(64)

    def reserve(self, num_bytes: int) -> int:
        """The address of at least `num_bytes`."""
        if num_bytes > self._buffer.num_bytes:
            self._buffer = Buffer(num_bytes + num_bytes // 4)  # some slack: batches differ a little
        return self._buffer.address

    @property
    def buffer(self) -> Buffer:
        """The memory itself."""
        return self._buffer

    @property
    def num_bytes(self) -> int:
        """How much is held."""
        return self._buffer.num_bytes


class Room:
    """Memory for a tensor of changing size: of the host it is kept and grows, of a device it is torch's allocator's.

    Args:
        device: whose; None: the host's.

    Example:
        >>> room = Room(None)
        >>> room.tensor(torch.float32, 3, 2).shape
        torch.Size([3, 2])
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device, self._scratch = device, Scratch() if device is None else None

    def tensor(self, dtype: torch.dtype, *shape: int) -> Tensor:
        """A tensor of any contents; of the host's, the one before is lost."""
        if self._scratch is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        self._scratch.reserve(math.prod(shape) * dtype.itemsize)
        return self._scratch.buffer.tensor(dtype, *shape)

    @property
    def num_bytes(self) -> int:
        """How much is held."""
        return 0 if self._scratch is None else self._scratch.num_bytes


def zeros(device: torch.device | None, dtype: torch.dtype, *shape: int) -> Tensor:
    """Zeros on a device; None: the host, of whose memory no page is touched, and big ones are on huge pages."""
    if device is None:
        return Buffer(math.prod(shape) * dtype.itemsize).tensor(dtype, *shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def grown(tensor: Tensor, size: int, device: torch.device | None) -> Tensor:
    """The rows of a tensor, and room behind them: `[size, …]`. None: the host's memory, as `zeros` has it."""
    shape = size, *tensor.shape[1:]
    more = zeros(None, tensor.dtype, *shape) if device is None else tensor.new_empty(shape)
    more[: len(tensor)] = tensor
    return more


def laid_out_bytes(kinds: Kinds, count: int) -> int:
    """The size of a buffer that `laid_out` cuts into tensors of so many rows."""
    return sum(round_up(count * math.prod(shape) * dtype.itemsize, 64) for dtype, shape in kinds)


def laid_out(buffer: Tensor, kinds: Kinds, count: int) -> list[Tensor]:
    """Tensors of so many rows, one of each kind, in a buffer, uint8; each begins at the next multiple of 64 bytes.

    >>> kinds = [(torch.int32, ()), (torch.float32, (4,))]
    >>> buffer = torch.empty(laid_out_bytes(kinds, 3), dtype=torch.uint8)
    >>> len(buffer), [part.shape for part in laid_out(buffer, kinds, 3)]
    (128, [torch.Size([3]), torch.Size([3, 4])])
    """
    begin, tensors = 0, list[Tensor]()
    for dtype, shape in kinds:
        end = begin + count * math.prod(shape) * dtype.itemsize
        tensors.append(buffer[begin:end].view(dtype).view(count, *shape))
        begin = round_up(end, 64)
    return tensors


def take(rows: Tensor, places: np.ndarray, out: Tensor | None = None) -> Tensor:
    """`out[i] = rows[places[i]]` in the host's memory, `[N]` or `[N, D]`."""
    out = rows.new_empty(len(places), *rows.shape[1:]) if out is None else out
    values, into = (each if each.dim() == 1 else each.view(torch.uint8) for each in (rows, out))
    np.take(values.numpy(), places, axis=0, out=into.numpy(), mode="clip")  # "raise" would buffer the result
    return out


def array_at(address: int, dtype: Any, *shape: int) -> np.ndarray:
    """A NumPy view of memory that somebody else keeps alive."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory: Any = (ctypes.c_uint8 * num_bytes).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


def held_bytes(owner: object) -> int:
    """Bytes of the private buffers among an object's attributes, and in lists among them."""
    values = [item for value in vars(owner).values() for item in (value if isinstance(value, list) else [value])]
    return sum(value.num_bytes for value in values if isinstance(value, (Buffer, Scratch)))
