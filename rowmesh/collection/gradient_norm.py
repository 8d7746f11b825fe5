"""The norm of the gradients of rows, for clipping: of the sums over all ids of all ranks that name a row.

No rank has these sums before the update, in which owners make them. So gradients travel once more, between hosts, also
those that are on a device: those of a row go to the rank that its number gives, which adds them up in float64. Of
tensor-train tables the gradients are those of the cores, which are made here and, by the update, once more. Guests of
dynamic tables, ids that have no row of their own, get no update: their gradients do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.exchange.cores import CoreShardGroup
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.route import AnyRouteGroup, Route
from rowmesh.exchange.squares import DOING, sum_of_squares_by_key
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import complete, gather_objects
from rowmesh.ops.look_up.device import DeviceLookUp
from rowmesh.ops.look_up.host import HostLookUp
from rowmesh.placement import AddressMap
from rowmesh.placement.address_map import RELAYS
from rowmesh.tables.dense import compute_dtype


def gradient_norm(
    mesh: Mesh,
    exchanges: Sequence[GroupExchange],
    computed: Sequence[CoreShardGroup],
    routes: Sequence[Route],
    guests: Mapping[str, np.ndarray],
) -> float:
    """The norm of the gradients that wait, of the mean over ranks; the same number on all ranks.

    Collective and blocking; moves every gradient once, as a step does. For arguments and errors see `squares`.
    """
    return norm_of(gather_objects(mesh, squares(mesh, exchanges, computed, routes, guests), DOING))


def norm_of(sums: Sequence[float]) -> float:
    """The norm of the mean over ranks, given the sum of squares that each has added up."""
    return float(np.sqrt(sum(sums))) / len(sums)


def squares(
    mesh: Mesh,
    exchanges: Sequence[GroupExchange],
    computed: Sequence[CoreShardGroup],
    routes: Sequence[Route],
    guests: Mapping[str, np.ndarray],
    known: Mapping[int, float] | None = None,
) -> float:
    """The sum of squares of the gradients that this rank adds up, summed over ranks. Collective and blocking.

    Args:
        mesh: all ranks.
        exchanges: of all groups.
        computed: those of tensor-train tables.
        routes: whose gradients wait.
        guests: of each dynamic table the rows whose gradients are dropped.
        known: of groups whose gradients have come to their owners the sums of squares, by number.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    known = known or {}
    total = sum(_of_cores(mesh, each, routes) for each in computed)
    for number, exchange in enumerate(exchanges):
        if exchange.is_frozen or not exchange.group.stores_rows:
            continue
        groups = [route.groups[number] for route in routes]
        total += known[number] if number in known else _sum_of_squares(mesh, exchange, groups, guests)
    return total


def are_finite(exchanges: Sequence[GroupExchange], routes: Sequence[Route], guests: Mapping[str, np.ndarray]) -> bool:
    """Whether this rank's gradients of rows are finite, but for those of guests.

    Args:
        exchanges: of all groups.
        routes: whose gradients wait.
        guests: as for `gradient_norm`.
    """
    for number, exchange in enumerate(exchanges):
        groups = [route.groups[number] for route in routes if not exchange.is_frozen]
        if exchange.is_dynamic:
            pairs = _summands(exchange, groups, guests)
            is_finite = all(bool(gradients.isfinite().all()) for _, gradients in pairs)
        else:
            is_finite = all(bool(group.look_up.is_finite()) for group in groups)
        if not is_finite:
            return False
    return True


def _summands(
    exchange: GroupExchange, groups: Sequence[AnyRouteGroup], guests: Mapping[str, np.ndarray]
) -> list[tuple[Tensor, Tensor]]:
    """The numbers of rows that look-ups asked for, int64 `[U]`, and their gradients, `[U, D]`, without guests."""
    find = _on_host(exchange) if exchange.device is None else _on_device(exchange)
    pairs = [find(group.look_up) for group in groups]
    tables = zip(exchange.group.tables, _first_numbers(exchange), strict=False)
    dropped = [first + guests[table.name] for table, first in tables if table.name in guests]
    if not any(map(len, dropped)):
        return pairs
    stays = [~torch.isin(numbers, torch.from_numpy(np.concatenate(dropped))) for numbers, _ in pairs]
    return [(numbers[mask], found[mask]) for (numbers, found), mask in zip(pairs, stays, strict=True)]


