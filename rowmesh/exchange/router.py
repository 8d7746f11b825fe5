"""Router: finds which rows a batch needs, which ranks own them, and in which order they travel; no communication.

    fuse → segment unique → locate → stable sort by (destination, segment)

The rows of dynamic tables are frames, which ids are given before; that is collective.

Source: FusedRec §3 and Algorithm 1, lines 1–4.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import DataError, IdRangeError
from rowmesh.exchange.device_group import DeviceGroupExchange
from rowmesh.exchange.frames import DynamicIds, Framed, Resolve, put_frames
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.host_group import Found, HostGroupExchange
from rowmesh.exchange.layout import Layouts
from rowmesh.exchange.route import LateIdCheck, Moment, Route, refusal, refused_ids, table_bounds
from rowmesh.ops.look_up.device_ids import DeviceIds
from rowmesh.ops.memory import Scratch, held_bytes
from rowmesh.ops.pool.handles import Bags
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.streams import Mark
from rowmesh.sparse import SparseBatch
from rowmesh.sparse.split import joined_ids
from rowmesh.tables import TableGroup

_MOST_SHAPES = 64  # of batches that a device remembers
X = TypeVar("X", bound=GroupExchange)


class Router(Generic[X]):
    """Routes batches through all groups of a collection; see `make_router`.

    Args:
        groups: of the collection.
        layouts: where each feature's ids and vectors are.
    """

    num_bytes = 0
    """Memory of all routes, under way or gone."""

    def __init__(self, groups: Sequence[TableGroup], layouts: Layouts) -> None:
        self._layouts = layouts
        self._takes_scores = any(table.takes_scores for group in groups for table in group.tables)

    def __call__(
        self,
        batch: SparseBatch,
        exchanges: Sequence[X],
        moment: Moment | None = None,
        resolve: Resolve | None = None,
        items: Sequence[SparseBatch] = (),
        *,
        is_ahead: bool = False,
    ) -> Route:
        """Routes a batch.

        Args:
            batch: of this rank.
            exchanges: of all groups.
            moment: which look-up this is, and after how many steps; None where others name it.
            resolve: of dynamic tables, where there are some; it is collective.
            items: whose samples the batch has, one after the other, where each is resolved by itself. An id may have
                another frame in each.
            is_ahead: whether a pipeline looks the batch up, for which rows travel.

        Raises:
            NoRoomError, PeerError: see `rowmesh.exchange.resolve.resolver.Resolver`.
            DataError: the batch's features are not the tables', or its buffers do not fit together any more.
            IdRangeError: an id is out of range; on a device that is found later.
        """
        raise NotImplementedError


def make_router(
    groups: Sequence[TableGroup],
    layouts: Layouts,
    rank: int,
    device: torch.device | None = None,
    indexed: Collection[str] = (),
) -> Router[Any]:
    """Makes the router of batches through all groups of a collection.

    Args:
        groups: of the collection.
        layouts: where each feature's ids and vectors are.
        rank: this one, for messages.
        device: where; None: the host.
        indexed: dynamic tables whose index is on the device.
    """
    if device is None:
        return HostRouter(groups, layouts, rank)
    return DeviceRouter(groups, layouts, rank, device, indexed)


class _Memory:
    """The memory of a route on the host beside the look-ups of its groups; lent to it."""

    def __init__(self) -> None:
        self._inverse = Scratch()
        self.make_room(0)
        self._offsets = Scratch()  # int64 [F·B + 1]: the batch's, copied
        self._view = torch.empty(0, dtype=torch.int64, device="cpu")

    def make_room(self, num_ids: int) -> None:
        """For an inverse, uint32 `[N]`, which unique id each id is; `inverse` is its address."""
        self.num_ids, self.inverse = num_ids, self._inverse.reserve(4 * num_ids)

    def offsets(self, count: int) -> Tensor:
        """Room for so many."""
        if self._view.numel() != count:  # batches of one size follow each other
            self._offsets.reserve(8 * count)
            self._view = self._offsets.buffer.tensor(torch.int64, count)
        return self._view


class HostRouter(Router[HostGroupExchange]):
    """Routes batches on the host, over memory that routes give back.

    Args:
        groups, layouts, rank: as for `make_router`.

    Attributes:
        idle: memory that no route has.
    """

    def __init__(self, groups: Sequence[TableGroup], layouts: Layouts, rank: int) -> None:
        super().__init__(groups, layouts)
        self._rank = rank
        self.idle: list[_Memory] = []
        self._made: list[_Memory] = []  # those that routes hold, too

    @property
    def num_bytes(self) -> int:
        """Memory of all routes, under way or gone."""
        return sum(held_bytes(memory) for memory in self._made)

    def __call__(
        self,
        batch: SparseBatch,
        exchanges: Sequence[HostGroupExchange],
        moment: Moment | None = None,
        resolve: Resolve | None = None,
        items: Sequence[SparseBatch] = (),
        *,
        is_ahead: bool = False,
    ) -> Route:
        """See `Router.__call__`."""
        if batch.scores is not None and not self._takes_scores:
            raise _scores_without_use()
        try:
            memory = self.idle.pop()
        except IndexError:  # asking before would not do: another thread may take the last one
            memory = _Memory()
            self._made.append(memory)
        # First: it gives everything back if anything fails.
        route = Route(batch, partial(self.idle.append, memory), offsets=memory.offsets)
        batch = route.batch
        layouts = self._layouts(batch)
        if batch.ids.numel() > memory.num_ids:
            memory.make_room(batch.ids.numel())
        inverse = memory.inverse
        pairs = [*zip(exchanges, layouts, strict=True)]
        dynamic: list[int] = []
        if resolve is not None:
            dynamic = [place for place, exchange in enumerate(exchanges) if exchange.is_dynamic]
        refused: list[str] = []
        for place, (exchange, layout) in enumerate(pairs):  # what these refuse, dynamic tables have not decided
            if place in dynamic:
                continue
            try:
                route.groups.append(exchange.route(batch, layout, inverse, sends_rows=is_ahead))
            except IdRangeError as error:
                refused.append(str(error))  # not the error, whose frames hold buffers
        if refused:
            raise refusal(self._rank, refused, moment)
        if resolve is not None:
            if items:
                batch = batch.with_ids(self._frames(route, items, exchanges, inverse, resolve))
                for place in dynamic:
                    exchange, layout = pairs[place]
                    route.groups.append(exchange.route(batch, layout, inverse))
            else:
                self._resolve(route, [pairs[place] for place in dynamic], inverse, resolve)
            order = sorted(range(len(pairs)), key=dynamic.__contains__)  # in which groups are now
            route.take(route.groups[order.index(place)] for place in range(len(pairs)))
        return route

    @staticmethod
    def _resolve(
        route: Route, pairs: Sequence[tuple[HostGroupExchange, GroupLayout]], inverse: int, resolve: Resolve
    ) -> None:
        """Routes dynamic tables: finds their distinct ids, which become frames."""
        waiting: list[tuple[HostGroupExchange, GroupLayout, Found]] = []
        try:
            for exchange, layout in pairs:
                waiting.append((exchange, layout, exchange.find_unique(route.batch, layout, inverse)))
            route.take_pin(resolve([found.asked for _, _, found in waiting]))
            while waiting:
                exchange, layout, found = waiting.pop(0)
                route.groups.append(exchange.place(found, route.batch, layout, inverse))
        except BaseException:
            for exchange, _, found in waiting:
                exchange.drop(found)
            raise

    def _frames(
        self,
        route: Route,
        items: Sequence[SparseBatch],
        exchanges: Sequence[HostGroupExchange],
        inverse: int,
        resolve: Resolve,
    ) -> Tensor:
        """The ids of items, in the order of the route's batch, with frames in the place of those of dynamic tables."""
        parts: list[Tensor] = []
        for item in items:
            item = item.routed(lambda count: torch.empty(count, dtype=torch.int64, device="cpu"))
            layouts, ids = self._layouts(item), item.ids.clone()
            waiting: list[tuple[HostGroupExchange, GroupLayout, Found]] = []
            try:
                for exchange, layout in zip(exchanges, layouts, strict=True):
                    if exchange.is_dynamic:
                        waiting.append((exchange, layout, exchange.find_unique(item, layout, inverse)))
                route.take_pin(resolve([found.asked for _, _, found in waiting]))
                for exchange, layout, found in waiting:
                    exchange.put_frames(found, layout, inverse, ids.numpy())
            finally:
                for exchange, _, found in waiting:
                    exchange.drop(found)
            parts.append(ids)
        return joined_ids(items, parts)


