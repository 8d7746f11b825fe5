"""Group exchange: what stays the same from batch to batch for one group of tables on one rank.

It has the group's rows (dense, or cached before a backing store), knows which rank owns each row, finds what a batch
needs, and updates rows by merged gradients. Transports bring rows and gradients.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.counters import GroupCounters
from rowmesh.dynamic.asking import Asked, largest
from rowmesh.errors import IdRangeError, NoRoomError
from rowmesh.exchange.route import (
    AnyRouteGroup,
    DeviceRouteGroup,
    Found,
    HostRouteGroup,
    RouteGroup,
    refused_ids,
    table_bounds,
)
from rowmesh.faults import reach
from rowmesh.mesh.channel import Wire
from rowmesh.ops.look_up import HostLookUp, HostLookUps
from rowmesh.ops.look_up.device import DeviceLookUps
from rowmesh.ops.look_up.slots import SlotFinder, UniqueIds
from rowmesh.ops.memory import Buffer, Memory, array_at, held_bytes
from rowmesh.ops.merge_update import DeviceMerged, HostMerged, Merged, Merger
from rowmesh.ops.merge_update.sources import Sources
from rowmesh.ops.pool import DESCRIPTOR
from rowmesh.ops.pool.handles import Bags
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.transfer import upload
from rowmesh.ops.window import place_own
from rowmesh.optim.rules import Update
from rowmesh.placement import AddressMap
from rowmesh.placement.address_map import COPIES
from rowmesh.placement.places import SlotTables
from rowmesh.sparse import SparseBatch
from rowmesh.tables import CachedArena, DenseArena, PinnedRows, TableGroup
from rowmesh.tables.cores import CoreArena
from rowmesh.tables.dense import compute_dtype

if TYPE_CHECKING:
    from rowmesh.exchange.replica_rows import ReplicatedMeans, ReplicatedSums


def never() -> bool:
    """May not wait: no other batch unpins rows meanwhile where look-ups and updates take turns."""
    return False


class GroupExchange:
    """One group of tables on one rank.

    Args:
        group: the tables.
        address_map: where rows are asked for.
        arena: the rows of this rank; or cores, from which rows are computed where they are looked up.
        device: whose kernels look rows up; None: the host's.
        allocate: on the host, makes memory for send buffers.
        asks_owners: on a device, whether rows that every rank has are asked for at their owners, which add gradients up
            for all. Else they are at one more destination, W, which stands for all ranks.
        wire_dtype: how rows and gradients travel between ranks, where that is narrower than they are.

    Attributes:
        row_wire, gradient_wire: the same, for each.
        is_tiered: whether rows must be brought into fast memory before they are read.
        is_dynamic: whether rows are frames that ids are given.
        lane_kinds: kinds of rows that devices ask for apart from each other; the first is "direct".
        num_destinations: where devices ask for rows: the ranks, and perhaps that one.
        features: name and table of each.
        copies: the segments of rows with copies.
        arenas: int64 `[W]`: where rows of each rank can be read in place; set by the transport.
        look_ups: what is found of batches.
        merger: on the host, merged requests of all ranks.
        replicated: keeps replicas together, where there are any.
        is_frozen: whether rows are looked up and not updated; `freeze` sets it.
        sums_gradients: whether backward sums their gradients: on a device also those of frozen rows, for nothing.
        comes_early: whether cached rows begin to come when a batch is routed; false while a pipeline says when.
    """

    def __init__(
        self,
        group: TableGroup,
        address_map: AddressMap,
        arena: DenseArena | CachedArena | CoreArena,
        device: torch.device | None = None,
        allocate: Callable[[int], Memory] = Buffer,
        *,
        asks_owners: bool = True,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        self.group, self.address_map, self.device = group, address_map, device
        # Typed as what all but `CoreGroup` find here, which has the cores itself.
        self.arena: DenseArena | CachedArena = arena  # pyright: ignore[reportAttributeAccessIssue]
        self.rank, self.world_size = address_map.rank, address_map.plan.world_size
        self.num_segments = address_map.num_segments
        self.is_tiered, self.comes_early = isinstance(arena, CachedArena), True
        self.is_dynamic = group.storage == "dynamic"
        self.copies = address_map.segments(COPIES)
        self.lane_kinds = ("direct", *(kind for kind in address_map.kinds if kind != "direct"))
        self.features = [(name, table) for table in group.tables for name in table.features]
        self.row_bytes = group.dim * group.dtype.itemsize
        self.gradient_bytes = group.dim * compute_dtype(group.dtype).itemsize
        self.row_wire, self.gradient_wire = (
            Wire(dtype, wire_dtype) if wire_dtype is not None and wire_dtype.itemsize < dtype.itemsize else None
            for dtype in (group.dtype, compute_dtype(group.dtype))
        )
        self.freeze(is_frozen=group.tables[0].frozen)
        self.replicated: ReplicatedSums | ReplicatedMeans | None = None
        self.counters = GroupCounters(group.name, tables=tuple(table.name for table in group.tables), device=device)
        self.num_destinations = self.world_size
        self.arenas = np.zeros(self.world_size, np.int64)
        self._counting = threading.Lock()
        if device is None:
            self.arenas[self.rank] = arena.address
            self.merger = Merger(self.num_segments, arena.address, self.row_bytes)
            self.look_ups = self._make_look_ups(allocate)
        else:
            self.look_ups = self._make_device_look_ups(device, asks_owners, isinstance(arena, CoreArena))

    def _make_look_ups(self, allocate: Callable[[int], Memory]) -> HostLookUps:
        tables = np.repeat(np.arange(len(self.group.tables)), [len(table.features) for table in self.group.tables])
        header = self.address_map.header(self.arenas.ctypes.data, self.row_bytes)
        shape = self.world_size, self.num_segments
        num_rows = [0] * len(self.group.tables) if self.is_dynamic else self.address_map.num_rows
        return HostLookUps(num_rows, tables, header, shape, self.group.dim, self.group.dtype, allocate)

    def _make_device_look_ups(self, device: torch.device, asks_owners: bool, is_computed: bool) -> DeviceLookUps:
        from rowmesh.ops.route.cuda import DeviceMap

        address_map, dtype = self.address_map, compute_dtype(self.group.dtype)
        if is_computed:
            return DeviceLookUps(None, dtype)
        assert set(address_map.kinds) <= {"direct", "node", "replicated"}
        is_apart = not asks_owners and "replicated" in address_map.kinds
        self.num_destinations += is_apart
        # One rank counts rows that all have, where they have no owners.
        self._slot_tables = SlotTables(address_map, device, without={"replicated"} if is_apart and self.rank else ())
        if self.is_tiered:
            numbered = [(number, table) for number, table in enumerate(self.group.tables) for _ in table.features]
            outside = [(n, 0 if table.out_of_range == "error" else table.out_of_range) for n, table in numbered]
            self._find_slots = SlotFinder(address_map.num_rows, outside, address_map.header(0, 0))
            self._unique_slots = UniqueIds([self.arena.num_slots], [0])
        device_map = DeviceMap.make(
            device,
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

    def freeze(self, *, is_frozen: bool) -> None:
        """Rows are looked up and not updated from now on, or are trained again."""
        self.is_frozen, self.sums_gradients = is_frozen, not is_frozen or self.device is not None

    @property
    def num_places(self) -> int:
        """Rows that fast memory has room for."""
        return self.arena.num_cached if isinstance(self.arena, CachedArena) else self.arena.num_slots

    @property
    def num_lent(self) -> int:
        """Routes that are under way."""
        return self.look_ups.num_lent

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, lent or idle; without the arena."""
        own = held_bytes(self.merger) if self.device is None else 0
        if self.device is not None and self.is_tiered:
            own += self._find_slots.num_bytes + self._unique_slots.num_bytes
        return own + self.look_ups.num_bytes

    def route(self, batch: SparseBatch, layout: GroupLayout, inverse: int) -> HostRouteGroup:
        """Routes one group's ids on the host.

        Args:
            batch: whose ids they are of.
            layout: where they are.
            inverse: address of uint32 `[N]`: where the inverse goes.

        Raises:
            IdRangeError: an id is not a row of its table and the table's policy is to refuse it.
        """
        look_ups, look_up = self._take_look_up()
        ids = batch.ids
        try:
            is_found = look_ups.find(look_up, ids, layout, inverse)
            reach("route.found_unique")
            if not is_found:
                is_found = look_ups.find(look_up, self._mapped(ids, layout), layout, inverse)
                assert is_found
        except BaseException:  # peers know this send buffer: it must not be lost
            look_ups.give_back(look_up)
            raise
        return self._routed(look_up, layout)

    def _take_look_up(self) -> tuple[HostLookUps, HostLookUp]:
        look_ups = self.look_ups
        assert isinstance(look_ups, HostLookUps)
        try:
            return look_ups, look_ups.idle.pop()
        except IndexError:  # asking before would not do: another thread may take the last one
            return look_ups, look_ups.make()

    def _routed(self, look_up: HostLookUp, layout: GroupLayout) -> HostRouteGroup:
        counters = self.counters
        with self._counting:
            counters.routes += 1
            counters.ids += layout.num_ids
            counters.unique_ids += look_up.num_unique
        return RouteGroup(self, layout, look_up)

    # The same of dynamic tables, whose ids become frames in between

    def find_unique(self, batch: SparseBatch, layout: GroupLayout, inverse: int) -> Found:
        """Finds the distinct ids; what is returned goes to `place`, or to `drop`. Arguments as for `route`."""
        look_ups, look_up = self._take_look_up()
        try:
            unique = look_ups.find_unique(look_up, batch.ids, layout, inverse)
        except BaseException:
            look_ups.give_back(look_up)
            raise
        number = int(unique.offsets[-1])
        ids, counts = array_at(unique.ids, np.int64, number), array_at(look_up.counts, np.uint32, number)
        asked = Asked(ids, unique.offsets, counts, self.is_frozen)
        if batch.scores is not None:
            which, given = array_at(inverse, np.uint32, batch.ids.numel()), batch.scores.numpy()
            parts = [slice(*bounds) for bounds in layout.features[:, :2].tolist()]
            given, which = (np.concatenate([each[:0], *(each[part] for part in parts)]) for each in (given, which))
            asked.scores = largest(given, which, number)
        return Found(look_up, unique, asked)

    def place(self, found: Found, batch: SparseBatch, layout: GroupLayout, inverse: int) -> HostRouteGroup:
        """Routes what `find_unique` found, which is frames now."""
        look_ups, look_up = self.look_ups, found.look_up
        assert isinstance(look_ups, HostLookUps)
        try:
            if found.asked.is_distinct:
                is_found = look_ups.place(look_up, found.unique, inverse, batch.ids.numel())
            else:  # ids share a frame
                frames = torch.from_numpy(self._frames(found.asked.ids, layout, inverse, batch.ids.numel()))
                look_ups.drop_unique(found.unique)
                is_found = look_ups.find(look_up, frames, layout, inverse)
            assert is_found
        except BaseException:  # peers know this send buffer: it must not be lost
            look_ups.give_back(look_up)
            raise
        return self._routed(look_up, layout)

    def drop(self, found: Found) -> None:
        """What `find_unique` found is of no use."""
        assert isinstance(self.look_ups, HostLookUps)
        self.look_ups.drop_unique(found.unique)
        self.look_ups.give_back(found.look_up)

    @staticmethod
    def _frames(frames: np.ndarray, layout: GroupLayout, inverse: int, num_ids: int) -> np.ndarray:
        """The frame of each id of the batch that is of the group."""
        taken = np.zeros(num_ids, np.int64)
        which = array_at(inverse, np.uint32, num_ids)
        for begin, end in layout.features[:, :2].tolist():
            taken[begin:end] = frames[which[begin:end]]
        return taken

    def nothing(self) -> HostRouteGroup:
        """The group's part of a route that asks for no row."""
        _, look_up = self._take_look_up()
        look_up.take_nothing()
        return RouteGroup(self, GroupLayout(np.zeros((0, DESCRIPTOR), np.int64), 0, False), look_up)

    def _mapped(self, ids: Tensor, layout: GroupLayout) -> Tensor:
        """The ids with those outside their table mapped as its policy says; the slow path, counted by feature."""
        ids = ids.clone()
        refused: list[str] = []
        bounds = layout.features[:, :2].tolist()
        for (name, table), (begin, end) in zip(self.features, bounds, strict=True):
            part = ids[begin:end]
            outside = (part < 0) | (part >= table.num_rows)
            if not (count := int(outside.sum())):
                continue
            with self._counting:
                self.counters.count_outside(name, count)
            if table.out_of_range == "error":
                refused.append(refused_ids(name, table, part))
            else:
                part[outside] = table.out_of_range
        if refused:
            raise IdRangeError("; ".join(refused))
        return ids

    def route_on_device(self, ids: Tensor, offsets: Tensor, layout: GroupLayout, bags: Bags | None) -> DeviceRouteGroup:
        """Routes one group's ids on the device; arguments as for `DeviceLookUps.find`."""
        assert isinstance(self.look_ups, DeviceLookUps)
        self.counters.routes += 1
        self.counters.ids += ids.numel()
        look_up = self.look_ups.find(ids, offsets, layout, bags)
        if self.group.storage != "tensor_train":
            look_up.source = self.arena.rows
        return RouteGroup(self, layout, look_up)

    # Rows that must be brought into fast memory before they are read

    def start_prefetch(self, group: DeviceRouteGroup, batch: SparseBatch) -> None:
        """On a rank alone, cached rows of a batch on a device begin to come; if there is no room yet, at the fetch."""
        if not self.is_tiered or self.world_size > 1:
            return
        look_up = group.look_up
        look_up.wanted = self._find_slots(batch.ids.numpy(), group.layout)
        look_up.num_unique = len(look_up.wanted)
        if self.comes_early:
            with contextlib.suppress(NoRoomError):
                self.retrieve(group, never)

    def retrieve(self, group: DeviceRouteGroup, may_wait: Callable[[], bool]) -> None:
        """Has the rows come that a rank alone asked for on a device; blocks until they are read from the store.

        Args:
            group: of a route.
            may_wait: whether other batches may unpin rows meanwhile.

        Raises:
            NoRoomError: they do not fit into fast memory beside those of other batches.
        """
        assert isinstance(self.arena, CachedArena)
        if group.pinned is None or not group.pinned.is_pinned:
            group.pinned = self.arena.pin(group.look_up.wanted, may_wait)

    def prefetch(self, group: AnyRouteGroup) -> None:
        """Makes sure that a rank alone finds the rows that it asked for in fast memory.

        Raises:
            NoRoomError: they do not fit into fast memory.
        """
        if not self.is_tiered:
            return
        if self.device is None:
            sources = self.sources()
            self.add_own(sources, group)
            sources.merge()
            group.pin(self.pin(self.merger))
            self.place_own(group, self.merger, 0)
        else:
            self.retrieve(group, never)
            assert group.pinned is not None
            group.pinned.ready()
            group.look_up.slots = self._upload(group.pinned.cache_slots)

    def pin(self, merged: HostMerged, may_wait: Callable[[], bool] = never) -> PinnedRows | None:
        """Makes sure that merged rows are in fast memory of the host, and keeps them there; None where all are.

        Args:
            merged: the rows.
            may_wait: whether other batches may unpin rows meanwhile.
        """
        if not isinstance(self.arena, CachedArena):
            return None
        return self.arena.pin(merged.slots.copy(), may_wait)

    def place_own(self, group: HostRouteGroup, merged: HostMerged, begin: int) -> None:
        """Says where pinned rows are that this rank asked itself for, the entries from `begin` on."""
        look_up = group.look_up
        first, end = look_up.bounds[self.rank : self.rank + 2]
        assert group.pinned is not None
        place_own(
            group.pinned.cache_slots.ctypes.data,
            merged.heads,
            merged.nexts,
            merged.num_merged,
            begin,
            begin + end - first,
            look_up.uniques + 4 * first,
            self.arena.address,
            self.row_bytes,
            look_up.addresses,
        )

    def pin_requested(self, slots: Tensor) -> tuple[Tensor, PinnedRows | None]:
        """Brings rows that ranks asked this one for into a device's memory; the host waits until it knows which.

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

    def unpin_updated(self, pinned: Sequence[PinnedRows | None]) -> None:
        """Rows on a device were updated and may leave fast memory."""
        for rows in pinned:
            if rows is not None:
                rows.note_use()
                rows.unpin(changed=True)

    def _upload(self, cache_slots: np.ndarray) -> Tensor:
        assert self.device is not None
        return upload(torch.from_numpy(cache_slots.view(np.int32)), self.device)

    # Updates

    def apply(
        self, merged: Merged, update: Update, part: tuple[int, int] | None = None, num: int | None = None
    ) -> None:
        """Updates merged rows, as far as this rank's replica group knows.

        Args:
            merged: distinct slots, and the gradients for each.
            update: the optimizer's numbers.
            part: on the host, which of the rows: first and one past the last; default: all.
            num: on a device, how many rows there are, where the host knows it.
        """
        if self.is_frozen:
            return
        if self.replicated is not None:
            self.replicated.apply(merged, update, part, num=num)
        elif self.is_tiered and self.device is None:
            assert isinstance(self.arena, CachedArena)
            assert isinstance(merged, HostMerged)
            pinned = self.arena.pin(merged.slots.copy(), never)
            try:
                pinned.apply(merged, update.lr, update.scaling, update.step, part)
            finally:
                pinned.unpin(changed=True)
        else:
            self.arena.apply(merged, update.lr, update.scaling, update.step, part)

    def sources(self, merger: Merger | None = None) -> Sources:
        """Lists of requests to be merged on the host, by default by the group's merger."""
        return Sources(merger or self.merger, self.gradient_bytes, self.num_segments)

    def add_own(self, sources: Sources, group: HostRouteGroup, *, with_copies: bool = False) -> None:
        """Adds the requests that this rank makes of itself, and those of others about rows that have a copy here."""
        send, rank = group.look_up.send, self.rank
        sources.add(send.slots_address, send.segment_offsets[rank], send.gradients.address, send.accesses[rank])
        if with_copies:
            where = send.slots_address, send.segment_offsets, send.gradients.address
            sources.add_copied(*where, self.copies.start, rank)

    def update(self, sources: Sources, update: Update, num_segments: int | None = None) -> None:
        """Updates merged rows, of the first segments where a number is given."""
        merger = sources.merger
        part = None if num_segments is None else (0, int(merger.merged_offsets[num_segments]))
        self.apply(merger, update, part)

    def count_merged(self, sources: Sources, num_segments: int | None = None) -> None:
        """Counts what was asked of this rank, of the first segments where a number is given."""
        offsets = sources.merger.merged_offsets
        if num_segments is not None:
            offsets = np.minimum(offsets, offsets[num_segments])
        self.counters.count_tables(sources.accesses, offsets)

    def count_alone(self, group: DeviceRouteGroup) -> None:
        """Counts what a batch on a device asked for and is updated now, where no other batch or rank has a part."""
        self.counters.add_accesses(self.accesses(group))
        group.look_up.add_distinct(self.counters.distinct)

    def sizes_on_device(self, group: AnyRouteGroup) -> Tensor:
        """int64 `[2, W, S′]`: what a batch asks for, by destination and segment: distinct ids, and ids."""
        look_up = group.look_up
        if look_up.routed is not None:
            return look_up.found.sizes
        assert self.device is not None
        accesses = upload(torch.from_numpy(self.accesses(group)), self.device)
        distinct = torch.zeros_like(accesses)
        look_up.add_distinct(distinct)
        return torch.stack([distinct, accesses]).unsqueeze(1)

    def accesses(self, group: AnyRouteGroup) -> NDArray[np.int64]:
        """int64 `[S]`: ids that a batch has of each table."""
        return np.diff(table_bounds(self.group, group.layout))

    def count(self, accesses: NDArray[np.int64], merged: DeviceMerged, pinned: Sequence[PinnedRows | None]) -> None:
        """Counts what was asked of this rank on a device and is updated now.

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