def _sum_of_squares(
    mesh: Mesh, exchange: GroupExchange, groups: Sequence[AnyRouteGroup], guests: Mapping[str, np.ndarray]
) -> float:
    """The sum over the rows that this rank adds up."""
    dim, dtype = exchange.group.dim, compute_dtype(exchange.group.dtype)
    pairs = _summands(exchange, groups, guests)
    keys = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(numbers for numbers, _ in pairs)])
    gradients = torch.cat([torch.empty(0, dim, dtype=dtype, device="cpu"), *(found for _, found in pairs)])
    return sum_of_squares_by_key(mesh, keys, gradients)


def _on_host(exchange: GroupExchange) -> Callable[[HostLookUp], tuple[Tensor, Tensor]]:
    """A function from a look-up to the numbers of its rows, int64 `[U]`, and their gradients, `[U, D]`."""
    rows = _RowNumbers(exchange)

    def find(look_up: HostLookUp) -> tuple[Tensor, Tensor]:
        parts = look_up.by_row()
        return torch.cat([*map(rows, parts)]), torch.cat([part.summed for part in parts])

    return find


def _on_device(exchange: GroupExchange) -> Callable[[DeviceLookUp], tuple[Tensor, Tensor]]:
    """The same of a look-up on a device."""
    first = torch.tensor(_first_numbers(exchange)[:-1], device=exchange.device)

    def find(look_up: DeviceLookUp) -> tuple[Tensor, Tensor]:
        numbers = look_up.row_numbers(first)
        return numbers.cpu(), look_up.summed[: len(numbers)].cpu()

    return find


def _first_numbers(exchange: GroupExchange) -> list[int]:
    return list(accumulate((table.num_rows for table in exchange.group.tables), initial=0))


def _of_cores(mesh: Mesh, shard_group: CoreShardGroup, routes: Sequence[Route]) -> float:
    """The sum of squares of the gradients of cores; of all ranks the first one gives it."""
    found = torch.cat([torch.zeros(1, dtype=torch.float64, device="cpu"), *shard_group.gradients(routes)])
    if mesh.group is not None:
        complete(mesh, lambda: dist.all_reduce(found, group=mesh.group, async_op=True), DOING)
    return float(found.square().sum()) if mesh.rank == 0 else 0.0


class _RowNumbers:
    """Which row of its group each request of a look-up is for: its table's first number and its own.

    A request names a rank and a slot there, or by way of a node leader the owner's node, too; the plan says which row
    that is.
    """

    def __init__(self, exchange: GroupExchange) -> None:
        names = [table.name for table in exchange.group.tables]
        first = _first_numbers(exchange)
        self._map = address_map = exchange.address_map
        self._relayed = np.repeat([kind in RELAYS for kind in address_map.kinds], address_map.num_tables)
        self._pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for rank in range(exchange.world_size):
            held = AddressMap(address_map.plan, names, rank).held
            pieces = [(first[n], piece) for n in range(len(names)) for piece in held(n) if len(piece.rows)]
            pieces.sort(key=lambda each: each[1].slots.start)
            starts = np.array([piece.slots.start for _, piece in pieces], np.int64)
            bases = np.array([base + piece.rows.start for base, piece in pieces], np.int64)
            self._pieces.append((starts, bases, np.array([piece.rows.step for _, piece in pieces], np.int64)))

    def __call__(self, look_up: HostLookUp) -> Tensor:
        """int64 `[U]`, in the order of the gradients."""
        send, plan = look_up.send, self._map.plan
        keys = send.lists.array(np.uint32, look_up.num_unique, offset=send.slots_offset).astype(np.int64)
        ranks = np.repeat(np.arange(plan.world_size), np.diff(look_up.bounds))
        is_relayed = np.repeat(
            np.tile(self._relayed, plan.world_size), np.diff(send.segment_offsets, axis=1).reshape(-1)
        )
        node, slots = np.divmod(keys, self._map.key_stride)
        slots = np.where(is_relayed, slots, keys)
        ranks = np.where(is_relayed, node * plan.ranks_per_node + ranks % plan.ranks_per_node, ranks)
        numbers = np.empty(len(keys), np.int64)
        for rank, (starts, bases, strides) in enumerate(self._pieces):
            mine = np.flatnonzero(ranks == rank)
            piece = np.searchsorted(starts, slots[mine], "right") - 1
            numbers[mine] = bases[piece] + (slots[mine] - starts[piece]) * strides[piece]
        return torch.from_numpy(numbers)
