"""Route: which rows a batch needs, who owns them, and in which order they travel.

    fuse → segment unique → locate → stable sort by (stop, segment)

Source: FusedRec §3 and Algorithm 1, lines 1–4.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import IdRangeError
from rowmesh.exchange.counters import GroupCounters
from rowmesh.exchange.layout import GroupLayout
from rowmesh.exchange.update import Update, Updater
from rowmesh.exchange.workspace import Outbox, Workspace, held_bytes
from rowmesh.faults import reach
from rowmesh.ops.memory import Scratch
from rowmesh.ops.merge_update import Merger, Singles
from rowmesh.ops.pool import DESCRIPTOR
from rowmesh.ops.route import route as route_kernel
from rowmesh.ops.segment_unique.cpu import SegmentHash
from rowmesh.placement import AddressMap
from rowmesh.placement.address_map import COPIES
from rowmesh.placement.drift import Traffic
from rowmesh.sparse import SparseBatch
from rowmesh.tables import CachedArena, DenseArena, TableGroup, TableSpec
from rowmesh.tables.dense import compute_dtype


class Held:
    """Merged rows that stay where they are until they are released.

    Attributes:
        places: address of uint32 `[M]`: where each is in the arena.
    """

    __slots__ = ("places",)

    def __init__(self, places: int) -> None:
        self.places = places

    def check(self) -> None:
        """Rows of a dense arena are what their last updates left."""

    def release(self) -> None:
        """Rows of a dense arena stay where they are."""


def never() -> bool:
    """Nobody else gives rows up: who looks up and updates in turn is the one who would."""
    return False


class RouteGroup:
    """One group's part of a route. Addresses are valid while the route lives."""

    __slots__ = (
        "exchange",
        "held",
        "incoming",
        "inverse",
        "is_compressed",
        "layout",
        "num_unique",
        "reply_bounds",
        "stop_bounds",
        "workspace",
    )

    def __init__(
        self, exchange: GroupExchange, workspace: Workspace, layout: GroupLayout, inverse: int, num_unique: int
    ) -> None:  # fmt: skip
        self.exchange = exchange
        self.workspace = workspace
        self.layout = layout
        self.inverse = inverse
        self.num_unique = num_unique
        self.is_compressed = False
        self.held: Held | None = None  # rows that this rank holds for those who asked
        self.incoming: Any = None  # what other ranks asked for, where the transport learns it at fetch
        offsets = workspace.outbox.segment_offsets
        self.stop_bounds: list[int] = [*offsets[:, 0].tolist(), num_unique]  # of each stop's requests
        self.reply_bounds: list[int] = workspace.reply_offsets.tolist()  # of each stop's replies

    def count_into(self, traffic: Traffic) -> None:
        """Adds what is asked for to counted traffic; tensor-train tables ask nobody."""
        if self.exchange.group.storage != "tensor_train":
            outbox = self.workspace.outbox
            traffic.add(self.exchange.address_map, outbox.segment_offsets, outbox.accesses)

    def keep(self, held: Held) -> None:
        """Takes what holds the rows; what held them when the route was fetched before is given up."""
        before, self.held = self.held, held
        if before is not None:
            before.release()

    def release(self) -> None:
        """Gives buffers back."""
        if self.held is not None:
            self.held.release()
        self.exchange.workspaces.append(self.workspace)


class Route:
    """What a batch needs: unique ids of each group, their owners, and how to get from ids to rows.

    Made by `EmbeddingCollection.route`. A route holds buffers; they return to their owner with its last reference.
    """

    def __init__(self, batch: SparseBatch, groups: list[RouteGroup], memory: Any, give_back: Callable) -> None:
        self.batch = batch
        self.groups = groups
        self.number = 0  # of the fetch, the same on all ranks
        self.has_gradients = False
        self.thread = self.num_pushes = 0  # which one pooled it for training, and after how many pushes
        self._memory = memory
        self._give_back = give_back

    @classmethod
    def of_nothing(cls, exchanges: Sequence[GroupExchange]) -> Route:
        """A route that asks for no row."""
        ids = torch.empty(0, dtype=torch.int64, device="cpu")
        batch = SparseBatch((), ids, 0, bag_size=0)
        return cls(batch, [exchange.nothing() for exchange in exchanges], None, lambda _: None)

    def __del__(self) -> None:
        self._give_back(self._memory)
        for group in self.groups:
            group.release()


