"""The ids of batches on a device: brought there, bounded, and described as kernels read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.look_up.device import descriptors
from rowmesh.ops.pool.handles import Bags
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.streams import Mark, Stream
from rowmesh.ops.transfer import upload

_MANY_BYTES = 2**20  # which take a bus longer than the host takes to use another stream


class IdCopier:
    """Copies large ids to a device beside what it does: a batch's travel while the one before is computed.

    They come to memory that is kept, and that the copy stream writes again when what read it has run. So torch's
    allocator, which would learn of a second stream's uses event by event, has no part in it. Ids must be complete when
    they are looked up: the copy does not wait for what the program's stream may still write to them.

    Args:
        device: where.
        streams: makes streams.
        many_bytes: smaller ids are copied on the current stream; default: a MiB on a GPU, and all elsewhere.
    """

    def __init__(self, device: torch.device, streams: type[Stream] = Stream, many_bytes: float | None = None) -> None:
        self._device, self._streams = device, streams
        has_copies = device.type == "cuda"
        self._many_bytes = (_MANY_BYTES if has_copies else math.inf) if many_bytes is None else many_bytes
        self._stream: Stream | None = None
        self._idle: list[tuple[Tensor, Mark]] = []

    @contextmanager
    def copied(self, ids: Tensor) -> Iterator[Tensor]:
        """Ids on the device, for kernels that the current stream is asked for within the context."""
        if ids.device.type != "cpu" or ids.nbytes < self._many_bytes:
            yield upload(ids, self._device)
            return
        current, count = self._streams.current(self._device), ids.numel()
        if self._stream is None:
            self._stream = self._streams.new(self._device)
        stream = self._stream
        try:
            room, mark = self._idle.pop()
        except IndexError:  # asking before would not do: another thread may take it
            room, mark = ids.new_empty(0, device=self._device), current.mark()
        stream.wait_for([mark])  # what reads the ids that are there
        if room.numel() < count:
            stream.uses(room)  # so that its memory is not another's before that
            room = ids.new_empty(count + count // 4, device=self._device)
            stream.wait_for([current.mark()])  # what the current stream still does with memory that it had
        here = room[:count]
        given = ids.pin_memory() if self._device.type == "cuda" and not ids.is_pinned() else ids
        stream.run(lambda: here.copy_(given, non_blocking=True))
        current.wait_for([stream.mark()])
        try:
            yield here
        finally:
            self._idle.append((room, current.mark()))


class DeviceIds:
    """The ids of a batch on a device, those outside their table made the row that its policy names.

    Where the policy is to refuse them that is row 0; how many there were stays on the device until the host reads the
    sizes, before anything is updated.

    Args:
        limits: rows of the table of each feature.
        substitutes: the row that ids outside it are made, or None where they are refused.
        device: where.

    Attributes:
        refuses: bool `[F]` on the device: where there is none.
    """

    def __init__(self, limits: Sequence[int], substitutes: Sequence[int | None], device: torch.device) -> None:
        self._device = device
        self._limits = torch.tensor(limits, device=device)
        self._substitutes = torch.tensor([row or 0 for row in substitutes], device=device)
        self.refuses = torch.tensor([row is None for row in substitutes], device=device)
        self._copier = IdCopier(device)

    def offsets_room(self, count: int) -> Tensor:
        """Memory for offsets, from which the device copies without the host."""
        return torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=self._device.type == "cuda")

    def bound(self, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """The rows, on the device; and how many ids of each feature were none, int64 `[F]`.

        Args:
            ids: int64 `[N]`, on the host or the device.
            offsets: int64 `[F + 1]` on the device: where those of each feature begin.
        """
        from rowmesh.ops.bound_ids.cuda import bound_ids

        outside = torch.zeros_like(self._limits)
        rows = torch.empty(ids.numel(), dtype=torch.int64, device=self._device)
        with self._copier.copied(ids) as here:
            return bound_ids(here, offsets, self._limits, self._substitutes, rows, outside), outside

    def upload(self, tensor: Tensor) -> Tensor:
        """A copy on the device; the host goes on."""
        return upload(tensor, self._device)

    def mark(self) -> Mark:
        """A mark behind the work of the current stream so far."""
        return Stream.current(self._device).mark()

    def wait_for(self, mark: Mark) -> None:
        """Later work of the current stream begins when a mark has passed; the host goes on."""
        if not mark.has_passed:
            Stream.current(self._device).wait_for([mark])

    def bags(self, layout: GroupLayout, first_bags: np.ndarray, offsets: Tensor | None) -> Bags:
        """The bags of a group, or of a run of its samples, whose ids then stand together; without weights.

        Args:
            layout: of the group's features.
            first_bags: int64 `[F]`: where the bounds of each feature's bags begin among those of the batch.
            offsets: of all bags of the batch; None where they are equally long.
        """
        return Bags.describe(descriptors(layout, first_bags), self._device, offsets)
