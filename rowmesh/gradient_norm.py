"""The norm of the gradients of rows, for clipping: of the sums over all ids of all ranks that name a row.

No rank has these sums before the update, in which owners make them. So gradients travel once more: those of a row go to
the rank that its number gives, which adds them up in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.route import Route, RouteGroup
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import complete, gather_objects
from rowmesh.ops.look_up.host import HostLookUp
from rowmesh.placement import AddressMap
from rowmesh.placement.address_map import RELAYS
from rowmesh.tables.dense import compute_dtype

_DOING = "computing the norm of gradients"


def gradient_norm(mesh: Mesh, exchanges: Sequence[GroupExchange], routes: Sequence[Route]) -> float:
    """The norm of the gradients that wait, of the mean over ranks; the same number on all ranks.

    Collective and blocking; moves every gradient once, as a step does.

    Raises:
        ConfigurationError: some tables have gradients whose norm cannot be computed here.
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    total = 0.0
    for number, exchange in enumerate(exchanges):
        if exchange.is_frozen:
            continue
        _check(exchange)
        groups = [route.groups[number] for route in routes]
        total += _sum_of_squares(mesh, exchange, groups)
    sums = gather_objects(mesh, total, _DOING)
    return float(np.sqrt(sum(sums))) / mesh.world_size


def _check(exchange: GroupExchange) -> None:
    names = [table.name for table in exchange.group.tables]
    if exchange.group.storage == "tensor_train":
        raise ConfigurationError(
            f"tables {names} are tensor-train tables, whose gradients are those of cores, made within the step: their "
            "norm is not known before. Clip the dense parameters alone, or keep these tables dense"
        )
    if exchange.device is not None:
        raise ConfigurationError(
            f"tables {names} are on a device, where the norm of gradients of rows is not computed yet; clip the dense "
            "parameters alone"
        )


def _sum_of_squares(mesh: Mesh, exchange: GroupExchange, groups: Sequence[RouteGroup]) -> float:
    """Of the rows that this rank adds up."""
    dim, dtype = exchange.group.dim, compute_dtype(exchange.group.dtype)
    rows = _RowNumbers(exchange)
    keys = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *(rows(group.look_up) for group in groups)])
    found = [group.look_up.send.gradients.tensor(dtype, group.num_unique, dim) for group in groups]
    gradients = torch.cat([torch.empty(0, dim, dtype=dtype, device="cpu"), *found])
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


class _RowNumbers:
    """Which row of its group each request of a look-up is for: its table's first number and its own.

    A request names a rank and a slot there, or by way of a node leader the owner's node, too; the plan says which row
    that is.
    """

    def __init__(self, exchange: GroupExchange) -> None:
        names = [table.name for table in exchange.group.tables]
        first = np.cumsum([0, *(table.num_rows for table in exchange.group.tables)])
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
