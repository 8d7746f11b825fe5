"""Window: a batch whose micro-batches are looked up one by one while its rows are frozen.

The batch is routed once. Its micro-batches are runs of samples, whose ids have the inverse of the whole batch: what a
micro-batch needs beside is which rows it has, and where its outputs begin. That is found when the window is made, by
the thread, and on the stream, that routes. The gradients of a row are summed over micro-batches, in the order of the
samples, in one place: on a CPU where they are sent from.

Source: NestPipe §V. Differs: the paper routes each micro-batch by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from torch import Tensor

from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.route import AnyRouteGroup, Route, RouteGroup
from rowmesh.ops.look_up.device import places_in
from rowmesh.ops.memory import held_bytes
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.window import DeviceWindow, HostWindow
from rowmesh.sparse import SparseBatch

Form = Literal["unsplit", "naive", "delta"]
"""How the rows of a window travel. Rows are frozen while its micro-batches are computed, the same in all of them.

- *unsplit*: every distinct row of the batch is fetched before the first micro-batch, and pushed after the last;
- *naive*: each micro-batch fetches its own distinct rows and pushes a gradient for each. Rows that several
  micro-batches share travel several times: the paper's form, which clustering makes smaller;
- *delta*: a row is fetched before the first micro-batch that has it, and its gradient, summed over micro-batches,
  is pushed after the last one that has it. It travels once, however the batch is cut.

A fetch can hide behind the computation of earlier micro-batches and a push behind that of later ones. Rows that are
fetched before the first, and gradients that are pushed after the last, cannot.

Source: NestPipe §V. Differs: delta is not in the paper.
"""
FIRST = 4
"""The number of the first window, above all of `RankState`; a row that no window touched has number 0."""


class RankState(IntEnum):
    """Why a rank has no batch; in the place of the number of its window, which is higher."""

    ENDED = 1
    """Its data have ended."""
    FAILED = 2
    """Its data, or what was done with the batch ahead, failed."""
    LEFT = 3
    """Its loop was left before."""


class WindowGroup:
    """The part of a window that belongs to one group.

    Args:
        group: of the route of the whole batch.
        batch: it.
        bounds: the first sample of each micro-batch, and B.
        layouts: of each micro-batch.
        memory: what its kernels read and write.

    Attributes:
        group, memory: as given.
        parts: each micro-batch, as pooling sees it.
    """

    def __init__(
        self,
        group: AnyRouteGroup,
        batch: SparseBatch,
        bounds: Sequence[int],
        layouts: Sequence[GroupLayout],
        memory: HostWindow | DeviceWindow,
    ) -> None:
        self.group, self.memory = group, memory
        exchange, look_up = group.exchange, group.look_up
        if isinstance(memory, HostWindow):
            look_up.send.reserve_gradients(group.num_unique * exchange.gradient_bytes)
            memory.cut(look_up, layouts)
            look_ups = [look_up] * len(layouts)
        else:
            place = batch.features.index(exchange.group.features[0]) * batch.batch_size
            bags = place + np.arange(group.layout.num_features) * batch.batch_size
            look_ups = memory.cut(look_up, layouts, [bags + first for first in bounds[:-1]])
        pooled: list[Any] = [*look_ups]  # of a micro-batch nothing else is asked
        self.parts = [RouteGroup(exchange, layout, each) for layout, each in zip(layouts, pooled, strict=True)]

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

    def weigh(self, part: int) -> None:
        """A micro-batch on a host has weights that the batch did not have when it was routed."""
        parts, layout = self.parts, replace(self.parts[part].layout, is_weighted=True)
        parts[part] = RouteGroup(parts[part].exchange, layout, parts[part].look_up)
        self.on_host.weigh(part, layout)

    def read_fetched(self) -> None:
        """Lets micro-batches read the rows fetched for the whole batch; on a CPU they do so anyway."""
        if isinstance(self.memory, DeviceWindow):
            look_up = self.group.look_up
            slots = look_up.in_window[1] if look_up.order is None else places_in(look_up.order)
            self.memory.read(look_up.source, slots, look_up.num_unique)

    def gather_gradients(self) -> None:
        """Gives the whole batch the gradients of all micro-batches, to be pushed at once; on a CPU it has them."""
        if isinstance(self.memory, DeviceWindow):
            self.memory.give_gradients(self.group.look_up)


class Window:
    """A routed batch and its micro-batches.

    Attributes:
        route: of the whole batch.
        bounds: the first sample of each micro-batch, and B.
        groups: what the window has of each group.
        number: which window of the pipeline this is, from `FIRST` on.

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
        triples = zip(route.groups, layouts, memories, strict=True)
        self.groups = [WindowGroup(group, route.batch, bounds, cut, memory) for group, cut, memory in triples]

    def begin(self, number: int) -> None:
        """Takes its number in the pipeline, which is that of its fetch too."""
        self.number = number
        self.route.note_fetch(number)

    @property
    def num_parts(self) -> int:
        """The number of micro-batches, N."""
        return len(self.bounds) - 1

    def add_gradients(self, part: int, gradients: Sequence[Tensor], *, may_wait: bool = False) -> None:
        """Adds the gradients of the rows of one micro-batch to the sums, given those of its vectors by group.

        Args:
            part: which micro-batch.
            gradients: by group.
            may_wait: whether sums may be left to the update, as in `Pooling.backward`.
        """
        for group, grad in zip(self.groups, gradients, strict=True):
            if not group.group.exchange.sums_gradients:
                continue
            if isinstance(group.memory, DeviceWindow):
                group.memory.add_gradients(part, grad, may_wait=may_wait)
            else:
                group.memory.add_gradients(part, grad)

    def weigh(self, part: int) -> None:
        """See `WindowGroup.weigh`."""
        for group in self.groups:
            group.weigh(part)

    def lack_gradients(self) -> None:
        """Some micro-batches have none, and are sent all the same: to be refused, whatever they are."""
        for group in self.groups:
            if isinstance(group.memory, DeviceWindow):
                group.memory.lack_gradients()

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
            return Window(route, bounds, layouts, [DeviceWindow() for _ in route.groups], lambda: None)
        if not self._idle:
            self._made.append([_host_window(group.exchange) for group in route.groups])
            self._idle.append(self._made[-1])
        memories = self._idle.pop()
        return Window(route, bounds, layouts, memories, lambda: self._idle.append(memories))

    @property
    def num_bytes(self) -> int:
        """Memory of all windows, under way or idle."""
        return sum(self._sizes)

    @property
    def window_bytes(self) -> int:
        """Memory of the largest of them."""
        return max(self._sizes, default=0)

    @property
    def _sizes(self) -> list[int]:
        return [sum(held_bytes(each) + held_bytes(each.merger) for each in memories) for memories in self._made]


def _host_window(exchange: GroupExchange) -> HostWindow:
    group, ranks = exchange.group, (exchange.world_size, exchange.rank)
    return HostWindow(group.dim, group.dtype, exchange.num_segments, *ranks, exchange.arena.address)
