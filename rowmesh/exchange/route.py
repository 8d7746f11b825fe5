"""Route: which rows a batch needs, which ranks own them, and in which order they travel; a router makes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar

from torch import Tensor

from rowmesh.errors import IdRangeError
from rowmesh.exchange.resolve.pins import BatchPin
from rowmesh.ops.look_up import HostLookUp
from rowmesh.ops.look_up.device import DeviceLookUp
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.sparse import SparseBatch
from rowmesh.tables import PinnedRows, TableGroup, TableSpec

Moment = tuple[int, int]
"""Which look-up this is, and after how many steps; for messages."""

X = TypeVar("X")
L = TypeVar("L", HostLookUp, DeviceLookUp)
Kept = TypeVar("Kept", bound="Opened")


class Opened:
    """The memory of a transport about one group of a route, from fetch to update; no other reads or writes it."""

    __slots__ = ()

    def unpin(self) -> None:
        """Rows that the current stream has read may leave fast memory."""

    def release(self) -> None:
        """The route is gone, or fetched anew: rows may leave fast memory."""


class RouteGroup(Generic[X, L]):
    """A group of a route, or of a micro-batch: its requests, and the place of its rows once they are fetched.

    Args:
        exchange: the group's.
        layout: where each feature's ids and vectors are.
        look_up: what was found of the batch: a `HostLookUp` or a `DeviceLookUp`.
        give_back: takes the look-up when the route is gone; a part of a window gives none back.

    Attributes:
        exchange, layout, look_up: as given.
        pinned: keeps rows that this rank reads, or was asked for, in fast memory, where they could leave it.
        opened: what the transport of the group remembers, once the route was fetched; see `opened_as`.
    """

    __slots__ = ("_give_back", "exchange", "layout", "look_up", "opened", "pinned")

    def __init__(
        self, exchange: X, layout: GroupLayout, look_up: L, give_back: Callable[[L], None] | None = None
    ) -> None:
        self.exchange, self.layout, self.look_up, self._give_back = exchange, layout, look_up, give_back
        self.pinned: PinnedRows | None = None
        self.opened: Opened | None = None

    @property
    def num_unique(self) -> int:
        """U where the host knows it, else as many as there could be."""
        return self.look_up.num_unique

    def pin(self, rows: PinnedRows | None) -> None:
        """Takes rows that are pinned; those of an earlier fetch of the route are unpinned."""
        before, self.pinned = self.pinned, rows
        if before is not None:
            before.unpin()

    def keep(self, opened: Opened) -> None:
        """Keeps what its transport remembers of it now, until the route is gone or fetched anew."""
        before, self.opened = self.opened, opened
        if before is not None:
            before.release()

    def opened_as(self, kind: type[Kept]) -> Kept:
        """The kept memory, as the class of the transport that kept it."""
        assert isinstance(self.opened, kind)
        return self.opened

    def unpin(self) -> None:
        """Rows that the current stream has read may leave fast memory."""
        if self.pinned is not None:
            self.pinned.note_use()
            self.pinned.unpin()
        if self.opened is not None:
            self.opened.unpin()

    def release(self) -> None:
        """Gives memory back; rows may leave fast memory."""
        if self.pinned is not None:
            self.pinned.unpin()
        if self.opened is not None:
            self.opened.release()
        if self._give_back is not None:
            self._give_back(self.look_up)


AnyRouteGroup = RouteGroup[Any, Any]
"""A group on a host or on a device, for code that passes it on and does not look into it."""


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
    """The route of a batch: unique ids of each group, their owners, and how to get from ids to rows.

    Made by `EmbeddingCollection.route`. A route holds buffers; they return to their owner with its last reference.

    Args:
        batch: what is routed.
        give_back: is called when the route is gone, also half made.
        pins: keep the frames of dynamic tables that the batch was given, where they are known.
        offsets: gives memory for offsets of its own, see `SparseBatch.routed`.

    Attributes:
        batch: as it was when it was routed.
        groups: its parts.
        number: of the fetch, the same on all ranks.
        has_gradients: whether its backward has run.
        late: of a route on a device.
        pins: keep the frames of dynamic tables that the batch was given: one, or one of each item that was resolved by
            itself, in their order.
    """

    def __init__(
        self,
        batch: SparseBatch,
        give_back: Callable[[], None] | None = None,
        *,
        pins: Sequence[BatchPin] = (),
        offsets: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.groups, self.pins, self._give_back = list[AnyRouteGroup](), [*pins], give_back
        self.number, self.has_gradients = 0, False
        self.late: LateIdCheck | None = None
        self.batch = batch if offsets is None else batch.routed(offsets)  # last: it may raise, and `__del__` comes

    def take(self, groups: Iterable[AnyRouteGroup]) -> None:
        """Takes its parts: all of them, in the order of the collection's groups."""
        self.groups = list(groups)

    def take_pin(self, pin: BatchPin) -> None:
        """Takes what keeps the frames of dynamic tables, until the route is gone."""
        self.pins.append(pin)

    def check_later(self, late: LateIdCheck) -> None:
        """Takes what checks its ids, which a device looks at."""
        self.late = late

    def note_fetch(self, number: int) -> None:
        """Takes the number of its fetch, the same on all ranks."""
        self.number = number

    def note_backward(self) -> None:
        """Notes that its backward has run."""
        self.has_gradients = True

    def __del__(self) -> None:
        if self._give_back is not None:
            self._give_back()
        for group in self.groups:
            group.release()
        for pin in self.pins:
            pin.drop()


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
"""The routes that a transport takes."""


def table_bounds(group: TableGroup, layout: GroupLayout) -> list[int]:
    """Where the ids of each table begin, counted from the group's first, and where the last one's end."""
    lengths = layout.features[:, 1] - layout.features[:, 0]
    ends = list(accumulate(lengths.tolist(), initial=0))
    return [ends[feature] for feature in group.feature_bounds]


def refused_ids(feature: str, table: TableSpec, ids: Tensor) -> str:
    """Describes the ids of a feature that are outside its table; a part of a message."""
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