class _Shape(NamedTuple):
    """Where everything is in a batch, as a device reads it.

    Attributes:
        layouts: of each group.
        segments: where the ids of each table begin, counted from its group's first; for each group.
        offsets: int64 `[F + 1]` on the device: where the ids of each feature begin.
        of_groups: `segments`, on the device.
        bags: of each group, without weights.
        mark: after which the device has them.
    """

    layouts: Sequence[GroupLayout]
    segments: Sequence[Sequence[int]]
    offsets: Tensor
    of_groups: Sequence[Tensor]
    bags: Sequence[Bags]
    mark: Mark


class DeviceRouter(Router[DeviceGroupExchange]):
    """Routes batches on a device; the host waits for nothing but the frames of dynamic tables.

    The ids are brought into the order of the tables before, by the host where the features of the batch are in another
    order.

    Args:
        groups, layouts, rank, device, indexed: as for `make_router`.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        layouts: Layouts,
        rank: int,
        device: torch.device,
        indexed: Collection[str],
    ) -> None:
        super().__init__(groups, layouts)
        self._rank, self._groups, self._indexed = rank, groups, indexed
        self._features = tuple(feature for group in groups for feature in group.features)
        tables = [table for group in groups for table in group.tables for _ in table.features]
        rows = [None if table.out_of_range == "error" else table.out_of_range for table in tables]
        self._ids = DeviceIds([table.num_rows for table in tables], rows, device)
        self._shapes: dict[tuple[int, int, bool], _Shape] = {}

    def __call__(
        self,
        batch: SparseBatch,
        exchanges: Sequence[DeviceGroupExchange],
        moment: Moment | None = None,
        resolve: Resolve | None = None,
        items: Sequence[SparseBatch] = (),
        *,
        is_ahead: bool = False,
    ) -> Route:
        """See `Router.__call__`."""
        if batch.scores is not None and not self._takes_scores:
            raise _scores_without_use()
        batch = self._in_order(batch)
        shape, framed = self._shape_of(batch), list[Framed]()
        if resolve is not None:
            self._check_ids(batch, exchanges, shape, moment)
            items = [self._in_order(item) for item in items]
            if items:
                framed = [self._put_frames(item, exchanges, self._shape_of(item), resolve) for item in items]
            else:
                framed = [self._put_frames(batch, exchanges, shape, resolve)]
                batch = batch.with_ids(framed[0].ids)
        # First: it tells exchanges when it is gone, even half made.
        route = Route(batch, pins=[each.pin for each in framed])
        weights = None if batch.weights is None else self._upload_weights(batch.weights)
        uploaded = [each.upload(self._ids.upload) for each in framed]
        ids = joined_ids(items, uploaded) if items else uploaded[0] if uploaded else batch.ids
        rows, outside = self._ids.bound(ids, shape.offsets)
        route.check_later(LateIdCheck(outside, self._ids.refuses, route, moment))
        first = 0
        for exchange, layout, begins, bags in zip(exchanges, shape.layouts, shape.of_groups, shape.bags, strict=True):
            own = slice(first, first + layout.num_ids)
            bags = bags if weights is None else replace(bags, weights=weights[own])
            route.groups.append(exchange.route(rows[own], begins, layout, bags))
            first = own.stop
        for exchange, group in zip(exchanges, route.groups, strict=True):
            exchange.start_prefetch(group, batch)  # when all is launched: the host may take its time
        return route

    def _in_order(self, batch: SparseBatch) -> SparseBatch:
        """The batch as it is now, its features in the order of the tables."""
        batch = batch.routed(self._ids.offsets_room)
        if batch.features == self._features:
            return batch
        self._layouts.check(batch)
        return batch.select(self._features)

    def _check_ids(
        self, batch: SparseBatch, exchanges: Sequence[DeviceGroupExchange], shape: _Shape, moment: Moment | None
    ) -> None:
        """Raises IdRangeError where ids on the host are no rows, before dynamic tables decide; later on a device."""
        if batch.ids.device.type != "cpu":
            return
        refused = []
        for exchange, layout in zip(exchanges, shape.layouts, strict=True):
            bounds = layout.features[:, :2].tolist()
            for (name, table), (begin, end) in zip(exchange.features, bounds, strict=True):
                if exchange.is_dynamic or table.out_of_range != "error" or begin == end:
                    continue
                part = batch.ids[begin:end]
                first, last = map(int, part.aminmax())
                if first < 0 or last >= table.num_rows:
                    exchange.counters.count_outside(name, int(((part < 0) | (part >= table.num_rows)).sum()))
                    refused.append(refused_ids(name, table, part))
        if refused:
            raise refusal(self._rank, refused, moment)

    def _put_frames(
        self, batch: SparseBatch, exchanges: Sequence[DeviceGroupExchange], shape: _Shape, resolve: Resolve
    ) -> Framed:
        """Replaces the ids of dynamic tables by frames."""
        begins = accumulate((layout.num_ids for layout in shape.layouts), initial=0)
        dynamic = [
            DynamicIds(
                [begin + bound for bound in bounds],
                exchange.is_frozen,
                [table.name in self._indexed for table in exchange.group.tables],
            )
            for exchange, begin, bounds in zip(exchanges, begins, shape.segments, strict=False)
            if exchange.is_dynamic
        ]
        return put_frames(batch.ids, dynamic, resolve, batch.scores)

    def _upload_weights(self, weights: Tensor) -> Tensor:
        weights = weights.detach()
        return self._ids.upload(weights if weights.dtype in (torch.float32, torch.float64) else weights.float())

    def _shape_of(self, batch: SparseBatch) -> _Shape:
        """Where everything is in a batch; the device is told once of batches with equal bags."""
        if batch.bag_size is None:
            return self._describe(batch)
        key = batch.batch_size, batch.bag_size, batch.weights is None
        if (shape := self._shapes.get(key)) is None:
            shape = self._describe(batch)
            if len(self._shapes) < _MOST_SHAPES:  # none is ever taken back: a stream may be reading it
                self._shapes[key] = shape
        self._ids.wait_for(shape.mark)
        return shape

    def _describe(self, batch: SparseBatch) -> _Shape:
        layouts = self._layouts(batch)
        segments = [table_bounds(group, layout) for group, layout in zip(self._groups, layouts, strict=True)]
        jagged = self._ids.upload(batch.offsets) if batch.bag_size is None else None
        bounds = [0, *(int(end) for layout in layouts for end in layout.features[:, 1])]
        numbers = torch.tensor([*bounds, *(number for part in segments for number in part)], device="cpu")
        offsets, *of_groups = self._ids.upload(numbers).split([len(bounds), *map(len, segments)])
        places = accumulate((layout.num_features for layout in layouts), initial=0)
        bags = [
            self._ids.bags(layout, (place + np.arange(layout.num_features)) * batch.batch_size, jagged)
            for place, layout in zip(places, layouts, strict=False)
        ]
        return _Shape(layouts, segments, offsets, of_groups, bags, self._ids.mark())


def _scores_without_use() -> DataError:
    return DataError('the batch has scores, and no table evicts by them (eviction = "score"); leave them out')
