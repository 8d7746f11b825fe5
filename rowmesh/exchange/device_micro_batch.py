"""Windows by micro-batch between devices, over the lanes of their collective transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from rowmesh._support.counters import CommonCounters
from rowmesh.exchange.device_group import DeviceGroupExchange
from rowmesh.exchange.device_lanes import Lane, Lanes, Merging, Requests
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.micro_batch import MicroBatchWindows
from rowmesh.exchange.micro_batch_group import MicroBatchGroup
from rowmesh.exchange.route import Routed, ShardGroupRoute
from rowmesh.exchange.window import Form, Window, WindowGroup
from rowmesh.exchange.windows import Collected, StoredTables, WindowOptions
from rowmesh.mesh.channel import Channel, Message
from rowmesh.ops.merge_update import DeviceMerged, sum_merged
from rowmesh.ops.window import FINAL
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.update_rules import Update


class DeviceMicroBatchWindows(MicroBatchWindows):
    """Windows between devices whose rows and gradients travel by micro-batch.

    Args:
        tables, options, hosts, common: as for `MicroBatchWindows`.
        groups: the messages of each group.
        expect: learns how many requests come from every rank.
        count_copies: learns how many sums of copied rows each rank will send, given the requests lane by lane.
    """

    def __init__(
        self,
        tables: StoredTables,
        options: WindowOptions,
        groups: Sequence[OnDevice],
        hosts: Channel,
        common: CommonCounters,
        *,
        expect: Callable[[Routed], None],
        count_copies: Callable[[Sequence[Requests]], None],
    ) -> None:
        super().__init__(tables, options, groups, hosts, common)
        self.reason += f", over {tables.reason}"
        self._on_device, self._learn_sizes, self._count_copies = groups, expect, count_copies

    def _expect(self, window: Window, sizes: np.ndarray) -> None:
        self._learn_sizes(ShardGroupRoute(window.route, self._tables.indices))
        super()._expect(window, sizes)

    def collect(self, window: Window, step: Step, *, forgets: bool) -> Collected:
        """Ranks learn how many sums of copied rows come; see `MicroBatchWindows.collect`. Collective."""
        if not forgets and any(each.has_copies for each in self._on_device):
            pairs = zip(self._on_device, self._mine(window), strict=True)
            self._count_copies([request for each, group in pairs for request in each.requests(group)])
        return super().collect(window, step, forgets=forgets)


class OnDevice(MicroBatchGroup):
    """On a device: the owner keeps the distinct slots of the window before, sorted, to find which rows are final.

    Rows that every rank has a copy of are read in place when their window opens. Their gradients go to the owners after
    the last micro-batch, and the update is that of the plain step: owners send sums to all ranks.

    Args:
        exchange: the group's.
        lanes: of the plain step.
        channel: between the devices.
        form: how rows travel, "delta" or "unsplit".

    Attributes:
        has_copies: whether copied rows have messages of their own.
    """

    def __init__(self, exchange: DeviceGroupExchange, lanes: Sequence[Lane], channel: Channel, form: Form) -> None:
        super().__init__(exchange, channel, channel, form)
        self.exchange = exchange
        self._lane, *copies = lanes
        self._copies = copies[0] if copies else None
        self.has_copies = self._copies is not None

    def expect(self, window: WindowGroup, sizes: np.ndarray) -> None:
        """The transport has exchanged them."""
        group = window.group
        arena, dtype = self.exchange.arena.rows, compute_dtype(self.exchange.group.dtype)
        direct = self.requests(window)[0]
        window.on_device.open(group.look_up.uniques, direct.sent, direct.asked, arena, dtype)

    @staticmethod
    def requests(window: WindowGroup) -> list[Requests]:
        """The requests, lane by lane."""
        return window.group.opened_as(Lanes).requests

    def _keys(self, window: WindowGroup) -> tuple[Tensor, None]:
        return self.requests(window)[0].keys, None

    def post_keys(self, window: WindowGroup) -> list[Message]:
        """Sends requests to the owners, with the micro-batches that use each row, and which copies are read."""
        posted = super().post_keys(window)
        if self._copies is not None:
            posted.append(self._copies.post_keys(self.requests(window)[1]))
        return posted

    def take_keys(self, window: WindowGroup, messages: Sequence[Message]) -> None:
        """Merges what ranks ask for; how many copied rows they read is on its way to the host."""
        requests, copied = self.requests(window), messages[-1]
        keys = messages[:-1] if self._copies is not None else messages
        slots, *uses = (message.wait() for message in keys)
        requests[0].take(slots, None)
        window.on_device.take_requests(slots, uses[0] if uses else None)
        self._merging(window)
        if self._copies is not None:
            self._copies.take_keys(requests[1], copied)
            self._copies.merged([requests[1]])

    def _merging(self, window: WindowGroup) -> Merging:
        return self._lane.merged([self.requests(window)[0]])  # once for one

    def _find_final(self, window: WindowGroup, before: WindowGroup | None) -> None:
        others = None if before is None else self._merging(before).merged
        window.on_device.find_final(self._merging(window).merged, others)

    def _begin_phase(self, window: WindowGroup, phase: int) -> None:
        if self._copies is not None and phase == FINAL + 1:  # what came before the window was updated
            window.on_device.read_copies(self.requests(window)[1].keys)

    def post_gradients(self, window: WindowGroup, phase: int) -> Message:
        """Sends the gradients that are complete in a phase; those of copied rows in the last one."""
        if self._copies is not None and phase == len(window.parts):
            sums = window.on_device.copied_gradients()
            posted = self._copies.post_gradients([self.requests(window)[1]], [sums])
            window.group.opened_as(Lanes).keep_coming(posted)
        return super().post_gradients(window, phase)

    def _sums(self, window: WindowGroup) -> tuple[Tensor, Tensor]:
        """See `MicroBatchGroup`; the update adds gradients up once more, as it changes rows."""
        merging, (_, *copied) = self._merging(window), self.requests(window)
        lanes = [(merging, window.on_device.came())]
        if self._copies is not None:
            lanes.append((self._copies.merged(copied), window.group.opened_as(Lanes).came()))
        found = [self._valid_sums(each.merged.with_gradients(came)) for each, came in lanes]
        slots, sums = map(torch.cat, zip(*found, strict=True))
        return slots, sums

    @staticmethod
    def _valid_sums(merged: DeviceMerged) -> tuple[Tensor, Tensor]:
        assert merged.gradients is not None
        num = int(merged.num)
        sums = merged.gradients.new_empty(merged.most_slots, merged.gradients.shape[1])
        sum_merged(merged, sums)
        return merged.slots[:num], sums[:num]

    def update(self, window: WindowGroup, update: Update, number: int) -> None:
        """Updates the requested rows, gradients in the order of the ranks; and copied rows alike."""
        (direct, *copied), merging = self.requests(window), self._merging(window)
        self._lane.apply(merging, window.on_device.came(), update)
        self._lane.count([direct], merging)
        if self._copies is not None:
            came = window.group.opened_as(Lanes).take_coming()
            self._copies.push(copied, self._copies.merged(copied), came, update)
        window.on_device.drop_came()

    def forget(self, window: WindowGroup, number: int) -> None:
        """The gradients that came are not used."""
        super().forget(window, number)
        for message in window.group.opened_as(Lanes).take_coming():
            message.wait()
        window.on_device.drop_came()
