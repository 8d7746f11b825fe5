"""Ids that are no rows, on a device: counted there, looked at by the host later, before anything is updated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rowmesh.errors import PeerError
from rowmesh.exchange.device_route import DeviceRoutePart
from rowmesh.mesh import Mesh
from rowmesh.ops.transfer import Late


class Unread:
    """Batches whose numbers the host has not looked at yet: ids outside their tables, and unique ids.

    Args:
        rank: this one, for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._waiting: list[tuple[DeviceRoutePart, Late]] = []

    def add(self, route: DeviceRoutePart) -> None:
        """Sends a batch's numbers on their way to the host."""
        unique = [group.unique.num_unique for group in route.groups]
        self._waiting.append((route, Late(torch.cat([route.outside, *unique]))))

    def read(self) -> None:
        """Looks at all of them; waits for what the device did up to there, not for what came after.

        Raises:
            IdRangeError: a batch had ids that are no rows.
        """
        waiting, self._waiting = self._waiting, []
        for route, late in waiting:
            numbers = late.read()
            for group, count in zip(route.groups, numbers[len(route.outside) :], strict=True):
                group.exchange.counters.unique_ids += count
            route.check_ids(numbers[: len(route.outside)], self._rank)

    def clear(self) -> None:
        """Forgets them."""
        self._waiting.clear()


def check_everywhere(route: DeviceRoutePart, mesh: Mesh, outside: Sequence[int], refused: Sequence[int]) -> None:
    """Raises on all ranks where one of them has ids that are no rows.

    Args:
        route: of this rank.
        mesh: the ranks.
        outside: what the route has on the device.
        refused: how many ids each rank refuses.

    Raises:
        IdRangeError: this rank does.
        PeerError: another one does.
    """
    route.check_ids(outside, mesh.name(mesh.rank))
    if any(refused):
        guilty = ", ".join(f"rank {mesh.name(rank)}" for rank, count in enumerate(refused) if count)
        raise PeerError(
            f"rank {mesh.name(mesh.rank)}: {guilty} refused a batch with ids outside their tables; its own output says "
            "which"
        )
