"""Local transport of a device: one rank, whose rows are read and updated in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.device.checks import Unread
from rowmesh.exchange.device.route import DeviceExchange, DeviceRouteGroup, DeviceRoutePart
from rowmesh.exchange.handshake import Step
from rowmesh.exchange.update import Update
from rowmesh.tables import TableGroup

if TYPE_CHECKING:
    from rowmesh.ops.merge_update.cuda import Merged

_NO_SLOT = -1  # the bits of 2³² − 1, which merging leaves out


class DeviceLocal:
    """One rank. The host never waits; see [Note: what the host waits for] in `rowmesh.exchange.devices`.

    Args:
        reason: why there is one.
        rank: its name, for messages.
    """

    name, num_bytes = "local", 0

    def __init__(self, reason: str, rank: int = 0) -> None:
        from rowmesh.ops.merge_update import cuda

        self.common, self.reason = CommonCounters(), reason
        self._merge, self._singles = cuda.merge, cuda.singles
        self._unread = Unread(rank)

    def make_rows(self, group: TableGroup, num_slots: Sequence[int]) -> None:
        """Rows may be anywhere."""

    def connect(self, exchanges: Sequence[DeviceExchange]) -> None:
        """Nobody to connect to."""
        self._exchanges = exchanges

    def fetch(self, route: DeviceRoutePart, meanwhile: Callable[[Any], None]) -> None:
        """All rows are here; what earlier batches asked for is looked at."""
        self._unread.read()
        self._unread.add(route)
        if not torch.is_grad_enabled():  # perhaps nothing comes that would look later
            self._unread.read()
        for group in route.groups:
            meanwhile(group)
        for group in route.groups:
            group.exchange.bring(group)

    def push(self, routes: Sequence[DeviceRoutePart], updates: Sequence[Update], step: Step) -> None:
        """Merges the routes' gradients and updates."""
        self._unread.read()
        for index, (exchange, update) in enumerate(zip(self._exchanges, updates, strict=True)):
            groups = [route.groups[index] for route in routes]
            if groups:
                held, (merged, gradients) = [group.held for group in groups], self._merged(groups)
                exchange.apply(merged, gradients, update, groups[0].num_found if len(groups) == 1 else None)
                if len(groups) == 1:
                    exchange.count_alone(groups[0])
                else:
                    exchange.count(np.sum([exchange.accesses(group) for group in groups], axis=0), merged, held)
                exchange.give_up(held)

    def _merged(self, groups: Sequence[DeviceRouteGroup]) -> tuple[Merged, Tensor]:
        """The slots of several routes, and the gradients for them."""
        if len(groups) == 1:
            count = groups[0].unique.num_unique.to(torch.int32)
            return self._singles(groups[0].places.to(torch.int64), count), groups[0].summed
        slots = torch.cat([_slots(group) for group in groups])
        return self._merge(slots, most=len(groups)), torch.cat([group.summed for group in groups])

    def barrier(self) -> None:
        """Nobody to wait for; says what is wrong with batches that nobody looked at yet."""
        self._unread.read()

    def close(self) -> None:
        """Nothing to give back."""
        self._unread.clear()


def _slots(group: DeviceRouteGroup) -> Tensor:
    """int32 `[N]`, of which the first are the slots of unique ids, the others none."""
    places = group.places
    number = torch.arange(places.numel(), device=places.device)
    return torch.where(number < group.unique.num_unique, places, _NO_SLOT)
