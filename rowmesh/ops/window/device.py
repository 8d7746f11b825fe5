"""A window of one group on a device; memory is torch's.

A window keeps all its tensors until it is dropped, even those that are not needed any more: other streams may still
read them. See [Note: streams] in `rowmesh.pipeline.streams`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.look_up.device import DeviceLookUp, descriptors
from rowmesh.ops.merge_update import DeviceMerged
from rowmesh.ops.pool.layout import GroupLayout
from rowmesh.ops.transfer import upload
from rowmesh.ops.unshared import LeftGradient
from rowmesh.ops.window.cpu import FINAL
from rowmesh.ops.window.order import Order

if TYPE_CHECKING:
    from rowmesh.ops.pool.handles import Bags, FiledCells


@dataclass(frozen=True, eq=False)
class DeviceMicroBatch:
    """One micro-batch of one group, as pooling sees it.

    Attributes:
        bags: how ids, which stand together, form bags.
        recover: int32 `[n]`: which of the window's slots each id reads, or the slot itself.
        window: knows what is read.
    """

    bags: Bags
    recover: Tensor
    window: DeviceWindow

    def pool(self, layout: GroupLayout, weights: Tensor | None, output: Tensor) -> None:
        """Writes the group's columns of the output; `bags` has the weights."""
        from rowmesh.ops.pool.cuda import pool

        pool(self.window.source, self.recover, self.bags, output, self.window.slots)


