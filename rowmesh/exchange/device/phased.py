"""Phased exchange between devices, of one group: the rows of a window travel with the micro-batches that need them.

    open    keys, and which micro-batches use them; owners merge what all ranks ask
    final   owners say which rows the window before does not touch; those rows
    fetch   for each micro-batch, the rows that come with it
    push    for each micro-batch, the gradients that go with it
    update  when all gradients are here

What travels in a phase stands together at both ends, in the order of the ranks: requests sorted by phase, stably. Both
ends sort alike, since both know the micro-batches that use every row. So a message is one piece of memory, and pooling
finds rows where they arrived.

Source: NestPipe §V, §IV-B (keys of two batches intersected). What `rowmesh.exchange.phased_group` is on a CPU; here the
owner keeps the distinct slots of the window before, sorted, instead of a number for every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch
from torch import Tensor

from rowmesh.exchange.device.phased_copies import PhasedCopies, places_of, travelling_uniques
from rowmesh.exchange.device.window import DeviceWindowGroup
from rowmesh.exchange.device_collective import DeviceGroup
from rowmesh.exchange.device_lanes import Merging
from rowmesh.exchange.window import Form
from rowmesh.mesh.channel import Channel, Message
from rowmesh.ops.look_up.device import places_in
from rowmesh.ops.transfer import upload
from rowmesh.optim.rules import Update
from rowmesh.tables.dense import compute_dtype

FINAL = 0  # the phase of rows that come before the window opens; that of micro-batch k is k + 1


@dataclass(frozen=True)
class Packing:
    """Requests in the order in which they travel.

    Attributes:
        order: int64 `[n]`: which request travels at each place; None where they travel in their own order.
        sizes: by phase, how many there are for each rank, or of each rank.
    """

    order: Tensor | None
    sizes: list[list[int]]

    @classmethod
    def at_once(cls, sizes: list[int], phase: int, num_phases: int) -> Packing:
        """All travels in one phase."""
        none = [0] * len(sizes)
        return cls(None, [sizes if each == phase else none for each in range(num_phases)])

    def part(self, phase: int) -> slice:
        """Where what travels in a phase stands."""
        ends = list(accumulate((sum(sizes) for sizes in self.sizes), initial=0))
        return slice(ends[phase], ends[phase + 1])

    def places(self, count: int, device: torch.device) -> Tensor:
        """int32 `[n]`: where each request travels."""
        if self.order is None:
            return torch.arange(count, dtype=torch.int32, device=device)
        return places_in(self.order)


class Sorting:
    """Requests being sorted by phase.

    Args:
        phases: int32 `[n]`: of each request.
        sizes: how many there are for each rank.
        num_phases: P.
    """

    def __init__(self, phases: Tensor, sizes: Sequence[int], num_phases: int) -> None:
        world_size, device = len(sizes), phases.device
        ranks = torch.arange(world_size, dtype=torch.int32, device=device)
        of_ranks = ranks.repeat_interleave(upload(torch.tensor(sizes, device="cpu"), device), output_size=sum(sizes))
        cells, self.order = torch.sort(phases * world_size + of_ranks, stable=True)
        bounds = torch.arange(num_phases * world_size + 1, dtype=cells.dtype, device=device)
        self.counts = torch.searchsorted(cells, bounds).diff()

    def packing(self, counts: Sequence[int], world_size: int) -> Packing:
        """What it came to, when the host knows the counts."""
        begins = range(0, len(counts), world_size)
        return Packing(self.order, [list(counts[begin : begin + world_size]) for begin in begins])


class DeviceTravel:
    """One group of one window under way.

    Attributes:
        window: what travels.
        merging: the distinct slots that ranks asked for.
        uses: int32 `[2, M]`: which micro-batches use each request of the ranks first and last; None where all are used
            by the same ones.
        sortings: of rows that come and go, and of gradients that go and come, while the host does not know the sizes;
            None where all travel at once.
        rows_in, rows_out, gradients_out, gradients_in: the same when it does.
        keys: `[U]`: the unique id whose gradient travels at each place.
        came: `[M, D]`: gradients, in the order in which they travel.
        copied: those of copied rows, under way to their homes.
    """

    def __init__(self, window: DeviceWindowGroup) -> None:
        self.window = window
        self.merging: Merging
        self.uses: Tensor | None = None
        self.sortings: list[Sorting | None] = []
        self.rows_in: Packing
        self.rows_out: Packing
        self.gradients_out: Packing
        self.gradients_in: Packing
        self.keys: Tensor
        self.came: Tensor
        self.copied: list[Message] = []


class DevicePhasedGroup:
    """One group's messages.

    Args:
        messages: of the plain step.
        channel: between the devices.
        form: how rows travel, "delta" or "unsplit".
    """

    def __init__(self, messages: DeviceGroup, channel: Channel, form: Form) -> None:
        from rowmesh.ops.gather.cuda import gather
        from rowmesh.ops.window.cuda import intersect

        self.exchange, self._messages, self._channel, self._form = messages.exchange, messages, channel, form
        self._gather, self._intersect = gather, intersect
        self._doing = f"exchanging group {self.exchange.group.name}"
        self._copies = PhasedCopies(messages) if len(messages.lanes) > 1 else None

    def post_keys(self, window: DeviceWindowGroup) -> list[Message]:
        """Tells the owners which rows are needed, and by which micro-batches."""
        posted = [self._messages.post_keys(window.group)]
        if (uses := self._own_uses(window)) is not None:
            posted.append(self._post(uses.T.contiguous(), window.group.lanes[0].sent, window.group.lanes[0].asked))
        if self._copies is not None:
            posted.append(self._copies.post_keys(window.group))
        return posted

    def take_keys(self, window: DeviceWindowGroup, keys: Sequence[Message]) -> DeviceTravel:
        """Merges what was asked, once it is here."""
        travel, group = DeviceTravel(window), window.group
        keys, copied = (keys[:-1], keys[-1]) if self._copies is not None else (keys, None)
        group.lanes[0].slots, *uses = (message.wait() for message in keys)
        travel.merging = self._messages.lanes[0].merged([group.lanes[0]])
        travel.uses = uses[0].T.contiguous() if uses else None
        if self._copies is not None and copied is not None:
            self._copies.take_keys(group, copied)
        return travel

    def find_final(self, travel: DeviceTravel, before: DeviceTravel | None) -> Tensor:
        """uint8 `[M]`: 1 for what ranks ask for and no rank asked for in the window before."""
        merged, group = travel.merging.merged, travel.window.group
        if before is None:
            return torch.ones(group.lanes[0].slots.numel(), dtype=torch.uint8, device=group.lanes[0].slots.device)
        places = self._intersect(merged.slots, before.merging.merged.slots, merged.num, before.merging.merged.num)
        is_final = (places < 0).to(torch.uint8).index_select(0, merged.ranks - 1)  # of requests sorted by slot
        return torch.empty_like(is_final).scatter_(0, merged.order, is_final)

    def post_final(self, travel: DeviceTravel, is_final: Tensor) -> Message:
        """Says which of the rows that were asked for are final."""
        return self._post(is_final, travel.window.group.lanes[0].asked, travel.window.group.lanes[0].sent)

    def sort(self, travel: DeviceTravel, final: tuple[Tensor, Tensor] | None) -> list[Tensor]:
        """Sorts what travels by phase; returns the counts that the host has to know.

        Args:
            travel: of the window.
            final: uint8 `[U]` and `[M]`: which of the rows that come and go are final; None where none is.
        """
        group, num_parts = travel.window.group, len(travel.window.parts)
        ends = ((self._own_uses(travel.window), group.lanes[0].sent), (travel.uses, group.lanes[0].asked))
        for index, (uses, sizes) in enumerate(ends):
            phases = None if uses is None else uses[0] + 1
            if final is not None:
                phases = torch.where(final[index] != 0, FINAL, 1 if phases is None else phases).to(torch.int32)
            travel.sortings.append(None if phases is None else Sorting(phases, sizes, num_parts + 1))
        for uses, sizes in ends:
            travel.sortings.append(None if uses is None else Sorting(uses[1], sizes, num_parts))
        return [sorting.counts for sorting in travel.sortings if sorting is not None]

    def _own_uses(self, window: DeviceWindowGroup) -> Tensor | None:
        """int32 `[2, U]`, by request."""
        if self._form != "delta" or window.uses is None:
            return None
        asked, uses = travelling_uniques(window.group), window.uses
        return torch.stack([uses.first.index_select(0, asked), uses.last.index_select(0, asked)])

    def settle(self, travel: DeviceTravel, numbers: Iterator[int]) -> None:
        """Makes room for all that this window will bring.

        Args:
            travel: of the window.
            numbers: the counts that `sort` returned, on the host; takes no more than those.
        """
        group, num_parts = travel.window.group, len(travel.window.parts)
        rows, gradients = (1, num_parts + 1), (num_parts - 1, num_parts)  # phase of all, where they travel at once
        packings = [
            Packing.at_once(sizes, *whole)
            if sorting is None
            else sorting.packing(list(islice(numbers, sorting.counts.numel())), self._channel.size)
            for sorting, sizes, whole in zip(
                travel.sortings,
                (group.lanes[0].sent, group.lanes[0].asked) * 2,
                (rows, rows, gradients, gradients),
                strict=True,
            )
        ]
        travel.rows_in, travel.rows_out, travel.gradients_out, travel.gradients_in = packings
        self._make_room(travel)

    def _make_room(self, travel: DeviceTravel) -> None:
        window, group, arena = travel.window, travel.window.group, self.exchange.arena
        uniques = travelling_uniques(group)
        window.source = arena.rows.new_empty(group.num_unique, arena.rows.shape[1])
        window.slots = places_of(group, travel.rows_in.places(len(uniques), uniques.device))
        order = travel.gradients_out.order
        travel.keys = uniques if order is None else uniques.index_select(0, order)
        dtype = compute_dtype(self.exchange.group.dtype)
        travel.came = torch.empty(group.lanes[0].slots.numel(), arena.rows.shape[1], dtype=dtype, device=uniques.device)

    def post_rows(self, travel: DeviceTravel, phase: int) -> Message:
        """Sends the rows that others need in a phase, and receives those that are needed here."""
        if self._copies is not None and phase == FINAL + 1:  # what came before the window was updated
            self._copies.read(travel.window)
        requests, packing = travel.window.group.lanes[0].slots, travel.rows_out
        out = packing.part(phase)
        slots = requests[out] if packing.order is None else requests.index_select(0, packing.order[out])
        rows = self._gather(self.exchange.arena.rows, slots)
        into = travel.window.source[travel.rows_in.part(phase)]
        return self._post(rows, packing.sizes[phase], travel.rows_in.sizes[phase], into)

    def post_gradients(self, travel: DeviceTravel, phase: int) -> Message:
        """Sends the gradients that are complete in a phase, and receives those of others."""
        keys = travel.keys[travel.gradients_out.part(phase)]
        gradients = self._gather(travel.window.gradients(), keys)
        into = travel.came[travel.gradients_in.part(phase)]
        if self._copies is not None and phase == len(travel.window.parts) - 1:
            travel.copied = self._copies.post_gradients(travel.window)
        return self._post(gradients, travel.gradients_out.sizes[phase], travel.gradients_in.sizes[phase], into)

    def update(self, travel: DeviceTravel, update: Update) -> None:
        """Updates the rows that were asked of this rank, gradients in the order of the ranks."""
        came, packing = travel.came, travel.gradients_in
        if packing.order is not None:
            came = self._gather(came, packing.places(len(came), came.device))
        lane = self._messages.lanes[0]
        lane.apply(travel.merging, came, update)
        lane.count(travel.window.group.lanes[:1], travel.merging)
        if self._copies is not None:
            self._copies.update(travel.window.group, travel.copied, update)

    def _post(
        self, out: Tensor, sizes_out: Sequence[int], sizes_in: Sequence[int], into: Tensor | None = None
    ) -> Message:
        return self._channel.post(out, sizes_out, sizes_in, self.exchange.counters, self._doing, into)
