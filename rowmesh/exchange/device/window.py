"""Device window: a batch on a device whose micro-batches are looked up one by one while its rows are frozen.

The batch is routed once. The ids of each micro-batch are put together, and filed under their rows for the backward,
when the window is made, on the stream that routes: the stream that computes only pools and sums. The gradients of a row
are summed over micro-batches, in the order of the samples, in one tensor.

Whatever a window has, it keeps until it is dropped, even where nobody reads it any more: other streams may still be
doing so. See [Note: streams] in `rowmesh.pipeline.streams`.

Source: NestPipe §V. What `rowmesh.exchange.window` is on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rowmesh.exchange.handshake import Step
from rowmesh.exchange.layout import GroupLayout
from rowmesh.exchange.pooling import Pooling
from rowmesh.exchange.route import Route, RouteGroup
from rowmesh.ops.look_up.device import descriptors, places_in
from rowmesh.ops.transfer import upload
from rowmesh.sparse import SparseBatch
from rowmesh.tables.dense import compute_dtype

if TYPE_CHECKING:
    from rowmesh.ops.pool.cuda import Bags, FiledCells


@dataclass(frozen=True, eq=False)
class Uses:
    """Which micro-batches use each unique id first and last; int32 `[num_ids]`, of which the first U are valid."""

    first: Tensor
    last: Tensor


class DeviceWindowPart:
    """One micro-batch of one group, as pooling sees it.

    Attributes:
        layout: where each feature's ids and vectors are.
        bags: the same, as kernels read it; ids stand together.
        recover: int32 `[n]`: the unique id that each id is.
        filed: the cells that every row goes into.
    """

    def __init__(
        self, window: DeviceWindowGroup, layout: GroupLayout, bags: Bags, recover: Tensor, filed: FiledCells
    ) -> None:  # fmt: skip
        self.layout, self.bags, self.recover, self.filed = layout, bags, recover, filed
        self._window = window

    @property
    def look_up(self) -> DeviceWindowPart:
        """What pools: this."""
        return self

    def pool(self, layout: GroupLayout, weights: Tensor | None, output: Tensor) -> None:
        """Writes the group's columns of the output."""
        from rowmesh.ops.pool.cuda import pool

        pool(self._window.source, self.recover, self.bags, output, self.slots)

    @property
    def slots(self) -> Tensor | None:
        """Which rows of it the unique ids are; None where all, in their order."""
        return self._window.slots


class DeviceWindowGroup:
    """One group's part of a window.

    Attributes:
        group: of the route of the whole batch.
        parts: each micro-batch.
        uses: when rows are used; None where there is one micro-batch.
        source: `[R, D]`, what is read, once it is known: rows that were fetched, or those of the arena.
        slots: int32 `[U]`: which rows of `source` the unique ids are; None where all, in their order.
        gradients: `[U, D]`, summed over the micro-batches so far.
    """

    source: Tensor

    def __init__(self, group: RouteGroup) -> None:
        self.group = group
        self.parts: list[DeviceWindowPart] = []
        self.uses: Uses | None = None
        self.slots: Tensor | None = None
        self._gradients: Tensor | None = None

    def read_fetched(self) -> None:
        """Reads what was fetched for the whole batch."""
        order = self.group.look_up.order
        self.source = self.group.look_up.source
        self.slots = self.group.look_up.slots if order is None else places_in(order)

    def hand_gradients_over(self) -> None:
        """Gives the whole batch the gradients of all micro-batches, to be pushed at once."""
        gradients, order = self.gradients(), self.group.look_up.order
        self.group.look_up.gradients = gradients if order is None else gradients.index_select(0, order)

    def gradients(self) -> Tensor:
        """They come from the stream that computed, and are about to be read on the current one."""
        assert self._gradients is not None
        if self._gradients.is_cuda:
            # The window keeps them until a turn after its update, for which the stream that computes the next batch
            # has waited. The program may compute that on another stream than this one, though: then nothing but the
            # allocator can tell that the first stream must not have the memory back before this one is done.
            self._gradients.record_stream(torch.cuda.current_stream(self._gradients.device))
        return self._gradients

    def add_gradients(self, part: int, grad: Tensor) -> None:
        """Adds the gradients of a micro-batch's rows."""
        from rowmesh.ops.pool.cuda import backward

        size, adds = (self.group.num_unique, self.source.shape[1]), len(self.parts) > 1
        if self._gradients is None:
            make = torch.zeros if adds else torch.empty
            self._gradients = make(size, dtype=grad.dtype, device=grad.device)
        filed = self.parts[part].filed.of_first(self.group.num_unique)
        backward(grad, filed, self._gradients, self.group.look_up.unique.num_unique, adds=adds)


