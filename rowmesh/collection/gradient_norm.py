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
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import complete, gather_objects
from rowmesh.ops.look_up.device import DeviceLookUp
from rowmesh.ops.look_up.host import HostLookUp
from rowmesh.placement import AddressMap
from rowmesh.placement.address_map import RELAYS
from rowmesh.tables.dense import compute_dtype

_DOING = "computing the norm of gradients"


def gradient_norm(
    mesh: Mesh,
    exchanges: Sequence[GroupExchange],
    computed: Sequence[CoreShardGroup],
    routes: Sequence[Route],
    guests: Mapping[str, np.ndarray],
) -> float:
    """The norm of the gradients that wait, of the mean over ranks; the same number on all ranks.

    Collective and blocking; moves every gradient once, as a step does.

    Args:
        mesh: all ranks.
        exchanges: of all groups.
        computed: those of tensor-train tables.
        routes: whose gradients wait.
        guests: of each dynamic table the rows whose gradients are dropped.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    total = sum(_of_cores(mesh, each, routes) for each in computed)
    for number, exchange in enumerate(exchanges):
        if exchange.is_frozen or not exchange.group.stores_rows:
            continue
        groups = [route.groups[number] for route in routes]
        total += _sum_of_squares(mesh, exchange, groups, guests)
    sums = gather_objects(mesh, total, _DOING)
    return float(np.sqrt(sum(sums))) / mesh.world_size


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
    if mesh.group is not None:
        order = torch.argsort(keys % mesh.world_size, stable=True)
        counts = torch.bincount(keys % mesh.world_size, minlength=mesh.world_size)
        theirs = torch.empty_like(counts)
        _all_to_all(mesh, theirs, counts, None, None)
        sizes_in, sizes_out = theirs.tolist(), counts.tolist()
        came, summands = keys.new_empty(sum(sizes_in)), gradients.new_empty(sum(sizes_in), dim)
        _all_to_all(mesh, came, keys[order], sizes_in, sizes_out)
        _all_to_all(mesh, summands, gradients[order], sizes_in, sizes_out)
        keys, gradients = came, summands
    unique, inverse = keys.unique(return_inverse=True)
    sums = torch.zeros(len(unique), dim, dtype=torch.float64, device="cpu")
    return float(sums.index_add_(0, inverse, gradients.double()).square().sum())


def _all_to_all(mesh: Mesh, into: Tensor, out: Tensor, sizes_in: list[int] | None, sizes_out: list[int] | None) -> None:
    def send() -> dist.Work | None:
        return dist.all_to_all_single(into, out, sizes_in, sizes_out, group=mesh.group, async_op=True)

    complete(mesh, send, _DOING)


def _on_host(exchange: GroupExchange) -> Callable[[HostLookUp], tuple[Tensor, Tensor]]:
    """A function from a look-up to the numbers of its rows, int64 `[U]`, and their gradients, `[U, D]`."""
    rows = _RowNumbers(exchange)

    def find(look_up: HostLookUp) -> tuple[Tensor, Tensor]:
        return rows(look_up), look_up.summed

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
        complete(mesh, lambda: dist.all_reduce(found, group=mesh.group, async_op=True), _DOING)
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
