"""Counters of a group on a device: how many ids are asked for the host knows, how many distinct rows the device alone.

The device adds these up where they are merged, on the stream that updates rows, so that what orders updates of
different streams orders them too. Nobody waits for them until somebody reads them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rowmesh.exchange.counters import GroupCounters
from rowmesh.placement import AddressMap

if TYPE_CHECKING:
    from rowmesh.ops.merge_update.cuda import Merged


class DeviceCounters(GroupCounters):
    """Totals of one group on one rank.

    Args:
        group: its name.
        tables: of the group.
        device: of this rank.

    Attributes:
        distinct: int64 `[S]` on the device: distinct rows of each table that were counted there.
    """

    def __init__(self, group: str, tables: Sequence[str], device: torch.device) -> None:
        super().__init__(group, tables=tuple(tables))
        self.distinct = torch.zeros(len(self.tables), dtype=torch.int64, device=device)

    @property
    def table_distinct(self) -> dict[str, int]:
        """Table → distinct rows among them, update by update; waits for the device."""
        on_host, on_device = super().table_distinct, self.distinct.tolist()
        return {name: on_host[name] + count for name, count in zip(self.tables, on_device, strict=True)}


class SlotTables:
    """Of which table each slot of a rank is.

    Args:
        address_map: of the group.
        device: of this rank.
        without: kinds of rows that are not counted here.
    """

    def __init__(self, address_map: AddressMap, device: torch.device, without: Container[str] = ()) -> None:
        from rowmesh.ops.merge_update.cuda import NO_KIND, count_by_range

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

    def count(self, merged: Merged, counters: DeviceCounters) -> None:
        """Counts merged slots."""
        self._count(merged, *self._on_device, counters.distinct)

    def count_here(self, slots: NDArray[np.uint32], counters: DeviceCounters) -> None:
        """Counts distinct slots that the host knows."""
        tables = self._tables[np.searchsorted(self._starts, slots, "right") - 1]
        counters.add_distinct(np.bincount(tables[tables >= 0], minlength=self._num_tables))
