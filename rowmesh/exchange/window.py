"""Window: a batch whose micro-batches are looked up one by one while its rows are frozen.

The batch is routed once. Its micro-batches are runs of samples, whose ids have the inverse of the whole batch: what a
micro-batch needs beside is which rows it has, and where its outputs begin. That is found when the window is made, by
the thread, and on the stream, that routes. The gradients of a row are summed over micro-batches, in the order of the
samples, in one place: on a CPU where they are sent from.

Source: NestPipe §V. Differs: the paper routes each micro-batch by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from rowmesh.exchange.handshake import Step
from rowmesh.exchange.layout import GroupLayout
from rowmesh.exchange.pooling import Pooling
from rowmesh.exchange.route import Route, RouteGroup
from rowmesh.mesh.channel import Message
from rowmesh.ops.look_up.device import descriptors, places_in
from rowmesh.ops.memory import held_bytes
from rowmesh.ops.window import DeviceWindow, HostWindow
from rowmesh.sparse import SparseBatch
from rowmesh.tables.dense import compute_dtype

if TYPE_CHECKING:
    from rowmesh.ops.pool.cuda import Bags

Form = Literal["unsplit", "naive", "delta"]
"""How the rows of a window travel; see `rowmesh.pipeline.window`."""
FIRST = 2
"""The number of the first window; a row that no window touched has number 0."""


@dataclass(frozen=True, eq=False)
class DeviceMicroBatch:
    """One micro-batch of one group on a device, as pooling sees it.

    Attributes:
        bags: how ids, which stand together, form bags.
        recover: int32 `[n]`: the unique id that each id is.
        window: knows what is read.
    """

    bags: Bags
    recover: Tensor
    window: DeviceWindow

    def pool(self, layout: GroupLayout, weights: Tensor | None, output: Tensor) -> None:
        """Writes the group's columns of the output; `bags` has the weights."""
        from rowmesh.ops.pool.cuda import pool

        pool(self.window.source, self.recover, self.bags, output, self.window.slots)


class WindowGroup:
    """What a window has of one group.

    Args:
        group: of the route of the whole batch.
        batch: it.
        bounds: the first sample of each micro-batch, and B.
        layouts: of each micro-batch.
        memory: what its kernels read and write.

    Attributes:
        group, memory: as given.
        parts: each micro-batch, as pooling sees it.
        copied: gradients of rows that every rank has a copy of, on their way to their owners.
    """

    def __init__(
        self,
        group: RouteGroup,
        batch: SparseBatch,
        bounds: Sequence[int],
        layouts: Sequence[GroupLayout],
        memory: HostWindow | DeviceWindow,
    ) -> None:
        self.group, self.memory = group, memory
        self.copied: list[Message] = []
        self.parts: Sequence[RouteGroup]
        if group.exchange.device is None:
            assert isinstance(memory, HostWindow)
            self.parts = _cut_on_host(group, memory, layouts)
        else:
            assert isinstance(memory, DeviceWindow)
            self.parts = _cut_on_device(group, memory, batch, bounds, layouts)

    @property
    def on_device(self) -> DeviceWindow:
        """The memory, which is a device's."""
        assert isinstance(self.memory, DeviceWindow)
        return self.memory

    @property
    def on_host(self) -> HostWindow:
        """The memory, which is the host's."""
        assert isinstance(self.memory, HostWindow)
        return self.memory

    def read_fetched(self) -> None:
        """Lets micro-batches read the rows fetched for the whole batch; on a CPU they do so anyway."""
        if self.group.exchange.device is not None:
            look_up = self.group.look_up
            slots = look_up.slots if look_up.order is None else places_in(look_up.order)
            self.on_device.read(look_up.source, slots, look_up.num_unique)

    def gather_gradients(self) -> None:
        """Gives the whole batch the gradients of all micro-batches, to be pushed at once; on a CPU it has them."""
        if self.group.exchange.device is not None:
            gradients, order = self.on_device.gradients(), self.group.look_up.order
            self.group.look_up.gradients = gradients if order is None else gradients.index_select(0, order)

    def unpin(self) -> None:
        """Unpins its rows, which the current stream has read and which will not be updated."""
        self.group.unpin()


def _cut_on_host(group: RouteGroup, memory: HostWindow, layouts: Sequence[GroupLayout]) -> list[RouteGroup]:
    look_up = group.look_up
    look_up.send.reserve_gradients(group.num_unique * group.exchange.gradient_bytes)
    memory.cut(look_up, layouts)
    return [RouteGroup(group.exchange, layout, look_up) for layout in layouts]