class DeviceWindow:
    """The part of a window that belongs to one group.

    Attributes:
        num_unique: U, or as many as there could be until the host knows it.
        source: `[R, D]`, what is read, once it is known: rows that were fetched, or those of the arena.
        slots: int32 `[U]`: which rows of `source` the unique ids are; None where all, in their order, and where
            ids have their slots themselves.
        filed: of each micro-batch, the cells that every row goes into.
        sent, asked: requests for and of each rank, of rows that travel.
        rows_in, rows_out, gradients_out, gradients_in: what travels when.
    """

    source: Tensor

    def __init__(self) -> None:
        from rowmesh.ops.gather.cuda import gather
        from rowmesh.ops.merge_update.cuda import sum_merged
        from rowmesh.ops.pool import cuda as pool
        from rowmesh.ops.window.cuda import intersect

        self._gather, self._pool, self._intersect, self._sum_merged = gather, pool, intersect, sum_merged
        self.slots: Tensor | None = None
        self.filed: list[FiledCells | DeviceMerged] = []
        self.sent: list[int] = []
        self.asked: list[int] = []
        self._uses: Tensor | None = None  # int32 [2, ids]: micro-batches that use each unique id first and last
        self._own_uses: Tensor | None = None  # int32 [2, n]: by request; None where all are used by the same ones
        self._asked_uses: Tensor | None = None  # int32 [2, M]: the same of what ranks ask
        self._is_final: tuple[Tensor, Tensor] | None = None  # uint8 [n] and [M]: of rows that come and go
        self._orders: list[tuple[Tensor, Tensor] | None] = []  # sorted, while the host does not know sizes
        self._gradients: Tensor | None = None
        self._dtype: torch.dtype | None = None  # of gradients that travel by micro-batch
        self._left: LeftGradient | None = None

    def cut(
        self, batch: DeviceLookUp, layouts: Sequence[GroupLayout], first_bags: Sequence[np.ndarray]
    ) -> list[DeviceMicroBatch]:
        """Files the cells of every micro-batch, on the stream that routes: that which computes only pools and sums.

        Ids of each micro-batch are put together, feature after feature.

        Args:
            batch: the look-up of the whole batch.
            layouts: of each micro-batch.
            first_bags: of each, int64 `[F]`: where the bounds of a feature's bags begin among those of the batch.
        """
        bags, begin = batch.bags, batch.layout.features[0, 0]
        assert bags is not None
        self._num_found, self.num_unique = batch.count, batch.num_unique
        recover, _ = batch.in_window
        if len(layouts) == 1:
            self.filed = [batch.file()]
            return [DeviceMicroBatch(bags, recover, self)]
        self._inverse = batch.inverse
        ids = [(layout.features[:, :2] - begin).tolist() for layout in layouts]
        parts = [
            DeviceMicroBatch(_cut_bags(bags, layout, first, mine), _joined(recover, mine), self)
            for layout, first, mine in zip(layouts, first_bags, ids, strict=True)
        ]
        file_cells, size, dtype = self._pool.file_cells, self.num_unique, batch.gradient_dtype
        self.filed = [
            file_cells(_joined(self._inverse, mine), part.bags, size, dtype)
            for part, mine in zip(parts, ids, strict=True)
        ]
        self._note_uses([[first for first, _ in mine] for mine in ids])
        return parts

    def _note_uses(self, begins: Sequence[Sequence[int]]) -> None:
        """Finds when each unique id is used first and last.

        Args:
            begins: of each micro-batch, where the ids of every feature begin among those of the group.
        """
        inverse, num_parts = self._inverse.to(torch.int64), len(begins)
        of_features = torch.tensor(begins, device="cpu").T
        starts = upload(of_features.flatten(), inverse.device)  # ascending: in every feature the micro-batches
        ids = torch.arange(inverse.numel(), device=inverse.device)
        part = ((torch.searchsorted(starts, ids, right=True) - 1) % num_parts).to(torch.int32)
        nothing = torch.full_like(part, num_parts)
        first = nothing.scatter_reduce(0, inverse, part, "amin")  # of whole numbers: in any order the same
        self._uses = torch.stack([first, (-nothing).scatter_reduce(0, inverse, part, "amax")])

    def read(self, source: Tensor, slots: Tensor | None, num_unique: int) -> None:
        """Takes what is read by all micro-batches."""
        self.source, self.slots, self.num_unique = source, slots, num_unique

    def add_gradients(self, part: int, grad: Tensor, *, may_wait: bool = False) -> None:
        """Adds the gradients of a micro-batch's rows to the sums, given that of its vectors.

        `may_wait`: whether the update may do it, where there is one micro-batch and rows are updated in place.
        """
        if may_wait and isinstance(self.filed[part], DeviceMerged):
            self._left = LeftGradient(grad)
            return
        size, adds = (self.num_unique, self.source.shape[1]), len(self.filed) > 1
        if self._gradients is None:
            make = torch.zeros if adds else torch.empty
            self._gradients = make(size, dtype=grad.dtype, device=grad.device)
        filed = self.filed[part]
        if isinstance(filed, DeviceMerged):
            self._sum_merged(filed, grad, self._gradients)
        else:
            self._pool.backward(grad, filed.of_first(self.num_unique), self._gradients, self._num_found, adds=adds)

    def lack_gradients(self) -> None:
        """Gradients of some micro-batches do not come; those that are there, or zeros, go in their place."""
        if self._gradients is None and self._dtype is not None:  # else none go by micro-batch
            self._gradients = self.source.new_zeros(self.num_unique, self.source.shape[1], dtype=self._dtype)

    def gradients(self) -> Tensor:
        """`[U, D]`: they come from the stream that computed, and are about to be read on the current one."""
        assert self._gradients is not None
        return _used_here(self._gradients)

    def give_gradients(self, look_up: DeviceLookUp) -> None:
        """Gives the look-up of the whole batch the gradients of all micro-batches, to be pushed at once."""
        if self._left is not None:
            look_up.leave_backward(look_up.layout, _used_here(self._left.take()))
            return
        gradients, order = self.gradients(), look_up.order
        look_up.gradients = gradients if order is None else gradients.index_select(0, order)

    # Messages, by micro-batch

    def open(self, uniques: Tensor, sent: list[int], asked: list[int], arena: Tensor, dtype: torch.dtype) -> None:
        """Takes what is asked for and of each rank.

        Args:
            uniques: int32 `[U]`: for which unique id each row is asked; those that travel first.
            sent, asked: rows that travel, of each rank.
            arena: `[R, D]`, the rows of this rank.
            dtype: of gradients.
        """
        self._arena, self._dtype = arena, dtype
        self._all, self.sent, self.asked, self.num_unique = uniques, sent, asked, len(uniques)
        self._moving = uniques[: sum(sent)]

    @property
    def copied(self) -> Tensor:
        """Int32: the unique ids whose rows every rank has a copy of."""
        return self._all[len(self._moving) :]

    def uses(self, form: str) -> tuple[Tensor, None] | None:
        """Int32 `[n, 2]`: which micro-batches use each row that travels first and last; None where it makes no odds."""
        if form != "delta" or self._uses is None:
            return None
        self._own_uses = self._uses.index_select(1, self._moving)
        return self._own_uses.T.contiguous(), None

    def take_requests(self, slots: Tensor, uses: Tensor | None) -> None:
        """Takes what ranks ask for: int32 `[M]`, and `[M, 2]`."""
        self._asked_slots, self._asked_uses = slots, None if uses is None else uses.T.contiguous()

    def find_final(self, merged: DeviceMerged, before: DeviceMerged | None) -> None:
        """Finds what ranks ask for and no rank asked for in the window before."""
        slots = self._asked_slots
        is_final = torch.ones(slots.numel(), dtype=torch.uint8, device=slots.device)
        if before is not None:
            assert merged.order is not None
            assert merged.ranks is not None
            places = self._intersect(merged.slots, before.slots, merged.num, before.num)
            by_slot = (places < 0).to(torch.uint8).index_select(0, merged.ranks - 1)  # of requests sorted by slot
            is_final = torch.empty_like(by_slot).scatter_(0, merged.order, by_slot)
        self._is_final = is_final, is_final

    def final(self) -> tuple[Tensor, list[int], list[int], None]:
        """Uint8 `[M]`: which of the rows that ranks asked for are final; how many of and for each rank."""
        assert self._is_final is not None
        return self._is_final[1], self.asked, self.sent, None

    def take_final(self, is_final: Tensor) -> None:
        """Takes what owners say of the rows that this rank asked for."""
        assert self._is_final is not None
        self._is_final = is_final, self._is_final[1]

    def sort(self) -> list[Tensor]:
        """Sorts what travels by phase; returns the counts that the host has to know."""
        num_phases, ends = len(self.filed) + 1, ((self._own_uses, self.sent), (self._asked_uses, self.asked))
        for index, (uses, sizes) in enumerate(ends):
            phases = None if uses is None else uses[0] + 1
            if self._is_final is not None:
                later = 1 if phases is None else phases
                phases = torch.where(self._is_final[index] != 0, FINAL, later).to(torch.int32)
            self._orders.append(None if phases is None else _sorted(phases, sizes, num_phases))
        for uses, sizes in ends:
            self._orders.append(None if uses is None else _sorted(uses[1] + 1, sizes, num_phases))
        return [each[1] for each in self._orders if each is not None]

    def make_room(self, numbers: Iterator[int]) -> None:
        """Makes room for all that this window will bring; rows are read where they arrive.

        Args:
            numbers: the counts that `sort` returned, on the host; takes no more than those.
        """
        num_parts, world_size, orders = len(self.filed), len(self.sent), []
        for found, sizes, phase in zip(
            self._orders, (self.sent, self.asked) * 2, (1, 1, num_parts, num_parts), strict=True
        ):
            if found is None:
                orders.append(Order.at_once(sizes, phase, num_parts + 1))
                continue
            by_phase = [list(islice(numbers, world_size)) for _ in range(num_parts + 1)]
            orders.append(Order(found[0], by_phase))
        self.rows_in, self.rows_out, self.gradients_out, self.gradients_in = orders
        order = self.gradients_out.entries
        self._keys = self._moving if order is None else self._moving.index_select(0, order)
        dim, num_asked = self._arena.shape[1], self._asked_slots.numel()
        self._came = torch.empty(num_asked, dim, dtype=self._dtype, device=self._arena.device)
        self.source, self.slots = self._arena.new_empty(self.num_unique, dim), self._reading()

    def _reading(self) -> Tensor:
        """Int32 `[U]`: which of the rows that come each unique id reads; copies stand behind those that travel."""
        places = _places(self.rows_in, len(self._moving), self._all)
        copies = torch.arange(len(places), self.num_unique, dtype=places.dtype, device=places.device)
        places = torch.cat([places, copies])
        return torch.empty_like(places).scatter_(0, self._all.to(torch.int64), places)

    def read_copies(self, slots: Tensor) -> None:
        """Brings this rank's copies of rows to where pooling reads them."""
        self._gather(self._arena, slots, self.source[len(self._moving) :])

    def take_rows(self, phase: int) -> Tensor:
        """The rows that others need in a phase."""
        part, order = self.rows_out.part(phase), self.rows_out.entries
        slots = self._asked_slots[part] if order is None else self._asked_slots.index_select(0, order[part])
        return self._gather(self._arena, slots)

    def rows_into(self, phase: int) -> Tensor:
        """Where the rows of a phase go."""
        return self.source[self.rows_in.part(phase)]

    def pack_gradients(self, phase: int) -> None:
        """Gradients are complete when they go."""

    def packed_gradients(self, phase: int) -> Tensor:
        """The gradients that go in a phase."""
        return self._gather(self.gradients(), self._keys[self.gradients_out.part(phase)])

    def copied_gradients(self) -> Tensor:
        """The gradients of copied rows."""
        return self._gather(self.gradients(), self.copied)

    def gradients_into(self, phase: int) -> Tensor:
        """Where the gradients of a phase go."""
        return self._came[self.gradients_in.part(phase)]

    def take_gradients(self, phase: int) -> None:
        """Gradients stay where they arrive."""

    def came(self) -> Tensor:
        """`[M, D]`: the gradients that came, in the order of the requests."""
        if self.gradients_in.entries is None:
            return self._came
        return self._gather(self._came, _places(self.gradients_in, len(self._came), self._came))

    def drop_came(self) -> None:
        """Gradients that came are applied, and not needed any more."""
        del self._came


