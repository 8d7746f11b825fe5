"""Window: a batch whose micro-batches are looked up one by one while its rows are frozen.

The batch is routed once. Its micro-batches are runs of samples, whose ids have the inverse of the whole batch: what a
micro-batch needs beside is which rows it has, and where its outputs begin. The gradients of a row are summed over
micro-batches in the outbox, in the order of the samples.

Source: NestPipe §V. Differs: the paper routes each micro-batch by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

import numpy as np
from torch import Tensor

from rowmesh.exchange.handshake import Step
from rowmesh.exchange.layout import GroupLayout
from rowmesh.exchange.pooling import Pooling
from rowmesh.exchange.route import Route, RouteGroup
from rowmesh.ops import pool as pool_ops
from rowmesh.ops import window as ops
from rowmesh.ops.memory import Scratch, held_bytes
from rowmesh.ops.merge_update import Merger
from rowmesh.ops.simd import STORAGE

Form = Literal["unsplit", "naive", "delta"]
"""How the rows of a window travel; see `rowmesh.pipeline.window`."""


class Space:
    """Memory of one window of one group, beside the workspace of its route; reused from window to window."""

    def __init__(self, num_segments: int, arena: int, row_bytes: int) -> None:
        self.merger = Merger(num_segments, arena, row_bytes)
        self.counts = Scratch()  # uint32 [U]: how often each unique id occurs in a micro-batch
        self.pointers = Scratch()  # uint32 [N, U + 1]: where the cells of each unique id begin
        self.cells = Scratch()  # uint32 [ids]: the cells, micro-batch after micro-batch
        self.unordered = Scratch()  # uint32 [U]: uses by unique id
        self.uses = Scratch()  # uint32 [U]: uses by request
        self.fetches, self.pushes = Scratch(), Scratch()  # uint32 [U]: phases of each request
        self.asked_uses = Scratch()  # uint32 [entries]: the same of the entries that this rank is the stop of
        self.asked_fetches, self.asked_pushes = Scratch(), Scratch()
        self.slots, self.expected = Scratch(), Scratch()  # uint32 [entries]: where rows are; what `verify` expects
        self.before = Scratch()  # uint32 [distinct]: the window that touched each row last
        self.bits, self.asked_bits = Scratch(), Scratch()  # which rows are final
        self.rows = Scratch()  # rows that this rank sends in one phase
        self.gradients = Scratch()  # gradients that this rank sends, phase after phase
        self.arrived = Scratch()  # gradients that came in one phase

    @property
    def num_bytes(self) -> int:
        """All memory held."""
        return held_bytes(self) + held_bytes(self.merger)


class WindowGroup:
    """One group's part of a window.

    Attributes:
        group: of the route of the whole batch.
        parts: the same for each micro-batch.
        space: memory.
    """

    def __init__(self, group: RouteGroup, layouts: Sequence[GroupLayout], space: Space) -> None:
        self.group, self.space = group, space
        self.parts = [RouteGroup(group.exchange, layout, group.look_up) for layout in layouts]
        self._first_cells = list(accumulate((layout.num_ids for layout in layouts), initial=0))
        self._is_fresh = False  # gradients of requests that travel begin afresh in every micro-batch
        exchange, size = group.exchange, group.num_unique
        group.look_up.send.reserve_gradients(size * exchange.gradient_bytes)
        self._kernels = ops.kernels(exchange.group.dim, STORAGE[exchange.group.dtype])
        self._file(size)

    def _file(self, size: int) -> None:
        """Files the cells of every micro-batch, and which micro-batches have each row."""
        space, workspace = self.space, self.group.look_up
        pointers = space.pointers.reserve(4 * len(self.parts) * (size + 1))
        cells = space.cells.reserve(4 * self._first_cells[-1])
        unordered, counts = space.unordered.reserve(4 * size), space.counts.reserve(4 * size)
        space.unordered.buffer.bytes[: 4 * size] = 0
        for k, part in enumerate(self.parts):
            space.counts.buffer.bytes[: 4 * size] = 0
            where = (part.layout.address, part.layout.num_features, part.look_up.inverse)
            ops.count_cells(*where, k, counts, unordered)
            first = cells + 4 * self._first_cells[k]
            pool_ops.file_cells(*where, counts, size, pointers + 4 * k * (size + 1), first)
        ops.order_uses(unordered, workspace.uniques, size, space.uses.reserve(4 * size))

    def start_afresh(self) -> None:
        """Makes gradients that travel those of one micro-batch each: the paper's form."""
        self._is_fresh = True

    def backward(self, part: int, grad: Tensor) -> None:
        """Adds the gradients of a micro-batch's rows to the sums in the outbox."""
        group, space = self.parts[part], self.space
        workspace, exchange, size = group.look_up, group.exchange, group.num_unique
        pointers = space.pointers.buffer.address + 4 * part * (size + 1)
        kept = (group.look_up.bounds[exchange.rank], group.look_up.bounds[exchange.rank + 1])
        self._kernels.backward(
            grad.data_ptr(), pointers, space.cells.buffer.address + 4 * self._first_cells[part],
            workspace.file_weights(group.layout, pointers) if group.layout.is_weighted else 0,
            workspace.uniques, workspace.send.lists.address, exchange.num_segments,
            exchange.world_size, space.uses.buffer.address, part, *(kept if self._is_fresh else (0, size)),
            workspace.send.gradients.address,
        )  # fmt: skip


