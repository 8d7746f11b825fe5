"""Rows of replicas: what the ranks of a replicate group send each other of one group of tables, and what they make of
it.

`ReplicatedSums`, of `exact` synchronization: a rank keeps the sums of its replica's gradients instead of updating. The
sums of all replicas are added in the order of the replicas, and all ranks update by the totals: training equals that of
one replica, up to the order of additions.

`ReplicatedMeans`, of `average` synchronization: a rank updates, marks the rows it updates, and keeps what they were
before. Then it sends the rows it touched; of those that another replica did not touch, that replica's value is the one
from before, which all have. So what is sent follows the batches, not the tables, and the result is that of averaging
whole tables.

Sources: the sparse all-reduce of OPER §5.3, over replicas; two-dimensional sparse parallelism, Algorithm 1, lines 5-10.
Differs: the paper averages whole tables; here that is `dense`, for comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.average import average, put
from rowmesh.ops.average.touched import TouchedRows
from rowmesh.ops.memory import Kinds, Room, grown, held_bytes, laid_out, take
from rowmesh.ops.merge_update import HostMerged, Merged, Merger, Singles, copy_slots, merge, singles, sum_merged
from rowmesh.ops.transfer import Late, upload
from rowmesh.tables import CachedArena, DenseArena
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.update_rules import Update

CHUNK_BYTES = 16 << 20  # of whole tables are averaged at once


@dataclass(frozen=True, eq=False)
class Delta:
    """The changes of some rows.

    Attributes:
        slots: `[n]`, distinct: uint32 in the host's memory, int32 on a device.
        values: of each kind, `[n, …]`.
        before: the values before the change, where this rank needs them itself; never sent.
    """

    slots: Tensor
    values: list[Tensor]
    before: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def sent(self) -> list[Tensor]:
        """Slots and values."""
        return [self.slots, *self.values]

    def padded(self, count: int) -> list[Tensor]:
        """On a device, slots and values with so many rows, of which the first are these; the others are unused."""
        return self.sent if len(self) == count else [grown(part, count, part.device) for part in self.sent]

    def places(self, num_owners: int) -> list[np.ndarray]:
        """Where the rows of each owner stand, which is their slot modulo `num_owners`; in their order."""
        owners = self.slots.numpy() % np.uint32(num_owners)
        return [np.flatnonzero(owners == owner) for owner in range(num_owners)]

    def at(self, places: np.ndarray) -> Delta:
        """Copies of the rows at some places."""
        slots, *parts = [take(part, places) for part in (*self.sent, *self.before)]
        return Delta(slots, parts[: len(self.values)], parts[len(self.values) :])

    def write(self, message: Tensor, kinds: Kinds, places: np.ndarray | None = None) -> None:
        """Lays rows out in a message of the host: all, or those at some places."""
        to = laid_out(message, kinds, len(self) if places is None else len(places))
        for out, part in zip(to, self.sent, strict=True):
            if places is None:
                out.copy_(part)
            else:
                take(part, places, out)


class ReplicatedSums:
    """The gradients of one group, until those of other replicas come.

    Args:
        arena: the group's rows on this rank.
        device: where they are; None: the host's memory.

    Attributes:
        kinds: of the parts of a message, the slots first.
    """

    def __init__(self, arena: DenseArena | CachedArena, device: torch.device | None) -> None:
        self._arena, self._device, dim = arena, device, arena.rows.shape[1]
        self.kinds: Kinds = [(_slot_dtype(device), ()), (compute_dtype(arena.rows.dtype), (dim,))]
        self._kept = [arena.rows.new_empty(0, *shape, dtype=dtype) for dtype, shape in self.kinds]
        self._used = 0
        self._late: list[tuple[int, Late | int]] = []  # on a device, where sums begin, and how many those are
        row_bytes = dim * arena.rows.dtype.itemsize
        self._merger = Merger(1, arena.address, row_bytes) if device is None else None
        self._singles = Singles() if device is None else None
        self._reduced = [Room(device) for _ in self.kinds]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return _held(*self._kept, *self._reduced, self._merger, self._singles)

    def make_room(self, num_rows: int) -> None:
        """For the sums of so many more rows, in the host's memory."""
        if (needed := self._used + num_rows) > len(self._kept[0]):
            size = needed + (needed // 4 if self._device is None else 0)
            self._kept = [grown(each, size, self._device) for each in self._kept]

    def drop(self) -> None:
        """Forgets the sums that are kept: their step is not taken."""
        self._used, self._late = 0, []

    def keep(self, merged: Merged, part: tuple[int, int] | None = None, *, num: int | None = None) -> None:
        """Keeps the sums of this replica's gradients of merged rows, instead of updating.

        Args:
            merged: the rows and their gradients.
            part: which of the rows, first and one past the last, in the host's memory; default: all.
            num: how many rows, where the host knows it of a device's.
        """
        first, most = self._used, _most_rows(merged, part, num)
        self.make_room(most)
        self._used += most
        slots, sums = self._kept
        copy_slots(merged, slots, first, part)
        sum_merged(merged, sums, first, part)
        if not isinstance(merged, HostMerged):
            self._late.append((first, Late(merged.num) if num is None else num))

    @property
    def count(self) -> int:
        """Rows that `take` will return; waits until that is known."""
        return sum(end - first for first, end in self._bounds())

    def _bounds(self) -> list[tuple[int, int]]:
        """Where sums are; on a device there may be gaps between those of two calls of `apply`."""
        if self._device is None:
            return [(0, self._used)]
        return [(first, first + (num if isinstance(num, int) else num.read()[0])) for first, num in self._late]

    def take(self) -> Delta:
        """The sums of this replica, which are forgotten; of the host, views that hold until more is kept."""
        bounds = self._bounds() or [(0, 0)]
        pieces = [[each[begin:end] for begin, end in bounds] for each in self._kept]
        slots, sums = (each[0] if len(each) == 1 else torch.cat(each) for each in pieces)
        self._used, self._late = 0, []
        if self._device is not None:
            self._kept = [each.new_empty(0, *each.shape[1:]) for each in self._kept]
        return Delta(slots, [sums])

    def forget(self) -> None:
        """Nothing is kept between steps."""

    def combine(self, deltas: Sequence[Delta], merged: Merged, update: Update) -> None:
        """Adds what all replicas sent, in their order, and updates; `merged` is what `merge` returned."""
        self._update(merged, update)

    def reduce(self, deltas: Sequence[Delta]) -> Delta:
        """Adds what all replicas sent, in their order, in the host's memory; views that hold until the next call."""
        merged = self.merge(deltas)
        reduced = _room_for(merged, self._reduced, self.kinds)
        sum_merged(merged, reduced.values[0])
        return reduced

    def accept(self, delta: Delta, update: Update) -> None:
        """Updates rows by what `reduce` returned, here or at another rank."""
        if len(delta):
            self._update(singles(delta.slots, delta.values[0], self._singles), update)

    def merge(self, deltas: Sequence[Delta]) -> Merged:
        """The rows that any replica sent; valid until the next call."""
        return merge([delta.slots for delta in deltas], [delta.values[0] for delta in deltas], self._merger)

    def make_room_to_merge(self, num_rows: int, num_replicas: int) -> None:
        """For `merge`, of so many rows of all replicas, in the host's memory."""
        assert self._merger is not None
        self._merger.make_room(num_rows, num_replicas)

    def _update(self, merged: Merged, update: Update) -> None:
        numbers = update.lr, update.scaling, update.step
        if isinstance(self._arena, CachedArena):
            assert isinstance(merged, HostMerged)
            for part, pinned in self._arena.pin_some(merged.slots.copy()):
                pinned.apply(merged.part(part), *numbers)
        else:
            self._arena.apply(merged, *numbers)


class ReplicatedMeans:
    """The rows and optimizer state of one group, averaged over replicas.

    Args:
        arena: the group's rows on this rank.
        device: where they are; None: the host's memory.
        replica: of this rank.
        is_whole: whether whole tables are averaged; which rows were touched is then not noted.

    Attributes:
        tables: the rows, and each state of the optimizer, `[R, …]`.
        kinds: of the parts of a message, the slots first.
        touched: rows that replicas may differ in, until they are averaged; of whole tables none.
    """

    def __init__(
        self, arena: DenseArena | CachedArena, device: torch.device | None, replica: int, *, is_whole: bool
    ) -> None:
        self._arena, self._device, self._replica = arena, device, replica
        tensors = [arena.rows, *arena.state.values()]
        self.tables = [tensor if tensor.dim() == 2 else tensor.unsqueeze(1) for tensor in tensors]
        self.kinds: Kinds = [(_slot_dtype(device), ()), *((t.dtype, (t.shape[1],)) for t in self.tables)]
        num_slots = arena.num_slots if isinstance(arena, CachedArena) else None
        self.touched = TouchedRows([table[:0] for table in self.tables] if is_whole else self.tables, device, num_slots)
        self._merger = Merger(1) if device is None else None
        self._reduced = [Room(device) for _ in self.kinds]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return _held(self.touched, *self._reduced, self._merger)

    def make_room(self, num_rows: int) -> None:
        """For so many more touched rows, in the host's memory."""
        self.touched.make_room(num_rows)

    def touch(
        self,
        merged: Merged,
        part: tuple[int, int] | None = None,
        *,
        num: int | None = None,
        at: np.ndarray | None = None,
    ) -> None:
        """Merged rows are about to be updated: keeps what those that are touched for the first time were.

        Args:
            merged, part, num: as for `ReplicatedSums.keep`.
            at: cache slots, where rows are in tiers.
        """
        self.touched.add(merged, _most_rows(merged, part, num), part, at)

    @property
    def count(self) -> int:
        """Rows that `take` will return; waits until that is known."""
        return self.touched.count

    def take(self) -> Delta:
        """The rows that this replica touched, whose marks go; views that hold until more are touched."""
        slots, values, before = self.touched.take(self._read if isinstance(self._arena, CachedArena) else None)
        return Delta(slots if self._device is None else slots.to(torch.int32), values, before)

    def _read(self, slots: Tensor) -> list[Tensor]:
        """What each table has in some slots, wherever these rows are."""
        rows, state = self._arena.read_rows(slots.numpy())
        return [each if each.dim() == 2 else each.unsqueeze(1) for each in (rows, *state.values())]

    def forget(self) -> None:
        """Unmarks all rows."""
        self.touched.clear()

    def combine(self, deltas: Sequence[Delta], merged: Merged, update: Update) -> None:
        """Puts the means of the rows that any replica sent into place; `merged` is what `merge` returned."""
        if isinstance(self._arena, CachedArena):
            assert isinstance(merged, HostMerged)
            for part, pinned in self._arena.pin_some(merged.slots.copy()):
                pinned.announce()
                self._average(merged.part(part).at(pinned.cache_slots), deltas, [None] * len(self.tables))
            return
        self._arena.announce(merged)
        self._average(merged, deltas, [None] * len(self.tables))

    def reduce(self, deltas: Sequence[Delta]) -> Delta:
        """The means of the rows that any replica sent, in the host's memory; views that hold until the next call."""
        merged = self.merge(deltas)
        reduced = _room_for(merged, self._reduced, self.kinds)
        if isinstance(self._arena, CachedArena):
            assert isinstance(merged, HostMerged)
            for part, pinned in self._arena.pin_some(merged.slots.copy()):
                means = [values[part] for values in reduced.values]
                self._average(merged.part(part).at(pinned.cache_slots), deltas, means)
        else:
            self._average(merged, deltas, reduced.values)
        return reduced

    def accept(self, delta: Delta, update: Update) -> None:
        """Puts the means that `reduce` returned, here or at another rank, into place."""
        if isinstance(self._arena, CachedArena):
            for part, pinned in self._arena.pin_some(delta.slots.numpy().copy()):
                pinned.announce()
                places = torch.from_numpy(pinned.cache_slots)
                for table, means in zip(self.tables, delta.values, strict=True):
                    put(table, places, means[part])
            return
        self._arena.announce(delta.slots.numpy())
        for table, means in zip(self.tables, delta.values, strict=True):
            put(table, delta.slots, means)

    def merge(self, deltas: Sequence[Delta]) -> Merged:
        """The rows that any replica sent; valid until the next call."""
        return merge([delta.slots for delta in deltas], into=self._merger)

    def make_room_to_merge(self, num_rows: int, num_replicas: int) -> None:
        """For `merge`, of so many rows of all replicas, in the host's memory."""
        assert self._merger is not None
        self._merger.make_room(num_rows, num_replicas)

    def _average(self, merged: Merged, deltas: Sequence[Delta], out: Sequence[Tensor | None]) -> None:
        ends = torch.tensor([0, *accumulate(map(len, deltas))], dtype=torch.int64, device="cpu")
        ends = ends if self._device is None else upload(ends, self._device)
        before = deltas[self._replica].before
        for kind, (table, means) in enumerate(zip(self.tables, out, strict=True)):
            values = [delta.values[kind] for delta in deltas]
            average(table, merged, values, ends, self._replica, before[kind], means)

    def chunks(self) -> Iterator[slice]:
        """All rows, some at a time."""
        size = max(CHUNK_BYTES // sum(table.shape[1] * table.itemsize for table in self.tables), 1)
        num_rows = len(self.tables[0])
        return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))

    def average_chunk(self, chunk: slice, values: Sequence[Tensor]) -> None:
        """Puts means of whole tables into place; `values`, of each table: the chunk of all replicas, in their order."""
        count = chunk.stop - chunk.start
        num_replicas, device = len(values[0]) // count, values[0].device
        slots = torch.arange(chunk.start, chunk.stop, device=device)
        slots = slots.to(torch.uint32) if self._device is None else slots
        merged = merge([slots] * num_replicas, into=self._merger)
        assert isinstance(self._arena, DenseArena), "whole tables in tiers are refused"
        self._arena.announce(merged)
        ends = count * torch.arange(num_replicas + 1, device=device)
        for table, rows in zip(self.tables, values, strict=True):
            average(table, merged, [rows], ends, self._replica, rows[:count])  # all sent all: no row is as before


def _slot_dtype(device: torch.device | None) -> torch.dtype:
    return torch.uint32 if device is None else torch.int32


def _most_rows(merged: Merged, part: tuple[int, int] | None, num: int | None) -> int:
    """How many rows `apply` is given at most."""
    return part[1] - part[0] if part is not None else merged.most_slots if num is None else num


def _room_for(merged: Merged, rooms: Sequence[Room], kinds: Kinds) -> Delta:
    """The slots of the host, and room for what they are reduced to."""
    each = zip(rooms, kinds, strict=True)
    slots, *values = [room.tensor(dtype, merged.most_slots, *shape) for room, (dtype, shape) in each]
    copy_slots(merged, slots)
    return Delta(slots, values)


def _held(*owned: Tensor | Room | TouchedRows | Merger | Singles | None) -> int:
    """Memory, in bytes."""
    of_kernels = sum(held_bytes(each) for each in owned if isinstance(each, HostMerged))
    rooms = sum(each.num_bytes for each in owned if isinstance(each, (Room, TouchedRows)))
    return of_kernels + rooms + sum(each.nbytes for each in owned if isinstance(each, Tensor))
