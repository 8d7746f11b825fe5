"""Group exchange of a device: kernels find what a batch needs, and the host learns numbers of it later, if at all.

The host knows which rows of tiered tables are in the device's memory, and brings the others before they are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.errors import NoRoomError
from rowmesh.exchange.group import GroupExchange, never
from rowmesh.exchange.route import RouteGroup, table_bounds
from rowmesh.ops.look_up.device import DeviceLookUp, DeviceLookUps
from rowmesh.ops.look_up.slots import SlotFinder, UniqueIds
from rowmesh.ops.merge_update import DeviceMerged
from rowmesh.ops.pool.handles import Bags
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.transfer import upload
from rowmesh.placement import AddressMap
from rowmesh.placement.drift import Traffic
from rowmesh.placement.places import SlotTables
from rowmesh.sparse import SparseBatch
from rowmesh.tables import CachedArena, DenseArena, PinnedRows, TableGroup
from rowmesh.tables.cores import CoreArena
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.update_rules import Update

DeviceRouteGroup = RouteGroup["DeviceGroupExchange", DeviceLookUp]


class DeviceGroupExchange(GroupExchange):
    """A group of tables on a rank, on a device.

    Args:
        group, address_map, arena, wire_dtype: as for `GroupExchange`.
        device: whose kernels look rows up.
        asks_owners: whether rows that every rank has are asked for at their owners, which add gradients up for all.
            Else they are at one more destination, W, which stands for all ranks.

    Attributes:
        lane_kinds: kinds of rows that are asked for apart from each other; the first is "direct".
        num_destinations: where rows are asked for: the ranks, and perhaps that one.
        comes_early: whether cached rows begin to come when a batch is routed; false while a pipeline says when.
    """

    look_ups: DeviceLookUps

    def __init__(
        self,
        group: TableGroup,
        address_map: AddressMap,
        arena: DenseArena | CachedArena | CoreArena,
        device: torch.device,
        *,
        asks_owners: bool = True,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, address_map, arena, device, wire_dtype)
        self._device = device
        self.comes_early = True
        self.lane_kinds = ("direct", *(kind for kind in address_map.kinds if kind != "direct"))
        self.num_destinations = self.world_size
        if isinstance(arena, CoreArena):
            self.look_ups = DeviceLookUps(None, compute_dtype(group.dtype))
        else:
            self.look_ups = self._make_look_ups(asks_owners)

    def _make_look_ups(self, asks_owners: bool) -> DeviceLookUps:
        from rowmesh.ops.route.cuda import DeviceMap

        address_map, dtype = self.address_map, compute_dtype(self.group.dtype)
        assert set(address_map.kinds) <= {"direct", "node", "replicated"}
        is_apart = not asks_owners and "replicated" in address_map.kinds
        self.num_destinations += is_apart
        # A single rank counts rows that all have, where they have no owners.
        without = {"replicated"} if is_apart and self.rank else ()
        self._slot_tables = SlotTables(address_map, self._device, without=without)
        if self.is_tiered:
            numbered = [(number, table) for number, table in enumerate(self.group.tables) for _ in table.features]
            outside = [(n, 0 if table.out_of_range == "error" else table.out_of_range) for n, table in numbered]
            self._find_slots = SlotFinder(address_map.num_rows, outside, address_map.header(0, 0))
            self._unique_slots = UniqueIds([self.arena.num_slots], [0])
        device_map = DeviceMap.make(
            self._device,
            address_map.ranges_without_owner("replicated") if is_apart else address_map.ranges,
            address_map.index,
            num_kinds=len(address_map.kinds),
            world_size=self.num_destinations,
            rank=self.rank,
            ranks_per_node=address_map.plan.ranks_per_node,
            key_stride=address_map.key_stride,
        )
        if device_map.is_alone and self.is_tiered:
            return DeviceLookUps(None, dtype)  # the host says where rows are
        return DeviceLookUps(device_map, dtype, self._slot_tables.count if device_map.is_alone else None)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, lent or idle; without the arena."""
        own = self._find_slots.num_bytes + self._unique_slots.num_bytes if self.is_tiered else 0
        return own + super().num_bytes

    def route(self, ids: Tensor, offsets: Tensor, layout: GroupLayout, bags: Bags | None) -> DeviceRouteGroup:
        """Routes one group's ids; arguments as for `DeviceLookUps.find`."""
        self.counters.add_route(ids.numel())
        look_up = self.look_ups.find(ids, offsets, layout, bags)
        if self.group.stores_rows:
            look_up.read_from(self.arena.rows)
        return RouteGroup(self, layout, look_up, self.look_ups.give_back)

    # Rows that must be brought into fast memory before they are read

    def start_prefetch(self, group: DeviceRouteGroup, batch: SparseBatch) -> None:
        """On a rank alone, cached rows of a batch begin to come; if there is no room yet, at the fetch."""
        if not self.is_tiered or self.world_size > 1:
            return
        look_up = group.look_up
        look_up.want(self._find_slots(batch.ids.numpy(), group.layout))
        if self.comes_early:
            with contextlib.suppress(NoRoomError):
                self.retrieve(group, never)

    def retrieve(self, group: DeviceRouteGroup, may_wait: Callable[[], bool]) -> None:
        """Has the rows come that a rank alone asked for; blocks until they are read from the store.

        Args:
            group: of a route.
            may_wait: whether other batches may unpin rows meanwhile.

        Raises:
            NoRoomError: they do not fit into fast memory beside those of other batches.
        """
        assert isinstance(self.arena, CachedArena)
        if group.pinned is None or not group.pinned.is_pinned:
            group.pin(self.arena.pin(group.look_up.wanted, may_wait))

    def prefetch(self, group: DeviceRouteGroup) -> None:
        """See `GroupExchange.prefetch`."""
        self.retrieve(group, never)
        assert group.pinned is not None
        group.pinned.ready()
        group.look_up.read_at(self._upload(group.pinned.cache_slots))

    def pin_requested(self, slots: Tensor) -> tuple[Tensor, PinnedRows | None]:
        """Brings rows that ranks asked this one for into the device's memory; the host waits until it knows which.

        Args:
            slots: int32 `[M]`.

        Returns:
            int32 `[M]`: where they are; and what keeps them there, where they could leave.
        """
        if not isinstance(self.arena, CachedArena):
            return slots, None
        asked = slots.cpu().numpy().view(np.uint32).astype(np.int64)
        unique, inverse, _ = self._unique_slots(asked, np.array([[0, len(asked)]]))
        pinned = self.arena.pin(unique.astype(np.uint32), never)
        pinned.ready()
        return self._upload(pinned.cache_slots[inverse]), pinned

    def let_come_early(self, *, comes_early: bool) -> None:
        """Has cached rows begin to come when a batch is routed, or when a pipeline says so."""
        self.comes_early = comes_early

    def _upload(self, cache_slots: np.ndarray) -> Tensor:
        return upload(torch.from_numpy(cache_slots.view(np.int32)), self._device)

    # Updates

    def update_alone(self, groups: Sequence[DeviceRouteGroup], update: Update) -> None:
        """See `GroupExchange.update_alone`."""
        from rowmesh.ops.merge.cuda import merge

        if not groups:
            return
        pinned = [group.pinned for group in groups]
        if len(groups) == 1:
            look_up = groups[0].look_up
            self.apply(look_up.take_gradients(), update, num=look_up.num_found)
            self.count_alone(groups[0])
        else:
            merged = merge(torch.cat([group.look_up.touched().valid_slots for group in groups]), most=len(groups))
            gradients = torch.cat([group.look_up.summed for group in groups])
            self.apply(merged.with_gradients(gradients), update)
            self.count(np.sum([self._accesses(group) for group in groups], axis=0), merged, pinned)
        self.unpin_updated(pinned)

    def unpin_updated(self, pinned: Sequence[PinnedRows | None]) -> None:
        """Rows were updated and may leave fast memory."""
        for rows in pinned:
            if rows is not None:
                rows.note_use()
                rows.unpin(changed=True)

    # Requests are counted

    def count(self, accesses: NDArray[np.int64], merged: DeviceMerged, pinned: Sequence[PinnedRows | None]) -> None:
        """Counts what was asked of this rank and is updated now.

        Args:
            accesses: int64 `[S]`: ids.
            merged: the rows.
            pinned: what keeps them in the device's memory, where they could leave it.
        """
        self.counters.add_accesses(accesses)
        if self.is_tiered:  # merged are cache slots; the host knows the slots
            slots = [rows.slots for rows in pinned if rows is not None]
            self.counters.add_distinct(self._slot_tables.count_here(np.unique(np.concatenate(slots))))
        else:
            self._slot_tables.count(merged, self.counters.distinct)

    def count_alone(self, group: DeviceRouteGroup) -> None:
        """See `GroupExchange.count_alone`."""
        self.counters.add_accesses(self._accesses(group))
        group.look_up.add_distinct(self.counters.distinct)

    def _count_into(self, group: DeviceRouteGroup, traffic: Traffic) -> None:
        look_up = group.look_up
        if look_up.routed is not None:
            sizes = look_up.found.sizes
        else:
            accesses = upload(torch.from_numpy(self._accesses(group)), self._device)
            distinct = torch.zeros_like(accesses)
            look_up.add_distinct(distinct)
            sizes = torch.stack([distinct, accesses]).unsqueeze(1)
        traffic.add_on_device(self.address_map, sizes)  # the host learns it when that is taken

    def _accesses(self, group: DeviceRouteGroup) -> NDArray[np.int64]:
        """int64 `[S]`: ids that a batch has of each table."""
        return np.diff(table_bounds(self.group, group.layout))
