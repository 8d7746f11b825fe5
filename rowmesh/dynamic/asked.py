"""What a rank asks the owners of a dynamic table for: distinct ids, in the order of their owners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rowmesh.dynamic.hashing import shard_of
from rowmesh.dynamic.layout import owner_of_shard, rules_of
from rowmesh.dynamic.owned import OwnedTable
from rowmesh.mesh.grid import Grid
from rowmesh.tables import TableSpec


@dataclass(frozen=True)
class Asked:
    """What a rank asks of one table.

    Attributes:
        ids: int64 `[U]`, distinct; by owner, then ascending.
        counts: int64 `[U]`.
        inverse: int64 `[N]`: which of them each id of the batch is.
        bounds: int64 `[N of the replica group + 1]`: where the ids of each owner begin.
    """

    ids: np.ndarray
    counts: np.ndarray
    inverse: np.ndarray
    bounds: np.ndarray


class DynamicTable:
    """A dynamic table as every rank knows it.

    Args:
        spec: as `framed` gives it.
        grid: the ranks of each replica group.
        owned: what this rank has of it; None where there are more ranks than shards.
    """

    def __init__(self, spec: TableSpec, grid: Grid, owned: OwnedTable | None) -> None:
        self.spec, self.grid, self.owned = spec, grid, owned
        self._num_shards = rules_of(spec).num_shards
        self._owners = owner_of_shard(rules_of(spec), grid.shards)

    def ask(self, ids: np.ndarray) -> Asked:
        """What is asked, given all ids that a batch has of the table."""
        unique, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
        size = self.grid.shards
        if size == 1:
            return Asked(unique, counts, inverse, np.array([0, len(unique)]))
        owners = self._owners[shard_of(self.spec.name, unique, self._num_shards)]
        order = np.argsort(owners, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        bounds = np.searchsorted(owners[order], np.arange(size + 1))
        return Asked(unique[order], counts[order], place[inverse], bounds)


def message_of(array: np.ndarray) -> torch.Tensor:
    """A copy; NumPy gives arrays without elements strides that no message can have."""
    tensor = torch.empty(array.shape, dtype=torch.int64, device="cpu")
    tensor.numpy()[...] = array
    return tensor