class Window:
    """A routed batch and its micro-batches.

    Attributes:
        route: of the whole batch.
        bounds: the first sample of each micro-batch, and B.
        groups: the parts of the route.
        number: which window of the pipeline this is, from 2 on.
        step_before: the step of the last window that has had one when this one opens, where there is one.

    Args:
        route: of the whole batch.
        bounds: the first sample of each micro-batch, and B.
        layouts: of each micro-batch, for every group.
        spaces: memory of each group.
        give_back: takes the memory, when nobody needs it any more.
    """

    def __init__(
        self,
        route: Route,
        bounds: Sequence[int],
        layouts: Sequence[Sequence[GroupLayout]],
        spaces: list[Space],
        give_back: Callable[[list[Space]], None],
    ) -> None:
        self.route, self.number = route, 0
        self.step_before: Step | None = None
        self.bounds = list(bounds)
        self._spaces, self._give_back = spaces, give_back
        triples = zip(route.groups, layouts, spaces, strict=True)
        self.groups = [WindowGroup(group, cut, space) for group, cut, space in triples]

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
            group.backward(part, grad)

    def __del__(self) -> None:
        self._give_back(self._spaces)


class WindowMaker:
    """Makes windows over reused memory."""

    def __init__(self) -> None:
        self._idle: list[list[Space]] = []
        self._made: list[list[Space]] = []

    def __call__(self, route: Route, bounds: Sequence[int], layouts: Sequence[Sequence[GroupLayout]]) -> Window:
        """A window of a route that was just made.

        Args:
            route: of the whole batch.
            bounds: the first sample of each micro-batch, and B.
            layouts: of each micro-batch, for every group.
        """
        if not self._idle:
            exchanges = [group.exchange for group in route.groups]
            spaces = [Space(each.num_segments, each.arena.address, each.row_bytes) for each in exchanges]
            self._idle.append(spaces)
            self._made.append(spaces)
        return Window(route, bounds, layouts, self._idle.pop(), self._idle.append)

    @property
    def num_bytes(self) -> int:
        """Memory of all windows, under way or idle."""
        return sum(space.num_bytes for spaces in self._made for space in spaces)


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


def phase_counts(address: int, bounds: Sequence[int], own: int) -> np.ndarray:
    """int64 `[32, members]`: the entries of each member that travel in each phase, given their masks."""
    counts, ends = np.empty((ops.FINAL + 1, len(bounds) - 1), np.int64), np.array(bounds, np.int64)
    ops.count_phases(address, ends.ctypes.data, len(bounds) - 1, own, ops.FINAL + 1, counts.ctypes.data)
    return counts
