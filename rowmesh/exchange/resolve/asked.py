"""A dynamic table as every rank knows it: who owns which ids."""

from __future__ import annotations

import numpy as np
import torch

from rowmesh.mesh.grid import Grid
from rowmesh.ops.distinct_ids import DistinctIds
from rowmesh.tables import TableSpec
from rowmesh.tables.dynamic.hashing import seed_of
from rowmesh.tables.dynamic.layout import owner_of_shard, rules_of
from rowmesh.tables.dynamic.owned import OwnedTable


class DynamicTable:
    """A dynamic table as every rank knows it.

    Args:
        spec: as `framed` gives it.
        grid: the ranks of each replica group that decides together with the others.
        owned: what this rank has of it; None where there are more ranks than shards.
        replica: of this rank, among all replica groups.

    Attributes:
        ask: finds what is asked, given all ids that a batch has of the table: a part is what goes to one owner.
        merge: finds the distinct ids of what all ranks ask of this one, with their counts added up.
    """

    def __init__(self, spec: TableSpec, grid: Grid, owned: OwnedTable | None, replica: int = 0) -> None:
        self.spec, self.grid, self.owned, self.replica = spec, grid, owned, replica
        self.ask = DistinctIds(seed_of(spec.name), owner_of_shard(rules_of(spec), grid.shards), grid.shards)
        self.merge = DistinctIds()


def message_of(array: np.ndarray) -> torch.Tensor:
    """A copy; NumPy gives arrays without elements strides that no message can have."""
    tensor = torch.empty(array.shape, dtype=torch.int64, device="cpu")
    tensor.numpy()[...] = array
    return tensor
