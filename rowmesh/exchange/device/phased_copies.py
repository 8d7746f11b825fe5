"""Phased exchange between devices, of copied rows: read in place when their window opens, pushed as a whole.

Every rank has them, so nothing is fetched. Their gradients go to the homes after the last micro-batch, and the update
is that of the plain step: homes send sums to all ranks (`rowmesh.exchange.device.copies`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rowmesh.exchange.device.window import DeviceWindowGroup
from rowmesh.exchange.device_collective import DeviceGroup
from rowmesh.exchange.device_lanes import Requests
from rowmesh.exchange.route import RouteGroup
from rowmesh.mesh.channel import Message
from rowmesh.optim.rules import Update


class PhasedCopies:
    """The second lane of one group.

    Args:
        messages: of the plain step, of a group with copied rows.
    """

    def __init__(self, messages: DeviceGroup) -> None:
        from rowmesh.ops.gather.cuda import gather

        self._lane, self._exchange, self._gather = messages.lanes[1], messages.exchange, gather

    def post_keys(self, group: RouteGroup) -> Message:
        """Tells homes which copies are read here."""
        return self._lane.post_keys(group.lanes[1])

    def take_keys(self, group: RouteGroup, keys: Message) -> None:
        """Merges what is read anywhere; how many rows that are is on its way to the host."""
        self._lane.take_keys(group.lanes[1], keys)
        self._lane.merged([group.lanes[1]])

    def read(self, window: DeviceWindowGroup) -> None:
        """Brings own copies to where pooling reads them: behind all rows that travel."""
        requests = window.group.lanes[1]
        self._gather(self._exchange.arena.rows, requests.keys, window.source[len(window.group.lanes[0].keys) :])

    def post_gradients(self, window: DeviceWindowGroup) -> list[Message]:
        """Sends the gradients of all copies to their homes."""
        sums = self._gather(window.gradients(), copied_uniques(window.group))
        return self._lane.post_gradients([window.group.lanes[1]], [sums])

    def update(self, group: RouteGroup, gradients: list[Message], update: Update) -> None:
        """Updates the copies of all ranks alike."""
        requests: Requests = group.lanes[1]
        self._lane.push([requests], self._lane.merged([requests]), gradients, update)


def travelling_uniques(group: RouteGroup) -> Tensor:
    """int32: the unique ids whose rows travel, in the order in which they are asked for."""
    return group.look_up.uniques[: len(group.lanes[0].keys)]


def copied_uniques(group: RouteGroup) -> Tensor:
    """int32: the unique ids whose rows every rank has."""
    return group.look_up.uniques[len(group.lanes[0].keys) :]


def places_of(group: RouteGroup, travelling: Tensor) -> Tensor:
    """int32 `[U]`: which row each unique id reads, given that of those which travel; copies stand behind them."""
    copies = torch.arange(
        len(travelling), group.num_unique, dtype=travelling.dtype, device=travelling.device
    )  # none, where all rows travel
    places = torch.cat([travelling, copies])
    return torch.empty_like(places).scatter_(0, group.look_up.uniques.to(torch.int64), places)
