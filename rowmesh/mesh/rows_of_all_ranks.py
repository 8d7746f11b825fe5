"""Rows of all ranks, gathered on every one, with their gradients."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.waiting import complete, gather_objects

_DOING = "gathering rows of all ranks"


class RowsOfAllRanks:
    """Gathers the rows of all ranks on every one. Collective: every rank calls it, and its backward, alike.

    Ranks may have different numbers of rows. Backward adds the gradients of all ranks up, and gives each those of its
    own rows. Making one is collective.

    Args:
        mesh: the ranks.

    Example:
        >>> gather = RowsOfAllRanks(Mesh())
        >>> gather(torch.ones(2, 3))
        (tensor([[1., 1., 1.],
                [1., 1., 1.]]), 0)
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh.with_process_group("rows of all ranks") if mesh.group is not None else mesh

    def __call__(self, rows: Tensor) -> tuple[Tensor, int]:
        """The rows of all ranks, and the number of the first of this one's.

        Args:
            rows: `[n, …]`, of the same shape but for n on every rank.

        Raises:
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        if self._mesh.group is None:
            return rows, 0
        sizes = gather_objects(self._mesh, len(rows), _DOING)
        begins = list(accumulate(sizes, initial=0))
        return _Gathering.apply(rows, self._mesh, begins), begins[self._mesh.rank]


class _Gathering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, mesh: Mesh, begins: list[int]) -> Tensor:
        ctx.mesh, ctx.begins = mesh, begins
        sizes = [end - begin for begin, end in pairwise(begins)]
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows.detach()
        parts = [torch.empty_like(padded) for _ in sizes]
        complete(mesh, lambda: dist.all_gather(parts, padded, group=mesh.group, async_op=True), _DOING)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        mesh = ctx.mesh
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # ranks add what is at the same address
        complete(mesh, lambda: dist.all_reduce(total, group=mesh.group, async_op=True), _DOING)
        return total[ctx.begins[mesh.rank] : ctx.begins[mesh.rank + 1]], None, None
