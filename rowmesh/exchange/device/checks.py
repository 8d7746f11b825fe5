"""Ids that are no rows, on a device: counted there, looked at by the host later, before anything is updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from rowmesh.errors import IdRangeError, PeerError
from rowmesh.exchange.device.route import DeviceRouteGroup, DeviceRoutePart
from rowmesh.mesh import Mesh
from rowmesh.ops.transfer import Late


def _num_unique(group: DeviceRouteGroup) -> Tensor:
    return group.unique.num_unique


def count_unique(group: DeviceRouteGroup, numbers: Sequence[int]) -> None:
    """Counts unique ids, which the numbers add up to."""
    group.num_found = sum(numbers)
    group.exchange.counters.unique_ids += group.num_found


class Unread:
    """Batches whose numbers the host has not looked at yet: ids outside their tables, and others of each group.

    Args:
        rank: this one, for messages.
        numbers: int64 `[n]` of a group, on the device: by default how many unique ids it has.
        take: is given them when the host knows them.
    """

    def __init__(
        self, rank: int, numbers: Callable[[DeviceRouteGroup], Tensor] = _num_unique,
        take: Callable[[DeviceRouteGroup, list[int]], None] = count_unique,
    ) -> None:  # fmt: skip
        self._rank, self._numbers, self._take = rank, numbers, take
        self._waiting: list[tuple[DeviceRoutePart, list[int], Late]] = []

    def add(self, route: DeviceRoutePart) -> None:
        """Sends a batch's numbers on their way to the host."""
        parts = [route.outside, *(self._numbers(group) for group in route.groups)]
        self._waiting.append((route, [len(part) for part in parts], Late(torch.cat(parts))))

    def read(self) -> None:
        """Looks at all of them; waits for what the device did up to there, not for what came after.

        Raises:
            IdRangeError: a batch had ids that are no rows; what is to be known of the others is known.
        """
        waiting, self._waiting = self._waiting, []
        errors = [error for route, sizes, late in waiting for error in self._read(route, sizes, iter(late.read()))]
        if errors:
            raise errors[0]

    def _read(self, route: DeviceRoutePart, sizes: Sequence[int], numbers: Iterator[int]) -> list[IdRangeError]:
        outside, *of_groups = (list(islice(numbers, size)) for size in sizes)
        for group, mine in zip(route.groups, of_groups, strict=True):
            self._take(group, mine)
        try:
            route.check_ids(outside, self._rank)
        except IdRangeError as error:
            return [error]
        return []

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
    check_peers(mesh, refused)


def check_peers(mesh: Mesh, refused: Sequence[int]) -> None:
    """Raises PeerError where a rank refuses a batch; names it."""
    if any(refused):
        guilty = ", ".join(f"rank {mesh.name(rank)}" for rank, count in enumerate(refused) if count)
        raise PeerError(
            f"rank {mesh.name(mesh.rank)}: {guilty} refused a batch with ids outside their tables; its own output says "
            "which"
        )