def _cut_on_device(
    group: RouteGroup,
    memory: DeviceWindow,
    batch: SparseBatch,
    bounds: Sequence[int],
    layouts: Sequence[GroupLayout],
) -> list[RouteGroup]:
    """Ids of each micro-batch are put together, feature after feature."""
    bags, unique = group.look_up.bags, group.look_up.unique
    assert bags is not None
    if len(layouts) == 1:
        parts, begins = [(unique.inverse, bags)], None
    else:
        begin = group.layout.features[0, 0]
        pieces = [(layout.features[:, :2] - begin).tolist() for layout in layouts]
        place = batch.features.index(group.exchange.group.features[0]) * batch.batch_size
        first_bags = place + np.arange(group.layout.num_features) * batch.batch_size
        parts = [
            (_joined(unique.inverse, ids), _cut_bags(bags, layout, first_bags + first, ids))
            for layout, first, ids in zip(layouts, bounds, pieces, strict=False)
        ]
        begins = [[first for first, _ in ids] for ids in pieces]
    dtype = compute_dtype(group.exchange.group.dtype)
    memory.cut(unique.inverse, unique.num_unique, group.num_unique, dtype, parts)
    if begins is not None:
        memory.note_uses(begins)
    return [
        RouteGroup(group.exchange, layout, DeviceMicroBatch(cut, recover, memory))
        for layout, (recover, cut) in zip(layouts, parts, strict=True)
    ]


def _cut_bags(bags: Bags, layout: GroupLayout, first_bags: np.ndarray, ids: Sequence[Sequence[int]]) -> Bags:
    """The bags of some samples, whose ids then stand together."""
    weights = None if bags.weights is None else _joined(bags.weights, ids)
    return bags.describe(descriptors(layout, first_bags), bags.features.device, bags.offsets, weights)


def _joined(tensor: Tensor, pieces: Sequence[Sequence[int]]) -> Tensor:
    """Some pieces of a tensor, one after the other.

    >>> _joined(torch.tensor([5, 6, 7, 8]), [(0, 1), (2, 4)]).tolist()
    [5, 7, 8]
    """
    return torch.cat([tensor[begin:end] for begin, end in pieces])


class Window:
    """A routed batch and its micro-batches.

    Attributes:
        route: of the whole batch.
        bounds: the first sample of each micro-batch, and B.
        groups: what the window has of each group.
        number: which window of the pipeline this is, from `FIRST` on.
        step_before: the step of the last window that has had one when this one opens, where there is one.

    Args:
        route: of the whole batch.
        bounds: the first sample of each micro-batch, and B.
        layouts: of each micro-batch, for every group.
        memories: of each group.
        give_back: takes the memories, when nothing needs them any more.
    """

    def __init__(
        self,
        route: Route,
        bounds: Sequence[int],
        layouts: Sequence[Sequence[GroupLayout]],
        memories: Sequence[HostWindow | DeviceWindow],
        give_back: Callable[[], None],
    ) -> None:
        self.route, self.bounds, self.number, self._give_back = route, list(bounds), 0, give_back
        self.step_before: Step | None = None
        triples = zip(route.groups, layouts, memories, strict=True)
        self.groups = [WindowGroup(group, route.batch, bounds, cut, memory) for group, cut, memory in triples]

    @property
    def num_parts(self) -> int:
        """N."""
        return len(self.bounds) - 1

    def pool(self, part: int, pooling: Pooling) -> tuple[Tensor, ...]:
        """The vectors of one micro-batch."""
        size = self.bounds[part + 1] - self.bounds[part]
        return pooling.forward([group.parts[part] for group in self.groups], self.route.batch, size)

    def backward(self, part: int, pooling: Pooling, gradients: Sequence[Tensor]) -> None:
        """Adds the gradients of the rows of one micro-batch to the sums, given those of the outputs of `pool`."""
        for group, grad in zip(self.groups, pooling.by_group(gradients), strict=True):
            group.memory.add_gradients(part, grad)

    def __del__(self) -> None:
        self._give_back()


class WindowMaker:
    """Makes windows; on a CPU over memory that is kept from window to window."""

    def __init__(self) -> None:
        self._idle: list[list[HostWindow]] = []
        self._made: list[list[HostWindow]] = []

    def __call__(self, route: Route, bounds: Sequence[int], layouts: Sequence[Sequence[GroupLayout]]) -> Window:
        """A window of a route that was just made.

        Args:
            route: of the whole batch.
            bounds: the first sample of each micro-batch, and B.
            layouts: of each micro-batch, for every group.
        """
        if route.groups[0].exchange.device is not None:
            return Window(route, bounds, layouts, [DeviceWindow() for _ in route.groups], _keep)
        if not self._idle:
            self._made.append([_host_window(group) for group in route.groups])
            self._idle.append(self._made[-1])
        memories = self._idle.pop()
        return Window(route, bounds, layouts, memories, lambda: self._idle.append(memories))

    @property
    def num_bytes(self) -> int:
        """Memory of all windows, under way or idle."""
        return sum(held_bytes(each) + held_bytes(each.merger) for memories in self._made for each in memories)


def _host_window(group: RouteGroup) -> HostWindow:
    exchange, tables = group.exchange, group.exchange.group
    ranks = exchange.world_size, exchange.rank
    return HostWindow(tables.dim, tables.dtype, exchange.num_segments, *ranks, exchange.arena.address)


def _keep() -> None:
    """Memory is torch's."""


class WindowLookUp:
    """A micro-batch as autograd sees it."""

    def __init__(self, window: Window, part: int, pooling: Pooling, finished: Callable[[], None]) -> None:
        self._window, self._part, self._pooling, self._finished = window, part, pooling, finished

    def pool(self) -> tuple[Tensor, ...]:
        """Its vectors."""
        return self._window.pool(self._part, self._pooling)

    def take_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Adds the gradients of its rows to the sums."""
        self._window.backward(self._part, self._pooling, gradients)
        self._finished()
