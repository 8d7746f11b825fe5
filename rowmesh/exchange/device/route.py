"""Device route: which rows a batch needs and who owns them, found on a device and left there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.exchange.device.counters import DeviceCounters, SlotTables
from rowmesh.exchange.layout import GroupLayout
from rowmesh.exchange.route import Route, RoutePart, refused_ids
from rowmesh.exchange.router import refusal
from rowmesh.exchange.update import Update
from rowmesh.placement import AddressMap
from rowmesh.placement.address_map import FLAGS, REPLIES
from rowmesh.placement.drift import Traffic
from rowmesh.sparse import SparseBatch
from rowmesh.tables import CachedArena, DenseArena, PinnedRows, TableGroup

if TYPE_CHECKING:
    from rowmesh.exchange.device.lane import Requests
    from rowmesh.ops.merge_update.cuda import Merged
    from rowmesh.ops.pool.cuda import Bags, FiledCells
    from rowmesh.ops.route.cuda import Routed
    from rowmesh.ops.segment_unique.cuda import Unique


class DevicePooledGroup:
    """One group's part of a route, as pooling sees it; tensors are on the device.

    Attributes:
        exchange: the group's.
        layout: where each feature's ids and vectors are.
        bags: the same, as kernels read it.
        unique: the distinct ids of each table.
        num_unique: how many there are where the host knows it, else as many as there could be.
        num_found: how many there are, once somebody looked.
        recover: int32 `[N]`: which of the fetched rows each id reads.
        source: what is read, `[R, D]`; there when rows are fetched.
        slots: int32 `[num_unique]`: which rows of `source` were fetched; None where all, in their order.
        order: int32 `[num_unique]`: which unique id each fetched row is of; None where they stand in their order.
        filed: the cells that every row went into, for the backward.
        gradients: `[num_unique, D]` of the rows, in the order in which they were asked for.
    """

    source: Tensor

    def __init__(
        self, exchange: DeviceGroupExchange, layout: GroupLayout, bags: Bags | None, unique: Unique
    ) -> None:  # fmt: skip
        self.exchange, self.layout, self.bags, self.unique = exchange, layout, bags, unique
        self.num_unique, self.recover = layout.num_ids, unique.inverse
        self.num_found: int | None = None
        self.slots: Tensor | None = None
        self.order: Tensor | None = None
        self.filed: FiledCells | None = None
        self.gradients: Tensor | None = None
        exchange.num_lent += 1

    @property
    def summed(self) -> Tensor:
        """The gradients, which are there after the backward."""
        assert self.gradients is not None
        return self.gradients

    def count_into(self, traffic: Traffic) -> None:
        """Adds what is asked of ranks to counted traffic: nothing, where rows are computed."""

    def let_go(self) -> None:
        """Rows that the current stream has read may leave fast memory: none is held."""

    def release(self) -> None:
        """The route is gone."""
        self.exchange.num_lent -= 1


class DeviceRouteGroup(DevicePooledGroup):
    """One group's part of a route whose rows are asked for where they are.

    Attributes:
        routed: where each unique id is asked for, sorted.
        wanted: uint32 `[U]`: slots, where the host finds them (tiered tables on one rank).
        held: keeps them in fast memory.
        source: rows that were fetched, or those of the arena.
        uniques: int32 `[num_unique]`: for which unique id each row is asked.
        lanes: what is asked of the ranks, lane by lane, where there are several.
    """

    exchange: DeviceExchange

    def __init__(
        self, exchange: DeviceExchange, layout: GroupLayout, bags: Bags | None, unique: Unique, routed: Routed
    ) -> None:  # fmt: skip
        super().__init__(exchange, layout, bags, unique)
        self.routed, self.source = routed, exchange.arena.rows
        self.slots, self.uniques = routed.keys, routed.uniques
        self.lanes: list[Requests] = []
        self.wanted = np.empty(0, np.uint32)
        self.held: PinnedRows | None = None

    @property
    def places(self) -> Tensor:
        """int32 `[num_unique]`: where rows that need not travel are in the arena."""
        assert self.slots is not None
        return self.slots

    def count_into(self, traffic: Traffic) -> None:
        """Adds what is asked for to counted traffic; the host learns it when that is taken."""
        traffic.add_on_device(self.exchange.address_map, self.routed.sizes[1:])

    @property
    def _all_held(self) -> list[PinnedRows]:
        """What keeps rows in fast memory: what this rank asked for, alone, or was asked for."""
        return [held for held in (self.held, *(each.held for each in self.lanes)) if held is not None]

    def let_go(self) -> None:
        """Rows that the current stream has read may leave fast memory."""
        for held in self._all_held:
            held.note_use()
            held.unpin()

    def release(self) -> None:
        """The route is gone; rows that it holds may leave fast memory."""
        super().release()
        for held in self._all_held:
            held.unpin()

    @property
    def sent(self) -> list[int]:
        """Keys for each rank, of rows that travel."""
        return self.lanes[0].sent

    @property
    def asked(self) -> list[int]:
        """Keys from each rank, of rows that travel."""
        return self.lanes[0].asked

    @property
    def requests(self) -> Tensor:
        """Int32 `[M]`: their slots, in the order of the ranks."""
        return self.lanes[0].slots

    @requests.setter
    def requests(self, slots: Tensor) -> None:
        self.lanes[0].slots = slots


class DeviceRoute(Route):
    """What a batch needs.

    Attributes:
        outside: int64 `[F]` on the device: ids of each feature that were no rows of its table.
        refused: int64 `[1]` on the device: how many of them are not to be mapped.
    """

    groups: list[DeviceRouteGroup]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self, batch: SparseBatch, groups: list[DeviceRouteGroup], outside: Tensor, refused: Tensor,
        moment: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(batch, groups, None, _keep_nothing)  # pyright: ignore[reportArgumentType]
        self.outside, self.refused, self._moment = outside, refused, moment
        self._is_checked = False

    def check_ids(self, outside: Sequence[int], rank: int) -> None:
        """Counts ids that were mapped, and refuses the batch where a table says so; once, whoever looks first.

        Args:
            outside: what is on the device, when the host knows it.
            rank: this one, for the message.

        Raises:
            IdRangeError: an id is not a row of its table and the table's policy is to refuse it.
        """
        if self._is_checked or not any(outside):
            return
        self._is_checked = True
        refused, count = [], iter(outside)
        for group in self.groups:
            features, bounds = group.exchange.features, group.layout.features[:, :2].tolist()
            for (name, table), (begin, end) in zip(features, bounds, strict=True):
                if not (number := next(count)):
                    continue
                found = group.exchange.counters.out_of_range
                found[name] = found.get(name, 0) + number
                if table.out_of_range == "error":
                    refused.append(refused_ids(name, table, self.batch.ids[begin:end]))
        if refused:
            raise refusal(rank, refused, self._moment)


def table_bounds(group: TableGroup, layout: GroupLayout) -> list[int]:
    """Where the ids of each table begin, counted from the group's first, and where the last one's end."""
    lengths = iter((layout.features[:, 1] - layout.features[:, 0]).tolist())
    return list(accumulate((sum(next(lengths) for _ in table.features) for table in group.tables), initial=0))


def places_in(order: Tensor) -> Tensor:
    """int32: where in an order of 0 … n − 1 each number stands.

    >>> places_in(torch.tensor([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    places = torch.arange(order.numel(), dtype=torch.int32, device=order.device)
    return torch.empty_like(places).scatter_(0, order.to(torch.int64), places)


def _keep_nothing(_: None) -> None:
    """Buffers are torch's."""


class DeviceRoutePart(RoutePart):
    """Some groups of a route, which it keeps."""

    __slots__ = ("_route",)

    groups: list[DeviceRouteGroup]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, route: DeviceRoute, indices: Sequence[int]) -> None:
        super().__init__(route, indices)
        self._route = route

    @property
    def outside(self) -> Tensor:
        """Of the whole route."""
        return self._route.outside

    @property
    def refused(self) -> Tensor:
        """Of the whole route."""
        return self._route.refused

    def check_ids(self, outside: Sequence[int], rank: int) -> None:
        """Of the whole route."""
        self._route.check_ids(outside, rank)


class DeviceGroupExchange:
    """What stays the same from batch to batch for one group, wherever its rows come from.

    Args:
        group: the tables.
        address_map: of their rows.
        device: where.
    """

    is_tiered = False

    def __init__(self, group: TableGroup, address_map: AddressMap, device: torch.device) -> None:
        from rowmesh.ops.segment_unique.cuda import segment_unique

        self.group, self.address_map, self.device = group, address_map, device
        self.counters = DeviceCounters(group.name, [table.name for table in group.tables], device)
        self.features = [(name, table) for table in group.tables for name in table.features]
        self.num_lent = 0
        self._segment_unique = segment_unique

    @property
    def num_bytes(self) -> int:
        """Memory of buffers: torch's allocator has them."""
        return 0

    def prefetch(self, group: Any, batch: SparseBatch) -> None:
        """A batch is routed: rows that are not in the device's memory may begin to come. All are there."""

    def unique(self, ids: Tensor, offsets: Tensor) -> Unique:
        """The unique ids of a batch, table by table; counts it.

        Args:
            ids: int64 `[N]`, all of them rows, a table's after the other's.
            offsets: int64 `[S + 1]`: where those of each table begin.
        """
        self.counters.routes += 1
        self.counters.ids += ids.numel()
        return self._segment_unique(ids, offsets)

    def count_alone(self, group: DevicePooledGroup) -> None:
        """Counts what a batch asked for, which is updated now, where no other batch or rank has a part in that."""
        self.counters.add_accesses(self.accesses(group))
        self.counters.distinct += group.unique.offsets.diff()

    def accesses(self, group: DevicePooledGroup) -> NDArray[np.int64]:
        """int64 `[S]`: ids that a batch has of each table."""
        return np.diff(table_bounds(self.group, group.layout))


class DeviceUpdater(Protocol):
    """What happens to merged rows, where it is not simply their update; see `DeviceExchange.apply`."""

    def apply(
        self, merged: Merged, update: Update, part: tuple[int, int] | None = None, *, num: int | None = None
    ) -> None: ...


class DeviceExchange(DeviceGroupExchange):
    """What stays the same for a group whose rows are in arenas; what `GroupExchange` is on a CPU.

    Args:
        group: the tables.
        address_map: of rows that travel in one hop, or have copies.
        arena: the rows of this rank.
        asks_homes: whether rows that every rank has are asked for at their homes, which add gradients up for all. Else
            it is at one more stop, W, which stands for all ranks.

    Attributes:
        lane_kinds: kinds of rows that are asked for apart from each other; the first is "direct".
        num_stops: where rows are asked for: ranks, and perhaps that one.
        replicated: keeps replicas together, where there are any.
    """

    def __init__(
        self, group: TableGroup, address_map: AddressMap, arena: DenseArena | CachedArena, *,
        asks_homes: bool = True,
    ) -> None:  # fmt: skip
        from rowmesh.ops.route import cuda as route

        assert set(address_map.kinds) <= {"direct", "node", "replicated"}
        device = arena.device
        super().__init__(group, address_map, device)
        self.rank, self.world_size = address_map.rank, address_map.plan.world_size
        self.num_segments = address_map.num_segments
        self.lane_kinds = ("direct", *(kind for kind in address_map.kinds if kind != "direct"))
        self.replicated: DeviceUpdater | None = None
        self.arena = arena
        self._route = route
        is_apart = not asks_homes and "replicated" in address_map.kinds
        self.num_stops = self.world_size + is_apart
        self._map = route.DeviceMap.make(
            device, address_map.apart("replicated") if is_apart else address_map.ranges,
            address_map.index, address_map.num_rows,
            num_kinds=len(address_map.kinds), num_replying=len(set(address_map.kinds) & REPLIES),
            world_size=self.num_stops, rank=self.rank,
            ranks_per_node=address_map.plan.ranks_per_node, key_stride=address_map.key_stride,
        )  # fmt: skip
        self._flags = torch.tensor([FLAGS[kind] for kind in address_map.kinds], dtype=torch.int64, device=device)
        # One rank counts rows that all have, where they have no homes.
        self._slot_tables = SlotTables(address_map, device, without={"replicated"} if is_apart and self.rank else ())

    def bring(self, group: DeviceRouteGroup) -> None:
        """Makes sure that rows of a rank without others are in the device's memory: all are there."""

    def hold(self, slots: Tensor) -> tuple[Tensor, PinnedRows | None]:
        """Where the rows of requested slots are, and what keeps them there, where they could leave."""
        return slots, None

    def give_up(self, held: Sequence[PinnedRows | None]) -> None:
        """Rows that were held are updated."""

    def apply(self, merged: Merged, gradients: Tensor, update: Update, num: int | None = None) -> None:
        """Updates merged rows, as far as this rank's replica group knows.

        Args:
            merged: distinct slots, and which gradients are for each.
            gradients: `[M, D]`, in the order of the requests.
            update: the optimizer's numbers.
            num: how many slots, where the host knows it.
        """
        if self.replicated is None:
            self.arena.apply(merged.with_gradients(gradients), update.lr, update.scaling, update.step)
        else:
            self.replicated.apply(merged.with_gradients(gradients), update, num=num)

    def count(self, accesses: NDArray[np.int64], merged: Merged, held: Sequence[PinnedRows | None]) -> None:
        """Counts what was asked of this rank and is updated now.

        Args:
            accesses: int64 `[S]`: ids.
            merged: the rows.
            held: what keeps them in the device's memory, where they could leave it.
        """
        self.counters.add_accesses(accesses)
        self._count_distinct(merged, held)

    def _count_distinct(self, merged: Merged, held: Sequence[PinnedRows | None]) -> None:
        self._slot_tables.count(merged, self.counters)

    def route(self, ids: Tensor, offsets: Tensor, layout: GroupLayout, bags: Bags | None) -> DeviceRouteGroup:
        """Routes one group's ids.

        Args:
            ids: int64 `[N]`, all of them rows, a table's after the other's.
            offsets: int64 `[S + 1]`: where those of each table begin.
            layout: of the group's features.
            bags: the same for kernels; None where there is none.
        """
        unique = self.unique(ids, offsets)
        routed = self._route.route(self._map, self._flags, unique.unique, unique.offsets, unique.counts)
        return DeviceRouteGroup(self, layout, bags, unique, routed)
