"""Pre-images of rows in a device's memory: kept there as far as there is room, else in the host's.

[Note: rows of a device read beside steps]
A thread copies rows on a stream of its own; steps update them on theirs, and the host runs ahead of all.

1. Rows may be copied amid an update. That update was announced (`keep`) before it was launched, and so they have
   pre-images; `settle`, which comes when the copy is made, finds them.
2. An update is launched while a copy is being made of rows that are not due any more: never, as `copy` returns when it
   is made, and `settle` comes after it. From then on updates need not be announced.
3. `keep` and `settle` read and change what is due on two streams. They are called under one lock, and each lets its
   stream wait for the one before: kernels run in the order in which the host asked. So are pre-images whole when they
   are put over copies.
4. Rows are copied before updates that came before all this have run. `DevicePreImages` waits for the device when made.
5. Pre-images are freed while kernels still write them. `close` waits for the last `keep`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.ops.pre_images.cpu import CLAIMED
from rowmesh.ops.streams import Mark, Stream

SLAB_ROWS = 1 << 18
"""Rows of pre-images that are allocated at once: 64 MiB of 64 numbers."""
T = TypeVar("T")

Slots = range | npt.NDArray[np.uint32]


class DevicePreImages:
    """The pre-images of rows that are due: of some arrays on one device, whose rows belong together.

    Args:
        arrays: `[R, …]` each.
        due: slots of rows, each once, whose pre-images are to be kept.
        stop: more than all of them.
        room_bytes: of the device's memory, at most; pre-images beyond it go to the host's.

    Example:
        >>> rows = torch.arange(6.0).view(3, 2)
        >>> kept = DevicePreImages([rows], [range(0, 3)], stop=3, room_bytes=1 << 20)
        >>> slots = torch.tensor([2, 9])
        >>> kept.keep(slots, slots)  # before rows of these slots are updated
        1
        >>> rows[2] += 10
        >>> copied = kept.copy(range(1, 3))
        >>> kept.restore(kept.settle(range(1, 3)), copied, [out := torch.empty(2, 2)])
        >>> out.tolist()
        [[2.0, 3.0], [4.0, 5.0]]
        >>> kept.close()
    """

    def __init__(self, arrays: Sequence[Tensor], due: Sequence[Slots], stop: int, room_bytes: int) -> None:
        self._arrays, self._device, self._stop = list(arrays), arrays[0].device, stop
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        # Slots past the end are those at `stop`, which are never due.
        self._is_due = torch.zeros(stop + 1, dtype=torch.uint8, device=self._device)
        self._places = torch.zeros(stop + 1, dtype=torch.int32, device=self._device)
        for slots in due:
            self._is_due[self._index(slots)] = 1
        self._slab_rows = min(SLAB_ROWS, max(sum(map(len, due)), 1))
        self._slabs: list[list[Tensor]] = []
        self._room_bytes, self._num = room_bytes, 0
        self._stream = Stream.new(self._device)
        self._turn: Mark = Stream.current(self._device).mark()

    def keep(self, slots: Tensor, at: Tensor) -> int:
        """Keeps the rows of those slots that are due, and not kept yet; the host waits until it knows how many.

        Args:
            slots: int64 `[n]`, distinct below `stop`.
            at: int64 `[n]`: where their rows are.

        Returns:
            How many there were.
        """
        current = Stream.current(self._device)
        current.wait_for([self._turn])
        slots = slots.clamp(max=self._stop)
        chosen = (self._is_due[slots] == 1).nonzero().flatten()
        count, first = len(chosen), self._num
        if count:
            slots, at = slots[chosen], at[chosen]
            self._is_due[slots] = CLAIMED
            self._places[slots] = torch.arange(first + 1, first + count + 1, dtype=torch.int32, device=self._device)
            for begin, number, place, size in _parts(first, count, self._slab_rows):
                if number == len(self._slabs):
                    self._slabs.append(self._allocate())
                for array, slab in zip(self._arrays, self._slabs[number], strict=True):
                    slab[place : place + size] = array[at[begin : begin + size]]
            self._num += count
            self._turn = current.mark()
        return count

    def copy(self, slots: Slots) -> list[Tensor]:
        """Copies of rows on the device, some perhaps half updated; for one thread, as `restore` is."""

        def read() -> list[Tensor]:
            if isinstance(slots, range):
                return [array[slots.start : slots.stop].clone() for array in self._arrays]
            index = self._index(slots)
            return [array[index] for array in self._arrays]

        copied = self._ask(read)
        self._stream.mark().wait()
        return copied

    def settle(self, slots: Slots) -> Tensor:
        """Marks slots as not due.

        Returns:
            int32 `[n]`: one more than the number of each slot's pre-image, 0 where it has none.
        """

        def note() -> Tensor:
            index = self._index(slots)
            places = torch.where(self._is_due[index] == CLAIMED, self._places[index], 0)
            self._is_due[index] = 0
            return places

        self._stream.wait_for([self._turn])
        places = self._ask(note)
        self._turn = self._stream.mark()
        return places

    def restore(self, places: Tensor, copied: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """Puts pre-images over copies, and waits until these are in the host's memory.

        Args:
            places: as `settle` gives them.
            copied: as `copy` gives them; changed.
            out: of the same dtypes and shapes, in the host's memory.
        """

        def put() -> None:
            rows = places.nonzero().flatten()
            numbers = places[rows].long() - 1
            for number in (numbers // self._slab_rows).unique().tolist():
                is_here = numbers // self._slab_rows == number
                at, here = numbers[is_here] % self._slab_rows, rows[is_here]
                for array, slab in zip(copied, self._slabs[number], strict=True):
                    array[here] = slab[at.to(slab.device)].to(array.device)
            for array, to in zip(copied, out, strict=True):
                to.copy_(array)

        self._ask(put)

    def close(self) -> None:
        """Frees what was kept."""
        self._turn.wait()
        self._slabs = []

    def _ask(self, work: Callable[[], T]) -> T:
        """Has kernels launched on the stream of copies."""
        results: list[T] = []
        self._stream.run(lambda: results.append(work()))
        return results[0]

    def _index(self, slots: Slots) -> slice | Tensor:
        if isinstance(slots, range):
            return slice(slots.start, slots.stop)
        return torch.from_numpy(slots.astype(np.int64)).to(self._device)

    def _allocate(self) -> list[Tensor]:
        """The next slab of each array, on the device or in the host's memory."""
        num_bytes = sum(array[:1].nbytes for array in self._arrays) * self._slab_rows
        if num_bytes <= self._room_bytes:
            self._room_bytes -= num_bytes
            try:
                return [self._slab(array, self._device) for array in self._arrays]
            except torch.OutOfMemoryError:
                self._room_bytes = 0
        return [self._slab(array, torch.device("cpu")) for array in self._arrays]

    def _slab(self, array: Tensor, device: torch.device) -> Tensor:
        return torch.empty(self._slab_rows, *array.shape[1:], dtype=array.dtype, device=device)


def _parts(first: int, count: int, size: int) -> list[tuple[int, int, int, int]]:
    """Cuts consecutive numbers at multiples of a size: where each part begins among them, of which multiple, where
    there, and how many.

    >>> _parts(5, 6, 4)
    [(0, 1, 1, 3), (3, 2, 0, 3)]
    """
    cuts = [first, *range((first // size + 1) * size, first + count, size), first + count]
    return [(a - first, a // size, a % size, b - a) for a, b in pairwise(cuts)]
