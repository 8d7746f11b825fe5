"""Route: which rows a batch needs, which ranks own them, and in which order they travel.

    fuse → segment unique → locate → stable sort by (destination, segment)

Source: FusedRec §3 and Algorithm 1, lines 1–4.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rowmesh.dynamic.asking import Asked
from rowmesh.dynamic.leases import Lease
from rowmesh.errors import DataError, IdRangeError
from rowmesh.exchange.frames import DynamicIds, Resolve, put_frames
from rowmesh.layout import Layouts
from rowmesh.ops.look_up import HostLookUp, UniqueIds
from rowmesh.ops.look_up.device import DeviceLookUp
from rowmesh.ops.look_up.device_ids import DeviceIds
from rowmesh.ops.memory import Scratch, held_bytes
from rowmesh.ops.pool.handles import Bags
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.streams import Mark
from rowmesh.ops.tensor_train import Lookup
from rowmesh.placement.drift import Traffic
from rowmesh.sparse import SparseBatch
from rowmesh.tables import PinnedRows, TableGroup, TableSpec

if TYPE_CHECKING:
    from rowmesh.exchange.collective import Incoming
    from rowmesh.exchange.device_lanes import Requests
    from rowmesh.exchange.group import GroupExchange

_MOST_SHAPES = 64  # of batches that a device remembers

Moment = tuple[int, int]
"""Which look-up this is, and after how many steps; for messages."""


class Found(NamedTuple):
    """The distinct ids of a group's batch, before they are placed.

    Attributes:
        look_up: takes what is found.
        unique: the ids.
        asked: the same, as the resolver sees them.
    """

    look_up: HostLookUp
    unique: UniqueIds
    asked: Asked


L = TypeVar("L", HostLookUp, DeviceLookUp)


class RouteGroup(Generic[L]):
    """One group of a route, or of one of its micro-batches.

    Attributes:
        exchange: the group's.
        layout: where each feature's ids and vectors are.
        look_up: what was found of the batch: a `HostLookUp` or a `DeviceLookUp`.
        pinned: keeps rows that this rank reads, or was asked for, in fast memory, where they could leave it.
        incoming: what other ranks asked for, where the transport of hosts learns it at fetch.
        core_look_ups: of each tensor-train table, from the fetch to the update.
        lanes: on devices, what is asked of the ranks, lane by lane.
    """

    __slots__ = ("core_look_ups", "exchange", "incoming", "lanes", "layout", "look_up", "pinned")
    incoming: Incoming
    core_look_ups: Sequence[Lookup]

    def __init__(self, exchange: GroupExchange, layout: GroupLayout, look_up: L) -> None:
        self.exchange, self.layout, self.look_up = exchange, layout, look_up
        self.pinned: PinnedRows | None = None
        self.lanes: list[Requests] = []

    @property
    def num_unique(self) -> int:
        """U where the host knows it, else as many as there could be."""
        return self.look_up.num_unique

    def pin(self, rows: PinnedRows | None) -> None:
        """Takes rows that are pinned; those of an earlier fetch of the route are unpinned."""
        before, self.pinned = self.pinned, rows
        if before is not None:
            before.unpin()

    def unpin(self) -> None:
        """Rows that the current stream has read may leave fast memory."""
        for rows in (self.pinned, *(lane.held for lane in self.lanes)):
            if rows is not None:
                rows.note_use()
                rows.unpin()

    def count_into(self, traffic: Traffic) -> None:
        """Adds what is asked for to counted traffic; tensor-train tables ask no rank."""
        address_map, look_up = self.exchange.address_map, self.look_up
        if self.exchange.group.storage == "tensor_train":
            return
        if isinstance(look_up, HostLookUp):
            traffic.add(address_map, look_up.send.segment_offsets, look_up.send.accesses)
        else:  # the host learns it when that is taken
            traffic.add_on_device(address_map, self.exchange.sizes_on_device(self))

    def release(self) -> None:
        """Gives memory back; rows may leave fast memory."""
        if self.pinned is not None:
            self.pinned.unpin()
        for lane in self.lanes:
            if lane.held is not None:
                lane.held.unpin()
        look_up: Any = self.look_up  # of the same kind as the exchange's
        self.exchange.look_ups.give_back(look_up)


HostRouteGroup = RouteGroup[HostLookUp]
DeviceRouteGroup = RouteGroup[DeviceLookUp]
AnyRouteGroup = RouteGroup[Any]
"""Of either: what passes it on does not look into it."""


class LateIdCheck:
    """Ids of a batch that are no rows of their tables, which a device has counted: looked at by the host once.

    Attributes:
        outside: int64 `[F]` on the device: such ids of each feature.
    """

    def __init__(self, outside: Tensor, refuses: Tensor, route: Route, moment: Moment | None) -> None:
        self.outside, self._refuses, self._moment = outside, refuses, moment
        self._groups, self._ids = route.groups, route.batch.ids
        self._is_done = False

    @property
    def refused(self) -> Tensor:
        """int64 `[1]` on the device: how many of them are not to be mapped."""
        return (self.outside * self._refuses).sum(0, keepdim=True)

    def check(self, outside: Sequence[int], rank: int) -> None:
        """Counts ids that were mapped, and refuses the batch where a table says so.

        Args:
            outside: what is on the device, when the host knows it.
            rank: this one, for the message.

        Raises:
            IdRangeError: an id is not a row of its table and the table's policy is to refuse it.
        """
        if self._is_done or not any(outside):
            return
        self._is_done = True
        refused, count = [], iter(outside)
        for group in self._groups:
            bounds = group.layout.features[:, :2].tolist()
            for (name, table), (begin, end) in zip(group.exchange.features, bounds, strict=True):
                if not (number := next(count)):
                    continue
                group.exchange.counters.count_outside(name, number)
                if table.out_of_range == "error":
                    refused.append(refused_ids(name, table, self._ids[begin:end]))
        if refused:
            raise refusal(rank, refused, self._moment)


class Route:
    """What a batch needs: unique ids of each group, their owners, and how to get from ids to rows.

    Made by `EmbeddingCollection.route`. A route holds buffers; they return to their owner with its last reference.

    Attributes:
        batch: as it was when it was routed.
        groups: its parts.
        number: of the fetch, the same on all ranks.
        has_gradients: whether its backward has run.
        thread, num_pushes: which thread pooled it for training, and after how many pushes.
        late: of a route on a device.
        lease: keeps the frames of dynamic tables that the batch was given.
    """

    def __init__(self, batch: SparseBatch, give_back: Callable[[], None] | None = None) -> None:
        self.batch, self.groups, self.late = batch, list[AnyRouteGroup](), None
        self.number = self.thread = self.num_pushes = 0
        self.has_gradients = False
        self._give_back, self.lease = give_back, None

    late: LateIdCheck | None
    lease: Lease | None

    @classmethod
    def of_nothing(cls, exchanges: Sequence[GroupExchange]) -> Route:
        """A route that asks for no row."""
        route = cls(SparseBatch((), torch.empty(0, dtype=torch.int64, device="cpu"), 0, bag_size=0))
        route.groups = [exchange.nothing() for exchange in exchanges]
        return route

    def __del__(self) -> None:
        if self._give_back is not None:
            self._give_back()
        for group in self.groups:
            group.release()
        if self.lease is not None:
            self.lease.drop()


class ShardGroupRoute:
    """Some groups of a route, as a transport sees them.

    Attributes:
        number: of the fetch, the same on all ranks.
        groups: those that the transport serves.
        late: of the whole route, on a device.
    """

    __slots__ = ("_route", "groups", "late", "number")

    def __init__(self, route: Route, indices: Sequence[int]) -> None:
        self._route, self.number, self.late = route, route.number, route.late
        self.groups = [route.groups[index] for index in indices]


Routed = Route | ShardGroupRoute
"""What a transport sees of a route."""


class _DeviceShape(NamedTuple):
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


class _Memory:
    """What a route needs beside the look-ups of its groups; lent to it."""

    def __init__(self) -> None:
        self.inverse = Scratch()  # uint32 [N]: which unique id each id is
        self._offsets = Scratch()  # int64 [F·B + 1]: the batch's, copied
        self._view = torch.empty(0, dtype=torch.int64, device="cpu")

    def offsets(self, count: int) -> Tensor:
        """Room for so many."""
        if self._view.numel() != count:  # batches of one size follow each other
            self._offsets.reserve(8 * count)
            self._view = self._offsets.buffer.tensor(torch.int64, count)
        return self._view


class Router:
    """Routes batches through all groups of a collection; no communication.

    Args:
        groups: of the collection.
        layouts: where each feature's ids and vectors are.
        rank: this one, for messages.
        device: where; None: the host.

    Attributes:
        device_tables: dynamic tables whose index is on the device.
    """

    def __init__(
        self, groups: Sequence[TableGroup], layouts: Layouts, rank: int, device: torch.device | None = None
    ) -> None:
        self._groups, self._layouts, self._rank = groups, layouts, rank
        self.idle: list[_Memory] = []
        self._made: list[_Memory] = []  # those that routes hold, too
        self._features = tuple(feature for group in groups for feature in group.features)
        self.device_tables: Collection[str] = ()
        self._takes_scores = any(table.takes_scores for group in groups for table in group.tables)
        self._ids: DeviceIds | None = None
        self._shapes: dict[tuple[int, int, bool], _DeviceShape] = {}
        if device is not None:
            tables = [table for group in groups for table in group.tables for _ in table.features]
            rows = [None if table.out_of_range == "error" else table.out_of_range for table in tables]
            self._ids = DeviceIds([table.num_rows for table in tables], rows, device)

    def __call__(
        self,
        batch: SparseBatch,
        exchanges: Sequence[GroupExchange],
        moment: Moment | None = None,
        resolve: Resolve | None = None,
    ) -> Route:
        """Routes a batch.

        Args:
            batch: of this rank.
            exchanges: of all groups.
            moment: which look-up this is, and after how many steps; None where others name it.
            resolve: of dynamic tables, where there are some; it is collective.

        Raises:
            NoRoomError, PeerError: see `rowmesh.dynamic.resolver.Resolver`.
            DataError: the batch's features are not the tables', or its buffers do not fit together any more.
            IdRangeError: an id is out of range; on a device that is found later.
        """
        if batch.scores is not None and not self._takes_scores:
            raise DataError('the batch has scores, and no table evicts by them (eviction = "score"); leave them out')
        if self._ids is not None:
            return self._route_on_device(batch, exchanges, moment, self._ids, resolve)
        try:
            memory = self.idle.pop()
        except IndexError:  # asking before would not do: another thread may take the last one
            memory = _Memory()
            self._made.append(memory)
        route = Route(batch, partial(self.idle.append, memory))  # first: it gives everything back if anything fails
        route.batch = batch = batch.routed(memory.offsets)
        layouts = self._layouts(batch)
        inverse = memory.inverse.reserve(4 * batch.ids.numel())
        found = None if resolve is None else self._resolve(route, exchanges, layouts, inverse, resolve)
        refused: list[str] = []
        for exchange, layout in zip(exchanges, layouts, strict=True):
            try:
                if found is not None and exchange.is_dynamic:
                    route.groups.append(exchange.place(next(found), batch, layout, inverse))
                else:
                    route.groups.append(exchange.route(batch, layout, inverse))
            except IdRangeError as error:
                refused.append(str(error))  # not the error, whose frames hold buffers
        if refused:
            if route.lease is not None:
                route.lease.end()
            raise refusal(self._rank, refused, moment)
        return route

    @staticmethod
    def _resolve(
        route: Route, exchanges: Sequence[GroupExchange], layouts: Sequence[GroupLayout], inverse: int, resolve: Resolve
    ) -> Iterator[Found]:
        """Finds the distinct ids of dynamic tables, which become frames."""
        dynamic = [each for each in zip(exchanges, layouts, strict=True) if each[0].is_dynamic]
        found = list[Found]()
        try:
            for exchange, layout in dynamic:
                found.append(exchange.find_unique(route.batch, layout, inverse))
            route.lease = resolve([each.asked for each in found])
        except BaseException:
            for (exchange, _), each in zip(dynamic, found, strict=False):
                exchange.drop(each)
            raise
        return iter(found)

    def _route_on_device(
        self,
        batch: SparseBatch,
        exchanges: Sequence[GroupExchange],
        moment: Moment | None,
        device_ids: DeviceIds,
        resolve: Resolve | None,
    ) -> Route:
        """Routes a batch on a device; the host waits for nothing but the frames of dynamic tables.

        The ids are brought into the order of the tables before, by the host where the features of the batch are in
        another order.
        """
        if batch.features != self._features:
            self._layouts.check(batch)
        batch = batch.routed(device_ids.offsets_room)
        batch = batch if batch.features == self._features else batch.select(self._features)
        shape = self._shape_of(batch, device_ids)
        framed = None
        if resolve is not None:
            begins = accumulate((layout.num_ids for layout in shape.layouts), initial=0)
            dynamic = [
                self._dynamic_ids(exchange, [begin + bound for bound in bounds])
                for exchange, begin, bounds in zip(exchanges, begins, shape.segments, strict=False)
                if exchange.is_dynamic
            ]
            framed = put_frames(batch.ids, dynamic, resolve, batch.scores)
            batch = batch.with_ids(framed.ids)
        route = Route(batch)  # first: it tells exchanges when it is gone, even half made
        route.lease = None if framed is None else framed.lease
        weights = batch.weights
        if weights is not None:
            weights = weights.detach()
            weights = weights if weights.dtype in (torch.float32, torch.float64) else weights.float()
            weights = device_ids.upload(weights)
        ids = batch.ids if framed is None else framed.upload(device_ids.upload)
        rows, outside = device_ids.bound(ids, shape.offsets)
        route.late = LateIdCheck(outside, device_ids.refuses, route, moment)
        first = 0
        for exchange, layout, begins, bags in zip(exchanges, shape.layouts, shape.of_groups, shape.bags, strict=True):
            own = slice(first, first + layout.num_ids)
            bags = bags if weights is None else replace(bags, weights=weights[own])
            route.groups.append(exchange.route_on_device(rows[own], begins, layout, bags))
            first = own.stop
        for exchange, group in zip(exchanges, route.groups, strict=True):
            exchange.start_prefetch(group, batch)  # when all is launched: the host may take its time
        return route

    def _shape_of(self, batch: SparseBatch, device_ids: DeviceIds) -> _DeviceShape:
        """Where everything is in a batch; the device is told once of batches with equal bags."""
        if batch.bag_size is None:
            return self._describe(batch, device_ids)
        key = batch.batch_size, batch.bag_size, batch.weights is None
        if (shape := self._shapes.get(key)) is None:
            shape = self._describe(batch, device_ids)
            if len(self._shapes) < _MOST_SHAPES:  # none is ever taken back: a stream may be reading it
                self._shapes[key] = shape
        device_ids.wait_for(shape.mark)
        return shape

    def _describe(self, batch: SparseBatch, device_ids: DeviceIds) -> _DeviceShape:
        layouts = self._layouts(batch)
        segments = [table_bounds(group, layout) for group, layout in zip(self._groups, layouts, strict=True)]
        jagged = device_ids.upload(batch.offsets) if batch.bag_size is None else None
        bounds = [0, *(int(end) for layout in layouts for end in layout.features[:, 1])]
        numbers = torch.tensor([*bounds, *(number for part in segments for number in part)], device="cpu")
        offsets, *of_groups = device_ids.upload(numbers).split([len(bounds), *map(len, segments)])
        places = accumulate((layout.num_features for layout in layouts), initial=0)
        bags = [
            device_ids.bags(layout, (place + np.arange(layout.num_features)) * batch.batch_size, jagged)
            for place, layout in zip(places, layouts, strict=False)
        ]
        return _DeviceShape(layouts, segments, offsets, of_groups, bags, device_ids.mark())

    def _dynamic_ids(self, exchange: GroupExchange, bounds: Sequence[int]) -> DynamicIds:
        on_device = [table.name in self.device_tables for table in exchange.group.tables]
        return DynamicIds(bounds, exchange.is_frozen, on_device)

    @property
    def num_bytes(self) -> int:
        """Memory of all routes, under way or gone."""
        return sum(held_bytes(memory) for memory in self._made)


def table_bounds(group: TableGroup, layout: GroupLayout) -> list[int]:
    """Where the ids of each table begin, counted from the group's first, and where the last one's end."""
    lengths = layout.features[:, 1] - layout.features[:, 0]
    ends = list(accumulate(lengths.tolist(), initial=0))
    return [ends[feature] for feature in group.feature_bounds]


def refused_ids(feature: str, table: TableSpec, ids: Tensor) -> str:
    """What is wrong with the ids of a feature, some of which are outside its table; a part of a message."""
    outside = ids[(ids < 0) | (ids >= table.num_rows)]
    # A device reads them when the program may have gone on.
    first = f"the first is {int(outside[0])}" if len(outside) else "and were overwritten since"
    return (
        f"feature {feature!r}: {len(outside) or 'some'} of {len(ids)} ids are outside table {table.name!r} "
        f"(0 to {table.num_rows - 1}), {first}"
    )


def refusal(rank: int, refused: Sequence[str], moment: Moment | None) -> IdRangeError:
    """The error for ids that are no rows of their tables.

    >>> str(refusal(1, ["feature 'item': …"], (7, 3)))[:56]
    "rank 1, look-up 7 (after 3 steps): feature 'item': …; co"
    """
    when = "" if moment is None else f", look-up {moment[0]} (after {moment[1]} steps)"
    return IdRangeError(
        f"rank {rank}{when}: {'; '.join(refused)}; correct the data, raise num_rows, or set out_of_range to the row "
        "such ids should read"
    )
