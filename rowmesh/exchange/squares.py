"""Sums of squares of the gradients of rows, of which their norm is made."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import complete

DOING = "computing the norm of gradients"


def sum_of_squares(gradients: Tensor) -> float:
    """The sum of squares of gradients `[M, D]`: of a row in its arithmetic, over rows in float64.

    >>> sum_of_squares(torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    29.0
    """
    found = float(torch.linalg.vector_norm(gradients, dim=1).double().square().sum())
    if gradients.dtype == torch.float32 and not found < float("inf"):  # too large to be squared there, perhaps
        found = float(gradients.double().square().sum())
    return found


def sum_of_squares_by_key(mesh: Mesh, keys: Tensor, gradients: Tensor) -> float:
    """The sum of squares of what this rank adds up in float64: of gradients that ranks have, the sums for equal keys.

    Collective and blocking; moves every gradient once.

    Args:
        mesh: the ranks; which adds up what, the key says.
        keys: int64 `[N]`, on the host.
        gradients: `[N, D]`, on the host.
    """
    if mesh.group is not None:
        order = torch.argsort(keys % mesh.world_size, stable=True)
        counts = torch.bincount(keys % mesh.world_size, minlength=mesh.world_size)
        theirs = torch.empty_like(counts)
        _all_to_all(mesh, theirs, counts, None, None)
        sizes_in, sizes_out = theirs.tolist(), counts.tolist()
        came, summands = keys.new_empty(sum(sizes_in)), gradients.new_empty(sum(sizes_in), gradients.shape[1])
        _all_to_all(mesh, came, keys[order], sizes_in, sizes_out)
        _all_to_all(mesh, summands, gradients[order], sizes_in, sizes_out)
        keys, gradients = came, summands
    unique, inverse = keys.unique(return_inverse=True)
    sums = torch.zeros(len(unique), gradients.shape[1], dtype=torch.float64, device="cpu")
    return float(sums.index_add_(0, inverse, gradients.double()).square().sum())


def _all_to_all(mesh: Mesh, into: Tensor, out: Tensor, sizes_in: list[int] | None, sizes_out: list[int] | None) -> None:
    def send() -> dist.Work | None:
        return dist.all_to_all_single(into, out, sizes_in, sizes_out, group=mesh.group, async_op=True)

    complete(mesh, send, DOING)
