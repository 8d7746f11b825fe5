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
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rowmesh.exchange.update import Update
from rowmesh.exchange.workspace import held_bytes
from rowmesh.ops.average import average, clear, mark, pack, put
from rowmesh.ops.memory import Room, grown, round_up, zeros
from rowmesh.ops.merge_update import HostMerged, Merged, Merger, Singles, copy_slots, merge, singles, sum_merged
from rowmesh.ops.transfer import Late, upload
from rowmesh.tables.dense import compute_dtype

if TYPE_CHECKING:
    from rowmesh.exchange.device.route import DeviceExchange
    from rowmesh.exchange.route import GroupExchange

CHUNK_BYTES = 16 << 20  # of whole tables are averaged at once

Kinds = Sequence[tuple[torch.dtype, int]]
"""The kinds of values that a delta has of each row: dtype, and how many."""


@dataclass(frozen=True, eq=False)
class Delta:
    """What changed of some rows.

    Attributes:
        slots: `[n]`, distinct: uint32 in the host's memory, int32 on a device.
        values: of each kind, `[n, …]`.
        before: what the values were, where this rank needs it itself; never sent.
    """

    slots: Tensor
    values: list[Tensor]
    before: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.slots)

    def places(self, num_owners: int) -> list[np.ndarray]:
        """Where the rows of each owner stand, which is their slot modulo `num_owners`; in their order."""
        owners = self.slots.numpy() % np.uint32(num_owners)
        return [np.flatnonzero(owners == owner) for owner in range(num_owners)]

    def at(self, places: np.ndarray) -> Delta:
        """Copies of the rows at some places."""
        slots, values, before = (
            [_take(part, places, part.new_empty(len(places), *part.shape[1:])) for part in parts]
            for parts in ([self.slots], self.values, self.before)
        )
        return Delta(slots[0], values, before)

    def padded(self, count: int) -> list[Tensor]:
        """Slots and values with so many rows, of which the first are these; nobody reads the others."""
        parts = [self.slots, *self.values]
        return parts if len(self) == count else [grown(part, count, part.device) for part in parts]

    def write(self, message: Tensor, kinds: Kinds, places: np.ndarray | None = None) -> None:
        """Lays rows out in uint8 `[message_bytes]` of the host: all, or those at some places."""
        laid_out = read_message(message, kinds, len(self) if places is None else len(places))
        for to, part in zip([laid_out.slots, *laid_out.values], [self.slots, *self.values], strict=True):
            if places is None:
                to.copy_(part)
            else:
                _take(part, places, to)


def _take(part: Tensor, places: np.ndarray, out: Tensor) -> Tensor:
    """`out[i] = part[places[i]]`, in the host's memory."""
    values, into = (each if each.dim() == 1 else each.view(torch.uint8) for each in (part, out))
    np.take(values.numpy(), places, axis=0, out=into.numpy(), mode="clip")  # "raise" would buffer the result
    return out


def read_message(message: Tensor, kinds: Kinds, count: int) -> Delta:
    """The rows of a message of the host that has so many, as views.

    A message has the slots (uint32), then the values of each kind, every part at the next multiple of 64 bytes.
    """
    slots, values = message[: 4 * count].view(torch.uint32), list[Tensor]()
    for begin, (dtype, dim) in zip(_offsets(kinds, count), kinds, strict=False):
        part = message[begin : begin + count * dim * dtype.itemsize]
        values.append(part.view(dtype).view(count, dim))
    return Delta(slots, values)


def message_bytes(kinds: Kinds, count: int) -> int:
    """The size of a message of so many rows."""
    return _offsets(kinds, count)[-1]


def _offsets(kinds: Kinds, count: int) -> list[int]:
    """Where each kind begins, and the size of all."""
    sizes = [4 * count, *(count * dim * dtype.itemsize for dtype, dim in kinds)]
    return list(accumulate(round_up(size, 64) for size in sizes))


