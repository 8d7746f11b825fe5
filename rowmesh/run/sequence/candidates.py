"""Candidates: the items that are ranked: all of the data, or those that a dynamic table knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from rowmesh.data.events.raw_ids import RawIds
from rowmesh.mesh import Mesh
from rowmesh.run.job import Job
from rowmesh.run.sequence.data import ITEM
from rowmesh.run.sequence.exchange import RowShares
from rowmesh.run.sequence.ranking import Seen, Standings, rank_targets
from rowmesh.run.sequence.sharded_softmax import item_range


@dataclass(frozen=True, eq=False)
class Candidates:
    """Items in rising order, the same on every rank.

    Attributes:
        ids: int64 `[M]`.
        are_all: whether they are the numbers 0 to M − 1.
    """

    ids: Tensor
    are_all: bool

    @classmethod
    def of(cls, job: Job, num_items: int) -> Self:
        """All items of the data, or, where their table is dynamic, the ids that it knows now on any rank. Collective.

        Raises:
            RowmeshError: a pipeline has opened batches ahead.
        """
        table = next(table for table in job.embeddings.tables if table.name == ITEM)
        if not table.takes_any_id:
            return cls(torch.arange(num_items), are_all=True)
        mine = job.embeddings.known_rows(ITEM).ids
        return cls(RowShares.of(job.mesh, len(mine)).gather(mine).unique(), are_all=False)  # replicas know the same

    def named(self, raw: RawIds | None) -> Candidates:
        """The items with a known name: all, or, where ids are raw, those that the data have."""
        if raw is None:
            return self
        return Candidates(self.ids[torch.isin(self.ids, torch.from_numpy(raw.ids))], are_all=False)

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, mesh: Mesh) -> range:
        """The places of the items that a rank scores."""
        return item_range(len(self), mesh.rank, mesh.world_size)

    def slice(self, mesh: Mesh) -> slice:
        """The same, of a tensor."""
        part = self.part(mesh)
        return slice(part.start, part.stop)

    def places(self, items: Tensor) -> Tensor:
        """Where each item stands among the candidates; −1 where it is none.

        >>> Candidates(torch.tensor([2, 5]), are_all=False).places(torch.tensor([5, 3, 9])).tolist()
        [1, -1, -1]
        """
        if self.are_all or not len(self):
            return items if self.are_all else torch.full_like(items, -1)
        places = torch.searchsorted(self.ids, items).clamp(max=len(self) - 1)
        return places.where(self.ids[places] == items, -1)

    def rank(self, mesh: Mesh, queries: Tensor, targets: Tensor, vectors: Tensor, seen: Seen | None) -> Standings:
        """As `rank_targets`; a target that is no candidate stands after all of them.

        Args:
            mesh: the ranks.
            queries: `[B, D]`, this rank's users.
            targets: int64 `[B]`.
            vectors: `[M_r, D]`, of the candidates of this rank's part.
            seen: what is not ranked.
        """
        places, seen = self.places(targets), seen and replace(seen, items=self.places(seen.items))
        found = rank_targets(mesh, queries, places, vectors, self.part(mesh).start, seen)
        is_one = places >= 0
        return Standings(found.higher.where(is_one, len(self)), found.tied.where(is_one, 0))
