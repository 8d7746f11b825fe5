"""Places: where a plan holds rows, for many rows at a time; and of which table the rows in a rank's slots are.

Two plans say by arithmetic which rank sends which rows when one takes the other's place.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.ops.merge_update import DeviceMerged
from rowmesh.placement.address_map import AddressMap

Ints = NDArray[np.int64]


class Places:
    """Where a plan holds the rows of one table, for many rows at a time.

    Args:
        address_map: of the plan.
        table: number of the table in the map's group.
    """

    def __init__(self, address_map: AddressMap, table: int) -> None:
        plan = address_map.plan
        self.parts = address_map.tables[table].ranges
        first = int(address_map.index[table, 0])
        described = address_map.ranges[first : first + len(self.parts)]
        self._start, self._shift, self._modulus, self._rank, self._divisor, self._base = described[:, :6].T.copy()
        self._origin = described[:, 8].copy()
        # A rank holds a row where it differs from the owner by a multiple of this.
        spacing = {"replicated": 1, "node": plan.ranks_per_node, "cyclic": plan.world_size, "fixed": plan.world_size}
        self._spacing = np.array([spacing[part.rule] for part in self.parts], np.int64)

    def __call__(self, rows: Ints) -> Located:
        """Where rows are."""
        part = np.searchsorted(self._start, rows, "right") - 1
        offset = rows - self._origin[part]
        owner = self._rank[part] + (offset + self._shift[part]) % self._modulus[part]
        return Located(owner, self._base[part] + offset // self._divisor[part], self._spacing[part])


@dataclass(frozen=True, eq=False)
class Located:
    """Where some rows are, one entry a row.

    Attributes:
        owner: the rank that owns them.
        slot: the slot, which is the same on all ranks that hold the row.
        spacing: ranks that differ from the owner by a multiple of it hold the row.
    """

    owner: Ints
    slot: Ints
    spacing: Ints

    def held_by(self, rank: int) -> NDArray[np.bool_]:
        """Which of the rows a rank holds."""
        return (rank - self.owner) % self.spacing == 0

    def __getitem__(self, chosen: NDArray[np.bool_] | Ints) -> Located:
        return Located(self.owner[chosen], self.slot[chosen], self.spacing[chosen])


class Movements:
    """The use that a rank makes of a window of rows.

    Attributes:
        kept_from, kept_to: slots of rows that the rank holds under both plans.
        sent: old slots, in the order of the ranks they go to.
        received: new slots, in the order of the ranks they come from.
        sent_counts, received_counts: how many, rank by rank.
    """

    def __init__(self, old: Located, new: Located, rank: int, world_size: int) -> None:
        had, gets = old.held_by(rank), new.held_by(rank)
        kept = had & gets
        self.kept_from, self.kept_to = old.slot[kept], new.slot[kept]
        comes = np.flatnonzero(gets & ~had)
        comes = comes[np.argsort(old.owner[comes], kind="stable")]
        self.received = new.slot[comes]
        self.received_counts = np.bincount(old.owner[comes], minlength=world_size).tolist()
        own = np.flatnonzero(old.owner == rank)
        old, new = old[own], new[own]
        sent = [old.slot[new.held_by(peer) & ~old.held_by(peer)] for peer in range(world_size)]
        self.sent = np.concatenate(sent)
        self.sent_counts = [len(slots) for slots in sent]


class SlotTables:
    """The table of each slot of a rank, by which distinct rows are counted.

    Args:
        address_map: of the group.
        device: of this rank.
        without: kinds of rows that are not counted here.
    """

    def __init__(self, address_map: AddressMap, device: torch.device, without: Container[str] = ()) -> None:
        from rowmesh.ops.merge.cuda import NO_KIND, count_by_range

        self._num_tables, self._count = address_map.num_tables, count_by_range
        bounds = [(0, NO_KIND)]  # where ranges begin, in the order of the slots, and of which table they are
        for table in range(self._num_tables):
            for piece in address_map.held(table, without):
                if len(piece.slots):
                    bounds += [(piece.slots.start, table), (piece.slots.stop, NO_KIND)]
        bounds.sort()
        self._starts, self._tables = np.array(bounds, np.int64).T.copy()
        ends = np.append(self._starts, address_map.num_slots[address_map.rank])
        self._on_device = torch.from_numpy(ends).to(device), torch.from_numpy(self._tables).to(device)

    def count(self, merged: DeviceMerged, counts: Tensor) -> None:
        """Adds how many merged slots are of each table to int64 `[S]` on the device."""
        self._count(merged, *self._on_device, counts)

    def count_here(self, slots: NDArray[np.uint32]) -> NDArray[np.int64]:
        """How many slots that the host knows are of each table: int64 `[S]`."""
        tables = self._tables[np.searchsorted(self._starts, slots, "right") - 1]
        return np.bincount(tables[tables >= 0], minlength=self._num_tables)