class DeviceWindow:
    """A routed batch and its micro-batches.

    Attributes: those of `Window`.
    """

    def __init__(self, route: Route, bounds: Sequence[int], groups: list[DeviceWindowGroup]) -> None:
        self.route, self.bounds, self.groups, self.number = route, list(bounds), groups, 0
        self.step_before: Step | None = None

    @property
    def num_parts(self) -> int:
        """N."""
        return len(self.bounds) - 1

    def pool(self, part: int, pooling: Pooling) -> tuple[Tensor, ...]:
        """The vectors of one micro-batch."""
        size = self.bounds[part + 1] - self.bounds[part]
        return pooling.forward([group.parts[part] for group in self.groups], self.route.batch, size)

    def backward(self, part: int, pooling: Pooling, gradients: Sequence[Tensor]) -> None:
        """Adds the gradients of the rows of one micro-batch to the sums."""
        for group, grad in zip(self.groups, pooling.by_group(gradients), strict=True):
            group.add_gradients(part, grad)


class DeviceWindowMaker:
    """Makes windows; memory is torch's.

    Args:
        device: where.
    """

    num_bytes = 0

    def __init__(self, device: torch.device) -> None:
        from rowmesh.ops.pool import cuda

        self._device, self._describe, self._file = device, cuda.Bags.describe, cuda.file_cells

    def __call__(self, route: Route, bounds: Sequence[int], layouts: Sequence[Sequence[GroupLayout]]) -> DeviceWindow:
        """A window of a route that was just made.

        Args:
            route: of the whole batch.
            bounds: the first sample of each micro-batch, and B.
            layouts: of each micro-batch, for every group.
        """
        groups = []
        for group, cut in zip(route.groups, layouts, strict=True):
            window = DeviceWindowGroup(group)
            if len(cut) == 1:
                assert group.look_up.bags is not None
                self._add(window, group.layout, group.look_up.bags, group.look_up.unique.inverse)
            else:
                self._cut(window, route.batch, bounds, cut)
            groups.append(window)
        return DeviceWindow(route, bounds, groups)

    def _cut(
        self, window: DeviceWindowGroup, batch: SparseBatch, bounds: Sequence[int], layouts: Sequence[GroupLayout]
    ) -> None:  # fmt: skip
        """Adds all micro-batches of several."""
        group = window.group
        begin = group.layout.features[0, 0]
        pieces = [(layout.features[:, :2] - begin).tolist() for layout in layouts]
        for layout, first_sample, ids in zip(layouts, bounds, pieces, strict=False):
            recover = _joined(group.look_up.unique.inverse, ids)
            self._add(window, layout, self._bags(group, layout, batch, first_sample, ids), recover)
        window.uses = self._uses(group, [[first for first, _ in ids] for ids in pieces])

    def _bags(
        self, group: RouteGroup, layout: GroupLayout, batch: SparseBatch, first_sample: int,
        ids: Sequence[Sequence[int]],
    ) -> Bags:  # fmt: skip
        """The bags of some samples."""
        assert group.look_up.bags is not None
        whole, place = group.look_up.bags, batch.features.index(group.exchange.group.features[0])
        first_bags = (place + np.arange(layout.num_features)) * batch.batch_size + first_sample
        weights = None if whole.weights is None else _joined(whole.weights, ids)
        return self._describe(descriptors(layout, first_bags), self._device, whole.offsets, weights)

    def _add(self, window: DeviceWindowGroup, layout: GroupLayout, bags: Bags, recover: Tensor) -> None:
        dtype = compute_dtype(window.group.exchange.group.dtype)
        filed = self._file(recover, bags, window.group.num_unique, dtype)
        window.parts.append(DeviceWindowPart(window, layout, bags, recover, filed))

    def _uses(self, group: RouteGroup, begins: Sequence[Sequence[int]]) -> Uses:
        """When each unique id is used first and last.

        Args:
            group: of the route.
            begins: of each micro-batch, where the ids of every feature begin among those of the group.
        """
        inverse, num_parts = group.look_up.unique.inverse.to(torch.int64), len(begins)
        of_features = torch.tensor(begins, device="cpu").T
        starts = upload(of_features.flatten(), self._device)  # ascending: in every feature the micro-batches
        ids = torch.arange(inverse.numel(), device=self._device)
        part = ((torch.searchsorted(starts, ids, right=True) - 1) % num_parts).to(torch.int32)
        nothing = torch.full_like(part, num_parts)
        return Uses(
            nothing.scatter_reduce(0, inverse, part, "amin"),  # of whole numbers: in any order the same
            (-nothing).scatter_reduce(0, inverse, part, "amax"),
        )


def _joined(tensor: Tensor, pieces: Sequence[Sequence[int]]) -> Tensor:
    """Some pieces of a tensor, one after the other.

    >>> _joined(torch.tensor([5, 6, 7, 8]), [(0, 1), (2, 4)]).tolist()
    [5, 7, 8]
    """
    return torch.cat([tensor[begin:end] for begin, end in pieces])
