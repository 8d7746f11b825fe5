"""Row arrays: rows and their state side by side, how they become records, and what they start from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.initialize import STREAM, initialize_slots
from rowmesh.ops.records import Records
from rowmesh.tables.dense import DenseArena
from rowmesh.tables.group import TableGroup
from rowmesh.tables.initializer import table_key
from rowmesh.tables.row_store import Piece


class RowArrays(Records):
    """Rows `[n, D]` of a group in the host's memory, their state, and their versions where these are kept.

    A record is a row, its state in the order of the optimizer, and its version.

    Args:
        rows: contiguous, of the group's dtype.
        state: by name, contiguous.
        versions: uint32 `[n]`, or None.
    """

    def __init__(self, rows: Tensor, state: Mapping[str, Tensor], versions: np.ndarray | None) -> None:
        self.rows, self.state, self.versions = rows, dict(state), versions
        kept = [] if versions is None else [torch.from_numpy(versions.view(np.int32))]
        super().__init__([rows, *state.values(), *kept])

    @classmethod
    def empty(cls, group: TableGroup, count: int, has_versions: bool) -> RowArrays:
        """Room for `count` rows."""
        room = DenseArena(group, count)
        return cls(room.rows, room.state, np.zeros(count, np.uint32) if has_versions else None)


class InitialRows:
    """The rows of a group before their first update, by slot.

    Args:
        group: the tables.
        seed: of their initial values.
        held: the pieces of each table that are here, in consecutive slots.
    """

    def __init__(self, group: TableGroup, seed: int, held: Iterable[Iterable[Piece]]) -> None:
        self._group = group
        pieces, streams = [], []
        for number, (table, parts) in enumerate(zip(group.tables, held, strict=True)):
            streams.append((table_key(seed, table.name), *table.initializer.parameters(table.num_rows)))
            pieces += [(part.slots.start, part.rows.start, part.rows.step, number) for part in parts if len(part.rows)]
        self._pieces, self._streams = np.array(sorted(pieces), np.int64).reshape(-1, 4), np.array(streams, STREAM)

    def fill(self, arrays: RowArrays, places: np.ndarray, slots: np.ndarray) -> None:
        """Writes the initial rows of slots, their state and version, to places; both are uint32 `[m]`."""
        if len(slots) == 0:
            return
        initialize_slots(arrays.rows, places, slots, self._pieces, self._streams, self._group.initializer.name)
        index = torch.from_numpy(places.astype(np.int64))
        for name, tensor in arrays.state.items():
            tensor[index] = self._group.optimizer.initial_state[name]
        if arrays.versions is not None:
            arrays.versions[places] = 0

    def name(self, slot: int) -> str:
        """The table and row in a slot, for messages."""
        first, row, step, number = self._pieces[np.searchsorted(self._pieces[:, 0], slot, side="right") - 1].tolist()
        return f"table {self._group.tables[number].name!r}, row {row + (slot - first) * step}"