class ReplicatedSums:
    """One group's gradients, waiting for those of other replicas.

    Args:
        exchange: the group's.
        device: where its rows are; None: the host's memory.

    Attributes:
        kinds: of what is sent.
    """

    def __init__(self, exchange: GroupExchange | DeviceExchange, device: torch.device | None) -> None:
        self._arena, self._device = exchange.arena, device
        dim, dtype = exchange.group.dim, compute_dtype(exchange.group.dtype)
        self.kinds = [(dtype, dim)]
        rows = exchange.arena.rows
        self._slots = rows.new_empty(0, dtype=torch.uint32 if device is None else torch.int32)
        self._sums = rows.new_empty(0, dim, dtype=dtype)
        self._used = 0
        self._kept: list[tuple[int, Late | int]] = []  # where sums begin, and how many those are
        self._merger = Merger(1, exchange.arena.address, dim * rows.itemsize) if device is None else None
        self._singles = Singles() if device is None else None
        self._total_slots, self._totals = Room(device), Room(device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        of_host = held_bytes(self._merger) + held_bytes(self._singles) if self._device is None else 0
        rooms = self._total_slots.num_bytes + self._totals.num_bytes
        return self._slots.nbytes + self._sums.nbytes + rooms + of_host

    def apply(
        self, merged: Merged, update: Update, part: tuple[int, int] | None = None, *, num: int | None = None
    ) -> None:
        """Keeps the sums of this replica's gradients of merged rows, instead of updating.

        Args:
            merged: the rows and their gradients.
            update: of this step.
            part: which of the rows, first and one past the last, in the host's memory; default: all.
            num: how many rows, where the host knows it of a device's.
        """
        first, most = self._used, _most_rows(merged, part, num)
        self._used += most
        if self._used > len(self._slots):
            size = self._used + (self._used // 4 if self._device is None else 0)
            self._slots, self._sums = (grown(kept, size, self._device) for kept in (self._slots, self._sums))
        copy_slots(merged, self._slots, first, part)
        sum_merged(merged, self._sums, first, part)
        self._kept.append((first, most if isinstance(merged, HostMerged) or num is not None else Late(merged.num)))

    @property
    def count(self) -> int:
        """Rows that `take` will return; waits until that is known."""
        return sum(end - first for first, end in self._bounds())

    def _bounds(self) -> list[tuple[int, int]]:
        """Where the sums of each call of `apply` begin and end."""
        return [(first, first + (num if isinstance(num, int) else num.read()[0])) for first, num in self._kept]

    def take(self) -> Delta:
        """The sums of this replica, which are forgotten; of the host, views that hold until more is kept."""
        bounds, kept = self._bounds(), (self._slots, self._sums)
        if all(end == begin for (_, end), (begin, _) in pairwise(bounds)):
            end = bounds[-1][1] if bounds else 0
            slots, sums = (each[:end] for each in kept)
        else:
            slots, sums = (torch.cat([each[begin:end] for begin, end in bounds]) for each in kept)
        self._kept, self._used = [], 0
        if self._device is not None:
            self._slots, self._sums = (each.new_empty(0, *each.shape[1:]) for each in kept)
        return Delta(slots, [sums])

    def forget(self) -> None:
        """Nothing is kept between steps."""

    def combine(self, deltas: Sequence[Delta], update: Update) -> None:
        """Adds what all replicas sent, in their order, and updates."""
        self._update(self._merge(deltas), update)

    def reduce(self, deltas: Sequence[Delta]) -> Delta:
        """Adds what all replicas sent, in their order, in the host's memory; views that hold until the next call."""
        merged, (dtype, dim) = self._merge(deltas), self.kinds[0]
        slots = self._total_slots.tensor(torch.uint32, merged.most_slots)
        totals = self._totals.tensor(dtype, merged.most_slots, dim)
        copy_slots(merged, slots)
        sum_merged(merged, totals)
        return Delta(slots, [totals])

    def accept(self, delta: Delta, update: Update) -> None:
        """Updates rows by what `reduce` returned, here or at another rank."""
        if len(delta):
            self._update(singles(delta.slots, delta.values[0], self._singles), update)

    def _merge(self, deltas: Sequence[Delta]) -> Merged:
        return merge([delta.slots for delta in deltas], [delta.values[0] for delta in deltas], self._merger)

    def _update(self, merged: Merged, update: Update) -> None:
        self._arena.apply(merged, update.lr, update.scaling, update.step)


class ReplicatedMeans:
    """One group's rows and optimizer state, averaged over replicas.

    Args:
        exchange: the group's.
        replica: of this rank.
        device: where its rows are; None: the host's memory.
        is_whole: whether whole tables are averaged; which rows were touched is then not noted.

    Attributes:
        tables: the rows, and each state of the optimizer, `[R, …]`.
        kinds: of what is sent.
    """

    def __init__(
        self,
        exchange: GroupExchange | DeviceExchange,
        replica: int,
        device: torch.device | None,
        *,
        is_whole: bool = False,
    ) -> None:
        self._arena, self._replica, self._device = exchange.arena, replica, device
        tensors = [exchange.arena.rows, *exchange.arena.state.values()]
        self.tables = [tensor if tensor.dim() == 2 else tensor.unsqueeze(1) for tensor in tensors]
        self.kinds = [(table.dtype, table.shape[1]) for table in self.tables]
        rows = self.tables[0]
        self._marks = zeros(device, torch.uint8, 0 if is_whole else len(rows))
        self._slots = rows.new_empty(0, dtype=torch.uint32 if device is None else torch.int64)
        self._before = [table.new_empty(0, table.shape[1]) for table in self.tables]
        self._current = [Room(device) for _ in self.tables]
        self._total_slots, self._means = Room(device), [Room(device) for _ in self.tables]
        self._merger = Merger(1) if device is None else None
        self._start()

    def _start(self) -> None:
        """An empty list."""
        self._bounds = torch.zeros(2, dtype=torch.int64, device=self._slots.device)  # of what `mark` added last
        self._late: Late | None = None  # the bounds, on their way to the host
        self._most = 0  # that the list may have by now, as far as the host knows

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        of_host = held_bytes(self._merger) if self._device is None else 0
        rooms = sum(room.num_bytes for room in (self._total_slots, *self._current, *self._means))
        return sum(tensor.nbytes for tensor in (self._marks, self._slots, *self._before)) + rooms + of_host

    def apply(
        self, merged: Merged, update: Update, part: tuple[int, int] | None = None, *, num: int | None = None
    ) -> None:
        """Updates merged rows; keeps what those that are touched for the first time were. See `ReplicatedSums`."""
        most = _most_rows(merged, part, num)
        self._reserve(most)
        self._most += most
        self._bounds = mark(merged, self._marks, self._bounds, self._slots, part, num)
        if self._device is not None:
            self._late = Late(self._bounds)
        for table, before in zip(self.tables, self._before, strict=True):
            pack(table, self._slots, self._bounds, before, most)
        self._arena.apply(merged, update.lr, update.scaling, update.step, part)

    def _reserve(self, count: int) -> None:
        """Makes room for so many more rows; looks at how many there really are only where it may not do."""
        room, num_rows = len(self._slots), len(self._marks)
        if min(self._most + count, num_rows) > room:
            self._most = self.count
        if (needed := min(self._most + count, num_rows)) > room:
            size = min(max(needed, 2 * room), num_rows)
            self._slots, *self._before = (grown(kept, size, self._device) for kept in (self._slots, *self._before))

    @property
    def count(self) -> int:
        """Rows that `take` will return; waits until that is known."""
        if self._late is not None:
            return self._late.read()[1]
        return int(self._bounds[1]) if self._device is None else 0

    def take(self) -> Delta:
        """The rows that this replica touched, whose marks go; views that hold until more are touched."""
        count = self.count
        self._bounds[0] = 0
        values = [room.tensor(dtype, count, dim) for room, (dtype, dim) in zip(self._current, self.kinds, strict=True)]
        for table, current in zip(self.tables, values, strict=True):
            pack(table, self._slots, self._bounds, current, count)
        slots = self._slots[:count]
        before = [kept[:count] for kept in self._before]
        self.forget()
        return Delta(slots if self._device is None else slots.to(torch.int32), values, before)

    def forget(self) -> None:
        """Unmarks all rows."""
        self._bounds[0] = 0
        clear(self._slots, self._bounds, self._marks, min(self._most, len(self._slots)))
        self._start()

    def combine(self, deltas: Sequence[Delta], update: Update) -> None:
        """Puts the means of the rows that any replica sent into place."""
        self._average(deltas)

    def reduce(self, deltas: Sequence[Delta]) -> Delta:
        """The means of the rows that any replica sent, in the host's memory; views that hold until the next call."""
        most, means = sum(map(len, deltas)), zip(self._means, self.kinds, strict=True)
        values = [room.tensor(dtype, most, dim) for room, (dtype, dim) in means]
        merged = self._average(deltas, values)
        slots = self._total_slots.tensor(torch.uint32, merged.most_slots)
        copy_slots(merged, slots)
        return Delta(slots, [each[: len(slots)] for each in values])

    def accept(self, delta: Delta, update: Update) -> None:
        """Puts the means that `reduce` returned, here or at another rank, into place."""
        for table, means in zip(self.tables, delta.values, strict=True):
            put(table, delta.slots, means)

    def _average(self, deltas: Sequence[Delta], means: Sequence[Tensor] = ()) -> Merged:
        """Means to where they are wanted; default: into place."""
        merged = merge([delta.slots for delta in deltas], into=self._merger)
        ends = torch.tensor([0, *accumulate(map(len, deltas))], dtype=torch.int64, device="cpu")
        ends = ends if self._device is None else upload(ends, self._device)
        own = deltas[self._replica].before
        for kind, table in enumerate(self.tables):
            values = [delta.values[kind] for delta in deltas]
            average(table, merged, values, ends, self._replica, own[kind], means[kind] if means else None)
        return merged

    def chunks(self) -> Iterator[slice]:
        """All rows, some at a time."""
        size = max(CHUNK_BYTES // sum(dim * dtype.itemsize for dtype, dim in self.kinds), 1)
        num_rows = len(self.tables[0])
        return (slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size))

    def average_chunk(self, chunk: slice, values: Sequence[Tensor]) -> None:
        """Puts the means of whole tables into place; `values` has the chunk of each table, of one replica after the
        other.
        """
        count = chunk.stop - chunk.start
        num_replicas, device = len(values[0]) // count, values[0].device
        slots = torch.arange(chunk.start, chunk.stop, device=device)
        slots = slots.to(torch.uint32) if self._device is None else slots
        merged = merge([slots] * num_replicas, into=self._merger)
        ends = count * torch.arange(num_replicas + 1, device=device)
        for table, rows in zip(self.tables, values, strict=True):
            average(table, merged, [rows], ends, self._replica, rows[:count])  # all sent all: no row is as before


def _most_rows(merged: Merged, part: tuple[int, int] | None, num: int | None) -> int:
    """How many rows `apply` is given at most."""
    if part is not None:
        return part[1] - part[0]
    return merged.most_slots if num is None else num