class Routed(Protocol):
    """What a transport sees of a route.

    Attributes:
        number: of the fetch, the same on all ranks.
        groups: those that the transport serves.
    """

    number: int

    @property
    def groups(self) -> Sequence[RouteGroup]: ...


class RoutePart:
    """Some groups of a route, which must live longer."""

    __slots__ = ("groups", "number")

    def __init__(self, route: Route, indices: Sequence[int]) -> None:
        self.number = route.number
        self.groups = [route.groups[index] for index in indices]


class Distinct:
    """What finding the distinct ids of a group needs: lent to one call of `route` at a time."""

    def __init__(self, num_rows: Sequence[int]) -> None:
        self.hash = SegmentHash(list(num_rows))
        self.ids, self.stops, self.keys = Scratch(), Scratch(), Scratch()
        self.offsets = np.zeros(len(num_rows) + 1, np.int64)
        self.offsets_address: int = self.offsets.ctypes.data  # asking NumPy costs more than some kernels take

    @property
    def num_found(self) -> int:
        """Distinct ids of the last call."""
        return int(self.offsets[-1])

    @property
    def num_bytes(self) -> int:
        """All memory held."""
        return held_bytes(self) + held_bytes(self.hash)


class GroupExchange:
    """What stays the same from batch to batch for one group.

    Attributes:
        is_tiered: whether rows must be brought into the arena before they are read.
    """

    is_tiered = False

    def __init__(
        self,
        group: TableGroup,
        address_map: AddressMap,
        arena: DenseArena | CachedArena,
        make_outbox: Callable[[], Outbox],
    ) -> None:
        self.group = group
        self.address_map = address_map
        self.arena = arena
        self.rank = address_map.rank
        self.world_size = address_map.plan.world_size
        self.num_segments = address_map.num_segments
        self.copies = address_map.segments(COPIES)
        self.row_bytes = group.dim * group.dtype.itemsize
        self.gradient_bytes = group.dim * compute_dtype(group.dtype).itemsize
        self.arenas = np.zeros(self.world_size, np.int64)  # where rows can be read in place; set by the transport
        self.arenas[self.rank] = arena.address
        self.has_remote = self.world_size > 1  # rows that have to be received; false where all can be read in place
        self.merger = Merger(self.num_segments, arena.address, self.row_bytes)
        self.replicated: Updater | None = None  # keeps replicas together, where there are any
        self.counters = GroupCounters(group.name, tables=tuple(table.name for table in group.tables))
        self.workspaces: list[Workspace] = []  # idle
        self._all_workspaces: list[Workspace] = []  # and those that routes hold
        self._make_outbox = make_outbox
        self._distinct: list[Distinct] = []  # idle
        self._all_distinct: list[Distinct] = []
        self._counting = threading.Lock()
        num_tables = len(group.tables)
        self._tables = np.repeat(np.arange(num_tables), [len(table.features) for table in group.tables])
        self._header = address_map.header(self.arenas.ctypes.data, self.row_bytes)
        # Asking NumPy for an address costs more than some kernels take.
        self._tables_address: int = self._tables.ctypes.data
        self._header_address: int = self._header.ctypes.data

    @property
    def num_places(self) -> int:
        """Rows that the arena has room for."""
        return self.arena.num_slots

    def hold(self, merged: Merger | Singles, may_wait: Callable[[], bool] = never) -> Held:
        """Makes sure that merged rows are in the arena, and keeps them there.

        Args:
            merged: the rows.
            may_wait: whether it may wait until others give up rows.
        """
        return Held(merged.merged_slots)

    def apply(self, merged: Merger | Singles, update: Update, part: tuple[int, int] | None = None) -> None:
        """Updates merged rows (of `part`: first and one past the last), as far as this rank's replica group knows."""
        if self.replicated is None:
            self.arena.apply(merged, update.lr, update.scaling, update.step, part)
        else:
            self.replicated.apply(merged, update, part)

    def route(self, batch: SparseBatch, layout: GroupLayout, inverse: int) -> RouteGroup:
        """Routes one group's ids.

        Raises:
            IdRangeError: an id is not a row of its table and the table's policy is to refuse it.
        """
        workspace, distinct = self._borrow(), self._borrow_distinct()
        try:
            found = self._find(workspace, distinct, batch, layout, inverse)
        except BaseException:  # peers know this outbox: it must not be lost
            self.workspaces.append(workspace)
            raise
        finally:
            self._distinct.append(distinct)
        with self._counting:
            self.counters.routes += 1
            self.counters.ids += layout.num_ids
            self.counters.unique_ids += found
        return RouteGroup(self, workspace, layout, inverse, found)

    def _find(
        self, workspace: Workspace, distinct: Distinct, batch: SparseBatch, layout: GroupLayout, inverse: int
    ) -> int:  # fmt: skip
        """Lays out in a workspace what is asked of whom; returns how many distinct ids there are."""
        counts, ids = workspace.counts.reserve(4 * layout.num_ids), batch.ids
        self._unique_ids(distinct, ids, layout, counts, inverse)
        reach("route.found_unique")
        while (refused := self._sort(workspace, distinct, counts, layout.num_ids)) >= 0:
            ids = self._mapped(ids, batch, layout)
            self._unique_ids(distinct, ids, layout, counts, inverse)
        assert refused == -1
        return distinct.num_found

    def nothing(self) -> RouteGroup:
        """The group's part of a route that asks for no row."""
        workspace = self._borrow()
        workspace.outbox.segment_offsets[:] = 0
        workspace.outbox.accesses[:] = 0
        workspace.reply_offsets[:] = 0
        return RouteGroup(self, workspace, GroupLayout(np.zeros((0, DESCRIPTOR), np.int64), 0, False), 0, 0)

    def _borrow(self) -> Workspace:
        try:
            return self.workspaces.pop()
        except IndexError:  # asking before would not do: another thread may take the last one
            workspace = Workspace(self._make_outbox(), self.world_size)
            self._all_workspaces.append(workspace)
            return workspace

    def _borrow_distinct(self) -> Distinct:
        try:
            return self._distinct.pop()
        except IndexError:
            distinct = Distinct(self.address_map.num_rows)
            self._all_distinct.append(distinct)
            return distinct

    @property
    def num_lent(self) -> int:
        """Routes that are under way."""
        return len(self._all_workspaces) - len(self.workspaces)

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers, lent or idle; without the arena."""
        lent = sum(memory.num_bytes for memory in (*self._all_workspaces, *self._all_distinct))
        return lent + held_bytes(self) + held_bytes(self.merger)

    def _unique_ids(self, distinct: Distinct, ids: Tensor, layout: GroupLayout, counts: int, inverse: int) -> None:
        distinct.hash(
            ids.data_ptr(), layout.address, 8 * DESCRIPTOR, self._tables_address, layout.num_features,
            distinct.ids.reserve(8 * layout.num_ids), counts, inverse, distinct.offsets_address,
        )  # fmt: skip

    def _sort(self, workspace: Workspace, distinct: Distinct, counts: int, num_ids: int) -> int:
        found = distinct.num_found
        outbox = workspace.outbox
        keys = outbox.reserve_lists(found)
        received = workspace.received.reserve(found * self.row_bytes) if self.has_remote else 0
        return route_kernel(
            self._header_address, distinct.ids.buffer.address, distinct.offsets_address, counts,
            distinct.stops.reserve(4 * num_ids), distinct.keys.reserve(4 * num_ids), received, keys,
            workspace.uniques.reserve(4 * found),
            outbox.lists.address, outbox.accesses_address, workspace.reply_address,
            workspace.addresses.reserve(8 * found),
        )  # fmt: skip

    def _mapped(self, ids: Tensor, batch: SparseBatch, layout: GroupLayout) -> Tensor:
        """The ids with those outside their table mapped as its policy says; the slow path, counted by feature."""
        ids = ids.clone()
        refused: list[str] = []
        place = 0
        for table in self.group.tables:
            for name in table.features:
                begin, end = layout.features[place, :2].tolist()
                place += 1
                part = ids[begin:end]
                outside = (part < 0) | (part >= table.num_rows)
                count = int(outside.sum())
                if count == 0:
                    continue
                with self._counting:
                    self.counters.out_of_range[name] = self.counters.out_of_range.get(name, 0) + count
                if table.out_of_range == "error":
                    refused.append(refused_ids(name, table, part))
                else:
                    part[outside] = table.out_of_range
        if refused:
            raise IdRangeError("; ".join(refused))
        return ids


def refused_ids(feature: str, table: TableSpec, ids: Tensor) -> str:
    """What is wrong with the ids of a feature, some of which are outside its table; a part of a message."""
    outside = ids[(ids < 0) | (ids >= table.num_rows)]
    # A device reads them when the program may have gone on.
    first = f"the first is {int(outside[0])}" if len(outside) else "and were overwritten since"
    return (
        f"feature {feature!r}: {len(outside) or 'some'} of {len(ids)} ids are outside table {table.name!r} "
        f"(0 to {table.num_rows - 1}), {first}"
    )
