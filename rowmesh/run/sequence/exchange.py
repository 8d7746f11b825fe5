"""Exchanges of ranks that score against items of which each rank has a part. All are collective and blocking.

A mesh without a group is one rank, and nothing moves. Every function raises PeerError where a rank died, or did not
come within the mesh's timeout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import complete

_DOING = "scoring items"


@dataclass(frozen=True)
class RowShares:
    """How many rows each rank contributes.

    Attributes:
        mesh: the ranks.
        sizes: by rank.
    """

    mesh: Mesh
    sizes: tuple[int, ...]

    @staticmethod
    def of(mesh: Mesh, count: int) -> RowShares:
        """From this rank's number of rows; moves 8 bytes a rank."""
        counts = torch.zeros(mesh.world_size, dtype=torch.int64)
        counts[mesh.rank] = count
        return RowShares(mesh, tuple(total(mesh, counts).tolist()))

    @property
    def mine(self) -> slice:
        """Which of all rows are this rank's."""
        start = sum(self.sizes[: self.mesh.rank])
        return slice(start, start + self.sizes[self.mesh.rank])

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in their order. Moves W times the longest contribution to every rank."""
        if self.mesh.group is None:
            return rows
        padded = rows.new_zeros((max(self.sizes), *rows.shape[1:]))
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in self.sizes]
        complete(self.mesh, lambda: dist.all_gather(parts, padded, group=self.mesh.group, async_op=True), _DOING)
        return torch.cat([part[:size] for part, size in zip(parts, self.sizes, strict=True)])


def total(mesh: Mesh, values: Tensor) -> Tensor:
    """Σ over ranks, in place."""
    return _reduced(mesh, values, dist.ReduceOp.SUM)


def largest(mesh: Mesh, values: Tensor) -> Tensor:
    """The maximum over ranks, in place."""
    return _reduced(mesh, values, dist.ReduceOp.MAX)


def _reduced(mesh: Mesh, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
    if mesh.group is not None:
        complete(mesh, lambda: dist.all_reduce(values, how, group=mesh.group, async_op=True), _DOING)
    return values
