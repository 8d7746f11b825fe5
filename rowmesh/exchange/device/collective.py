"""Collective transport of devices: what `rowmesh.exchange.collective` does, over tensors on devices.

A batch has one round for the counts of all groups, after which one copy brings them to the host, for each group one
round for the keys, one for the rows and one for the gradients. The ranks' hosts compare beside that, over gloo, what
they are about to do: a rank that does something else is named on all of them, and no device waits for it.

Source: FusedRec §3, Algorithm 1, lines 4–6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.device.checks import check_everywhere
from rowmesh.exchange.device.copies import CopiesLane
from rowmesh.exchange.device.group import DeviceGroup, compose
from rowmesh.exchange.device.lane import Merging, Requests
from rowmesh.exchange.device.route import DeviceExchange, DeviceRoutePart
from rowmesh.exchange.handshake import Handshake, Step
from rowmesh.exchange.update import Update
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.waiting import barrier
from rowmesh.tables import TableGroup

_COUNTING = "exchanging counts"


class DeviceCollective:
    """torch.distributed over NCCL, or over gloo where ranks share a device. Making one is collective.

    Attributes:
        reason: which, and why.
        channel: between the devices.
        hosts: between the ranks' hosts.
        groups: the messages of each group.
    """

    name, num_bytes = "collective", 0

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.common = CommonCounters()
        self._mesh, self._device = mesh, device
        self.channel = Channel.between_devices(mesh, device)
        self.reason = self.channel.reason
        self._num_fetches = self._num_pushes = 0

    def make_rows(self, group: TableGroup, num_slots: Sequence[int]) -> None:
        """Rows may be anywhere."""

    def connect(self, exchanges: Sequence[DeviceExchange]) -> None:
        """Prepares the message that opens every fetch and push."""
        per_node, column = self._mesh.ranks_per_node, None
        if any("node" in exchange.lane_kinds for exchange in exchanges):
            places = [range(place, self._mesh.world_size, per_node) for place in range(per_node)]
            column = Channel.between_devices(self._mesh.part(places), self._device)
        self.groups = [DeviceGroup(exchange, self.channel, per_node, column) for exchange in exchanges]
        self._lanes = [lane for group in self.groups for lane in group.lanes]
        self._copies = [lane for lane in self._lanes if isinstance(lane, CopiesLane)]
        self.hosts = Channel.between_hosts(self._mesh)
        # Which fetch or push this is; then how many routes are pushed, which, and of how many rows there are sums.
        self._handshake = Handshake(self._mesh, self.hosts, 3 + len(self._copies), self.common)
        self.barrier()

    def fetch(self, route: DeviceRoutePart, meanwhile: Callable[[Any], None]) -> None:
        """Tells the owners which rows are needed and receives them.

        Raises:
            IdRangeError: a batch of this rank has ids that are no rows.
            PeerError: one of another rank has.
        """
        self._num_fetches += 1
        self._handshake(self._num_fetches)
        self.exchange_counts(route)
        for group in route.groups:
            compose(group)
        pairs = list(zip(self.groups, route.groups, strict=True))
        keys = [messages.post_keys(group) for messages, group in pairs]
        copied = [messages.post_copied_keys(group) for messages, group in pairs]
        rows = [[messages.post_rows(group, work)] for (messages, group), work in zip(pairs, keys, strict=True)]
        for (messages, group), works, coming in zip(pairs, copied, rows, strict=True):
            coming += messages.read_copies(group, works)
            meanwhile(group)
            if torch.is_grad_enabled():
                messages.merge_requests(group)
        for (messages, group), coming in zip(pairs, rows, strict=True):
            messages.take_rows(group, coming)

    def exchange_counts(self, route: DeviceRoutePart) -> None:
        """Learns the sizes of all messages: the only time that the host waits for the device."""
        size = self._mesh.world_size
        refused = route.refused.expand(size, 1)
        counts = [part for group in route.groups for part in (group.routed.counts, group.routed.accesses)]
        mine = torch.cat([refused, *counts], 1)
        theirs = self.channel.exchange_equal(mine, self.common, _COUNTING)
        numbers = torch.cat([mine.flatten(), theirs.flatten(), route.outside]).cpu().numpy()
        sent, asked = numbers[: 2 * mine.numel()].reshape(2, size, -1)
        check_everywhere(route, self._mesh, numbers[2 * mine.numel() :].tolist(), asked[:, 0].tolist())
        column = 1
        for messages, group in zip(self.groups, route.groups, strict=True):
            part = slice(column, column + 2 * group.exchange.num_segments)
            messages.expect(group, *(numbers[:, part].reshape(size, 2, -1) for numbers in (sent, asked)))
            column = part.stop

    def push(self, routes: Sequence[DeviceRoutePart], updates: Sequence[Update], step: Step) -> None:
        """Sends gradients to the owners, which merge them in the order of the ranks and update."""
        requests, gradients = self._by_lane(routes)
        most, is_equal = self._compare(routes, requests, step)
        if not is_equal:
            self._ask_again(requests, gradients, most)
        if not most:
            return
        works = [
            lane.post_gradients(each, sums) for lane, each, sums in zip(self._lanes, requests, gradients, strict=True)
        ]
        merged = self._merged(requests)
        if self._copies and not (is_equal and most == 1):
            self._count_copies(merged)
        of_lanes = (update for group, update in zip(self.groups, updates, strict=True) for _ in group.lanes)
        for lane, each, merging, work, update in zip(self._lanes, requests, merged, works, of_lanes, strict=True):
            lane.push(each, merging, work, update)

    def _by_lane(self, routes: Sequence[DeviceRoutePart]) -> tuple[list[list[Requests]], list[list[Tensor]]]:
        """What routes asked for, and the gradients of it; of each lane a list, one item a route."""
        requests: list[list[Requests]] = [[] for _ in self._lanes]
        gradients: list[list[Tensor]] = [[] for _ in self._lanes]
        for route in routes:
            groups = zip(self.groups, route.groups, strict=True)
            pairs = [pair for messages, group in groups for pair in messages.pushed(group)]
            for lane, (each, sums) in enumerate(pairs):
                requests[lane].append(each)
                gradients[lane].append(sums)
        return requests, gradients

    def _compare(
        self, routes: Sequence[DeviceRoutePart], requests: Sequence[list[Requests]], step: Step
    ) -> tuple[int, bool]:  # fmt: skip
        """The most routes that a rank pushes, and whether all ranks push the same ones.

        Where that is one route, what ranks told of copies beside it is right.
        """
        self._num_pushes += 1
        mine = [len(routes), hash(tuple(route.number for route in routes))]
        self._handshake.numbers[:, 1:3] = mine
        if len(routes) == 1:
            self._handshake.numbers[:, 3:] = self._num_copies(self._merged(requests))
        rows = self._handshake(-self._num_pushes, step)
        self._take_counts(rows[:, 3:])
        pushed = rows[:, 1:3].tolist()
        return max(count for count, _ in pushed), pushed.count(mine) == len(pushed)

    def _merged(self, requests: Sequence[list[Requests]]) -> list[Merging]:
        return [lane.merged(each) for lane, each in zip(self._lanes, requests, strict=True)]

    def _num_copies(self, merged: Sequence[Merging]) -> list[int]:
        """Copied rows that this rank, their home, will have sums of."""
        return [each.count for lane, each in zip(self._lanes, merged, strict=True) if lane in self._copies]

    def count_copies(self, requests: Sequence[Requests]) -> None:
        """Learns how many sums each rank will send, of what was asked for and merged, lane by lane."""
        self._count_copies(self._merged([[each] for each in requests]))

    def _count_copies(self, merged: Sequence[Merging]) -> None:
        """Learns how many sums each rank will send, where that was not known when they compared what they push."""
        nums = torch.tensor([self._num_copies(merged)] * self._mesh.world_size, dtype=torch.int64, device="cpu")
        self._take_counts(self.hosts.exchange_equal(nums, self.common, _COUNTING).numpy())

    def _take_counts(self, counts: np.ndarray) -> None:
        for lane, of_ranks in zip(self._copies, counts.T.tolist(), strict=True):
            lane.counts = of_ranks

    def _ask_again(
        self, requests: Sequence[list[Requests]], gradients: Sequence[list[Tensor]], most: int
    ) -> None:  # fmt: skip
        """Brings routes that not all ranks push in line: ranks without one ask for nothing, the others once more.

        Owners know the requests of the look-ups, but not those of the ranks that push alone: seldom, and never twice.
        """
        for lane, each, sums in zip(self._lanes, requests, gradients, strict=True):
            missing = most - len(each)
            each += [lane.nothing() for _ in range(missing)]
            sums += [lane.no_gradients() for _ in range(missing)]
        numbered = [(lane, each) for lane, of_lane in zip(self._lanes, requests, strict=True) for each in of_lane]
        sent = [np.column_stack([each.sent, each.ids_sent]) for _, each in numbered]
        ends = list(accumulate(part.shape[1] for part in sent))
        asked = self.hosts.exchange_equal(torch.from_numpy(np.hstack(sent)), self.common, _COUNTING).numpy()
        for (lane, each), part in zip(numbered, np.split(asked, ends[:-1], 1), strict=True):
            each.asked, each.ids_asked, each.merging = part[:, 0].tolist(), part[:, 1:], None
            lane.take_keys(each, lane.post_keys(each))

    def barrier(self) -> None:
        """Waits for all ranks, and for what their devices do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        barrier(self._mesh, "waiting at a barrier")

    def close(self) -> None:
        """Nothing is held that does not go with the collection."""
