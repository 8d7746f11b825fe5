"""Collective transport of devices: what `rowmesh.exchange.collective` does, over tensors on devices.

A batch has one round for the counts of all groups, after which one copy brings them to the host, for each group one
round for the keys, one for the rows and one for the gradients. The ranks' hosts compare beside that, over gloo, what
they are about to do: a rank that does something else is named on all of them, and no device waits for it.

Source: FusedRec §3, Algorithm 1, lines 4–6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.device_checks import check_everywhere
from rowmesh.exchange.device_group import DeviceGroup, Entries, compose
from rowmesh.exchange.device_messages import DeviceChannel
from rowmesh.exchange.device_route import DeviceExchange, DeviceRoutePart
from rowmesh.exchange.messages import Channel
from rowmesh.exchange.opening import Opening
from rowmesh.exchange.update import Update
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import barrier

_COUNTING = "exchanging counts"


class DeviceCollective:
    """torch.distributed over NCCL, or over gloo where ranks share a device. Making one is collective.

    Attributes:
        reason: which, and why.
        channel: between the devices.
        hosts: between the ranks' hosts.
        groups: the messages of each group.
    """

    name = "collective"

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.common = CommonCounters()
        self._mesh, self._device = mesh, device
        self.channel = DeviceChannel(mesh, device)
        self.reason = self.channel.reason
        self._num_fetches = self._num_pushes = 0

    def connect(self, exchanges: Sequence[DeviceExchange]) -> None:
        """Prepares the message that opens every fetch and push."""
        self.groups = [DeviceGroup(exchange, self.channel, self._mesh.ranks_per_node) for exchange in exchanges]
        self.hosts = Channel(self._mesh, self._mesh.group, self._mesh.rank, self._mesh.world_size)
        self._opening = Opening(self._mesh, self.hosts, 3, self.common)
        self.barrier()

    def fetch(self, route: DeviceRoutePart, meanwhile: Callable[[Any], None]) -> None:
        """Tells the owners which rows are needed and receives them.

        Raises:
            IdRangeError: a batch of this rank has ids that are no rows.
            PeerError: one of another rank has.
        """
        self._num_fetches += 1
        self._opening(self._num_fetches)
        self.exchange_counts(route)
        for group in route.groups:
            compose(group)
        pairs = list(zip(self.groups, route.groups, strict=True))
        keys = [messages.post_keys(group) for messages, group in pairs]
        rows = [messages.post_rows(group, work) for (messages, group), work in zip(pairs, keys, strict=True)]
        for group in route.groups:
            meanwhile(group)
        for (messages, group), work in zip(pairs, rows, strict=True):
            messages.take_rows(group, work)

    def exchange_counts(self, route: DeviceRoutePart) -> None:
        """Learns the sizes of all messages: the only time that the host waits for the device."""
        size = self._mesh.world_size
        refused = route.refused.expand(size, 1)
        mine = torch.cat([refused, *(group.routed.counts for group in route.groups)], 1)
        theirs = self.channel.exchange_equal(mine, self.common, _COUNTING)
        numbers = torch.cat([mine.flatten(), theirs.flatten(), route.outside]).cpu().numpy()
        sent, asked = numbers[: 2 * mine.numel()].reshape(2, size, -1)
        check_everywhere(route, self._mesh, numbers[2 * mine.numel() :].tolist(), asked[:, 0].tolist())
        column = 1
        for messages, group in zip(self.groups, route.groups, strict=True):
            part = slice(column, column + group.exchange.num_segments)
            messages.expect(group, sent[:, part], asked[:, part])
            column = part.stop

    def push(self, routes: Sequence[DeviceRoutePart], updates: Sequence[Update]) -> None:
        """Sends gradients to the owners, which merge them in the order of the ranks and update."""
        most, is_equal = self._compare(routes)
        pushed = [[messages.entries(route.groups[i]) for route in routes] for i, messages in enumerate(self.groups)]
        if not is_equal:
            self._ask_again(pushed, most)
        gradients = [messages.post_gradients(entries) for messages, entries in zip(self.groups, pushed, strict=True)]
        for messages, entries, works, update in zip(self.groups, pushed, gradients, updates, strict=True):
            messages.push(entries, works, update)

    def _compare(self, routes: Sequence[DeviceRoutePart]) -> tuple[int, bool]:
        """The most routes that a rank pushes, and whether all ranks push the same ones."""
        self._num_pushes += 1
        mine = [len(routes), hash(tuple(route.number for route in routes))]
        self._opening.numbers[:, 1:3] = mine
        pushed = self._opening(-self._num_pushes)[:, 1:3].tolist()
        return max(count for count, _ in pushed), pushed.count(mine) == len(pushed)

    def _ask_again(self, pushed: Sequence[list[Entries]], most: int) -> None:
        """Brings routes that not all ranks push in line: ranks without one ask for nothing, the others once more.

        Owners know the requests of the look-ups, but not those of the ranks that push alone: seldom, and never twice.
        """
        for messages, entries in zip(self.groups, pushed, strict=True):
            entries += [messages.nothing() for _ in range(most - len(entries))]
        numbered = [(i, each) for i, entries in enumerate(pushed) for each in entries]
        sent = torch.tensor([each.sent for _, each in numbered], dtype=torch.int64)
        asked = self.hosts.exchange_equal(sent.T.contiguous(), self.common, _COUNTING).T.tolist()
        for (i, each), sizes in zip(numbered, asked, strict=True):
            self.groups[i].ask_again(each, sizes)

    def barrier(self) -> None:
        """Waits for all ranks, and for what their devices do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        barrier(self._mesh, "waiting at a barrier")

    def close(self) -> None:
        """Nothing is held that does not go with the collection."""