def _used_here(gradients: Tensor) -> Tensor:
    """Gradients from the stream that computed, which the current stream is about to read.

    The window keeps them until a turn after its update, for which the stream that computes the next batch has waited.
    The program may compute that on another stream than this one, though: then nothing but the allocator can tell that
    the first stream must not have the memory back before this one is done.
    """
    if gradients.is_cuda:
        gradients.record_stream(torch.cuda.current_stream(gradients.device))
    return gradients


def _cut_bags(bags: Bags, layout: GroupLayout, first_bags: np.ndarray, ids: Sequence[Sequence[int]]) -> Bags:
    """The bags of some samples, whose ids then stand together."""
    weights = None if bags.weights is None else _joined(bags.weights, ids)
    return bags.describe(descriptors(layout, first_bags), bags.features.device, bags.offsets, weights)


def _joined(tensor: Tensor, pieces: Sequence[Sequence[int]]) -> Tensor:
    """Some pieces of a tensor, one after the other.

    >>> _joined(torch.tensor([5, 6, 7, 8]), [(0, 1), (2, 4)]).tolist()
    [5, 7, 8]
    """
    return torch.cat([tensor[begin:end] for begin, end in pieces])


def _sorted(phases: Tensor, sizes: Sequence[int], num_phases: int) -> tuple[Tensor, Tensor]:
    """Requests by phase, then by rank, each one's in their order; and how many each has, int64 `[phases · W]`.

    Args:
        phases: int32 `[n]`: of each request.
        sizes: how many there are for each rank.
        num_phases: P.
    """
    world_size, device = len(sizes), phases.device
    ranks = torch.arange(world_size, dtype=torch.int32, device=device)
    of_ranks = ranks.repeat_interleave(upload(torch.tensor(sizes, device="cpu"), device), output_size=sum(sizes))
    cells, order = torch.sort(phases * world_size + of_ranks, stable=True)
    bounds = torch.arange(num_phases * world_size + 1, dtype=cells.dtype, device=device)
    return order, torch.searchsorted(cells, bounds).diff()


def _places(order: Order, count: int, like: Tensor) -> Tensor:
    """int32 `[n]`: where each request travels."""
    places = torch.arange(count, dtype=torch.int32, device=like.device)
    return places if order.entries is None else torch.empty_like(places).scatter_(0, order.entries, places)
