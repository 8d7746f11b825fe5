"""Group exchange of the host: what a batch needs is found and placed at once, and rows have addresses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.errors import IdRangeError
from rowmesh.exchange.group import GroupExchange, never
from rowmesh.exchange.replica_rows import ReplicatedMeans, ReplicatedSums
from rowmesh.exchange.resolve.asking import Asked, largest
from rowmesh.exchange.route import Route, RouteGroup, refused_ids
from rowmesh.ops.look_up import HostLookUp, HostLookUps, UniqueIds
from rowmesh.ops.memory import Buffer, Memory, array_at, held_bytes
from rowmesh.ops.merge_update import HostMerged, Merged, Merger
from rowmesh.ops.merge_update.sources import Sources
from rowmesh.ops.pool import DESCRIPTOR
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.window import place_own
from rowmesh.placement import AddressMap
from rowmesh.placement.address_map import COPIES
from rowmesh.placement.drift import Traffic
from rowmesh.sparse import SparseBatch
from rowmesh.tables import CachedArena, DenseArena, PinnedRows, TableGroup
from rowmesh.tables.cores import CoreArena
from rowmesh.tables.update_rules import Update

HostRouteGroup = RouteGroup["HostGroupExchange", HostLookUp]


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


class HostGroupExchange(GroupExchange):
    """A group of tables on one rank, in the host's memory.

    Args:
        group, address_map, arena, wire_dtype: as for `GroupExchange`.
        allocate: makes memory for send buffers.

    Attributes:
        copies: the segments of rows with copies.
        arenas: int64 `[W]`: where rows of each rank can be read in place; 0 where they cannot.
        merger: merged requests of all ranks.
    """

    look_ups: HostLookUps
    kind: type[HostLookUp] = HostLookUp

    def __init__(
        self,
        group: TableGroup,
        address_map: AddressMap,
        arena: DenseArena | CachedArena | CoreArena,
        allocate: Callable[[int], Memory] = Buffer,
        *,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, address_map, arena, None, wire_dtype)
        self.copies = address_map.segments(COPIES)
        self.arenas = np.zeros(self.world_size, np.int64)
        self.arenas[self.rank] = arena.address
        self.merger = Merger(self.num_segments, arena.address, self.row_bytes)
        tables = np.repeat(np.arange(len(group.tables)), [len(table.features) for table in group.tables])
        header = address_map.header(self.arenas.ctypes.data, self.row_bytes)
        shape = self.world_size, self.num_segments
        num_rows = [0] * len(group.tables) if self.is_dynamic else address_map.num_rows
        self.look_ups = HostLookUps(num_rows, tables, header, shape, group.dim, group.dtype, allocate, self.kind)
        self._counting = threading.Lock()
        self._held: PinnedRows | None = None  # rows that the update under way changes
        self._alone: Sources | None = None  # what it merged, where no other rank has a part

    @property
    def num_places(self) -> int:
        """Rows that fast memory has room for."""
        return len(self.arena.rows)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, lent or idle; without the arena."""
        return held_bytes(self.merger) + super().num_bytes

    def read_in_place(self, addresses: Mapping[int, int]) -> None:
        """From now on reads rows of other ranks in place.

        Args:
            addresses: of the arena of each, mapped here.
        """
        for rank, address in addresses.items():
            self.arenas[rank] = address
        self.look_ups.read_in_place()

    # Batches are routed

    def route(
        self, batch: SparseBatch, layout: GroupLayout, inverse: int, *, sends_rows: bool = False
    ) -> HostRouteGroup:
        """Routes one group's ids.

        Args:
            batch: whose ids they are of.
            layout: where they are.
            inverse: address of uint32 `[N]`: where the inverse goes.
            sends_rows: whether rows must travel, whatever the plan says.

        Raises:
            IdRangeError: an id is not a row of its table and the table's policy is to refuse it.
        """
        look_up, unique = self.look_ups.find_unique(batch.ids, layout, inverse)
        if not look_up.place(unique, inverse, batch.ids.numel()):
            mapped = batch.with_ids(self._mapped(batch.ids, layout))
            return HostGroupExchange.route(self, mapped, layout, inverse)
        self._place_copies(look_up)
        with self._counting:
            self.counters.add_route(layout.num_ids, look_up.num_unique)
        return RouteGroup(self, layout, look_up, self.look_ups.give_back)

    def _place_copies(self, look_up: HostLookUp) -> None:
        """Says where the copies of a tiered table are, which stay in fast memory and are read without a request."""
        if not self.copies or not isinstance(self.arena, CachedArena):
            return
        send, count = look_up.send, look_up.num_unique
        offsets = send.segment_offsets[:, [self.copies.start, self.copies.stop]].tolist()
        positions = np.concatenate([np.arange(*bounds) for bounds in offsets])
        slots = send.lists.array(np.uint32, count, offset=send.slots_offset)[positions]
        places = self.arena.kept_places[np.searchsorted(self.arena.kept, slots)].astype(np.int64)
        uniques = array_at(look_up.uniques, np.uint32, count)[positions]
        array_at(look_up.addresses, np.int64, count)[uniques] = self.arena.address + self.row_bytes * places

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

    def count_bags(self, num_ids: int) -> None:
        """Counts ids of a batch whose sums travel."""
        with self._counting:
            self.counters.add_ids(num_ids)

    def nothing(self) -> HostRouteGroup:
        """The group's part of a route that asks for no row."""
        look_up = self.look_ups.take_nothing()
        layout = GroupLayout(np.zeros((0, DESCRIPTOR), np.int64), 0, False)
        return RouteGroup(self, layout, look_up, self.look_ups.give_back)

    # The same of dynamic tables, whose ids become frames in between

    def find_unique(self, batch: SparseBatch, layout: GroupLayout, inverse: int) -> Found:
        """Finds the distinct ids; what is returned goes to `place`, or to `drop`. Arguments as for `route`."""
        look_up, unique = self.look_ups.find_unique(batch.ids, layout, inverse)
        number = int(unique.offsets[-1])
        ids, counts = array_at(unique.ids, np.int64, number), array_at(look_up.counts, np.uint32, number)
        scores = None
        if batch.scores is not None:
            which, given = array_at(inverse, np.uint32, batch.ids.numel()), batch.scores.numpy()
            parts = [slice(*bounds) for bounds in layout.features[:, :2].tolist()]
            given, which = (np.concatenate([each[:0], *(each[part] for part in parts)]) for each in (given, which))
            scores = largest(given, which, number)
        return Found(look_up, unique, Asked(ids, unique.offsets, counts, self.is_frozen, scores))

    def place(self, found: Found, batch: SparseBatch, layout: GroupLayout, inverse: int) -> HostRouteGroup:
        """Routes what `find_unique` found, which is frames now."""
        num_ids = batch.ids.numel()
        if not found.asked.is_distinct:  # ids share a frame
            frames = np.zeros(num_ids, np.int64)
            try:
                self.put_frames(found, layout, inverse, frames)
            finally:
                self.drop(found)
            return self.route(batch.with_ids(torch.from_numpy(frames)), layout, inverse)
        is_found = found.look_up.place(found.unique, inverse, num_ids)
        assert is_found
        with self._counting:
            self.counters.add_route(layout.num_ids, found.look_up.num_unique)
        return RouteGroup(self, layout, found.look_up, self.look_ups.give_back)

    def drop(self, found: Found) -> None:
        """What `find_unique` found is of no use."""
        self.look_ups.drop(found.look_up, found.unique)

    @staticmethod
    def put_frames(found: Found, layout: GroupLayout, inverse: int, ids: np.ndarray) -> None:
        """Puts the frames of what `find_unique` found in the place of a batch's ids.

        Args:
            found: it, whose distinct ids are frames now.
            layout, inverse: as for `find_unique`.
            ids: int64 `[N]`; those of other groups stay as they are.
        """
        which = array_at(inverse, np.uint32, len(ids))
        for begin, end in layout.features[:, :2].tolist():
            ids[begin:end] = found.asked.ids[which[begin:end]]

    # Rows that must be brought into fast memory before they are read

    def prefetch(self, group: HostRouteGroup) -> None:
        """See `GroupExchange.prefetch`."""
        sources = self.sources()
        self.add_own(sources, group)
        sources.merge()
        group.pin(self.pin(self.merger))
        self.place_own(group, self.merger, 0)

    def pin(
        self, merged: HostMerged, may_wait: Callable[[], bool] = never, more: NDArray[np.uint32] | None = None
    ) -> PinnedRows | None:
        """Makes sure that merged rows are in fast memory, and keeps them there; None where all are.

        Args:
            merged: the rows.
            may_wait: whether other batches may unpin rows meanwhile.
            more: uint32 `[n]`, slots of others, which stand behind them.
        """
        if not isinstance(self.arena, CachedArena):
            return None
        slots = merged.slots.copy() if more is None else np.concatenate([merged.slots, more])
        return self.arena.pin(slots, may_wait)

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

    # Requests are merged, rows updated

    def sources(self, merger: Merger | None = None) -> Sources:
        """Lists of requests to be merged, by default by the group's merger."""
        return Sources(merger or self.merger, self.gradient_bytes, self.num_segments)

    def add_own(self, sources: Sources, group: HostRouteGroup) -> None:
        """Adds the requests that this rank makes of itself."""
        send, rank = group.look_up.send, self.rank
        sources.add(send.slots_address, send.segment_offsets[rank], send.gradients.address, send.accesses[rank])

    def prepare_alone(self, groups: Sequence[HostRouteGroup]) -> None:
        """See `GroupExchange.prepare_alone`."""
        self._alone = None
        if len(groups) == 1 and not self.is_tiered and self.replicated is None and groups[0].look_up.is_waiting():
            return  # sums are made as rows are updated
        sources = self.sources()
        for group in groups:
            group.look_up.sum()
            self.add_own(sources, group)
        if sources.num_entries:
            sources.merge()
            self.hold(sources.merger, sources.merger.num_merged)
            self._alone = sources

    def update_alone(self, groups: Sequence[HostRouteGroup], update: Update) -> None:
        """See `GroupExchange.update_alone`."""
        sources, self._alone = self._alone, None
        if sources is not None:
            self.apply(sources.merger, update)
            self.count_merged(sources)
        elif groups and (unsummed := groups[0].look_up.unsummed()):
            self.apply(unsummed, update)
            self.count_alone(groups[0])

    def hold(self, merged: HostMerged, most: int) -> None:
        """Pins merged rows for the update that follows, and makes room for what it keeps of so many.

        Sums of gradients that wait for those of other replicas need no rows.
        """
        if isinstance(self.arena, CachedArena) and not isinstance(self.replicated, ReplicatedSums):
            self.withdraw()
            self._held = self.arena.pin(merged.slots.copy(), never)
        if self.replicated is not None:
            self.replicated.make_room(most)

    def withdraw(self) -> None:
        """See `GroupExchange.withdraw`."""
        held, self._held, self._alone = self._held, None, None
        if held is not None:
            held.unpin()

    def _apply_tiered(self, merged: Merged, update: Update, part: tuple[int, int] | None) -> None:
        assert isinstance(merged, HostMerged)
        assert isinstance(self.arena, CachedArena)
        pinned, self._held = self._held, None
        if pinned is None:  # copies, which are in fast memory
            for some, rows in self.arena.pin_some(merged.slots.copy()):
                self.apply_pinned(rows, merged.part(some), update)
            return
        try:
            self.apply_pinned(pinned, merged, update, part)
        finally:
            pinned.unpin(changed=True)

    def apply_pinned(
        self, pinned: PinnedRows, merged: HostMerged, update: Update, part: tuple[int, int] | None = None
    ) -> None:
        """Updates merged rows that are pinned, in the order in which they are."""
        if isinstance(self.replicated, ReplicatedMeans):
            self.replicated.touch(merged, part, at=pinned.cache_slots)
        pinned.apply(merged, update.lr, update.scaling, update.step, part)

    # Requests are counted

    def count_merged(self, sources: Sources) -> None:
        """Counts merged requests to this rank."""
        self.counters.count_tables(sources.accesses, sources.merger.merged_offsets)

    def count_alone(self, group: HostRouteGroup) -> None:
        """See `GroupExchange.count_alone`."""
        send = group.look_up.send
        self.counters.count_tables(send.accesses[0], send.segment_offsets[0])

    def _count_into(self, group: HostRouteGroup, traffic: Traffic) -> None:
        send = group.look_up.send
        traffic.add(self.address_map, send.segment_offsets, send.accesses)


def route_of_nothing(exchanges: Sequence[HostGroupExchange]) -> Route:
    """A route on the host that asks for no row."""
    route = Route(SparseBatch((), torch.empty(0, dtype=torch.int64, device="cpu"), 0, bag_size=0))
    route.take(exchange.nothing() for exchange in exchanges)
    return route
