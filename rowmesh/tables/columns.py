"""Columns: rows and their state side by side in arrays, and how they become records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.initialize import STREAM, initialize_slots
from rowmesh.ops.records import MAX_PARTS, record_kernels
from rowmesh.tables.arena import DenseArena, Piece
from rowmesh.tables.group import TableGroup
from rowmesh.tables.initializer import table_key


class Columns:
    """Rows `[n, D]` of a group, their state, and their versions where these are kept.

    Args:
        rows: contiguous, of the group's dtype.
        state: by name, contiguous.
        versions: uint32 `[n]`, or None.

    Attributes:
        record_bytes: of a record: the row, its state in the order of the optimizer, its version.
    """

    def __init__(self, rows: Tensor, state: Mapping[str, Tensor], versions: np.ndarray | None) -> None:
        self.rows, self.state, self.versions = rows, dict(state), versions
        tensors = [rows, *state.values()]
        parts = [tensor.element_size() * (tensor.shape[1] if tensor.dim() > 1 else 1) for tensor in tensors]
        addresses = [tensor.data_ptr() for tensor in tensors]
        if versions is not None:
            parts.append(versions.itemsize)
            addresses.append(versions.ctypes.data)
        self.record_bytes = sum(parts)
        self._kernels = record_kernels(*parts)
        self._addresses = np.array(addresses + [0] * (MAX_PARTS - len(addresses)), np.int64)

    @classmethod
    def empty(cls, group: TableGroup, count: int, with_versions: bool) -> Columns:
        """Room for `count` rows."""
        room = DenseArena(group, count)
        return cls(room.rows, room.state, np.zeros(count, np.uint32) if with_versions else None)

    def pack(self, places: np.ndarray, records: np.ndarray) -> None:
        """Copies rows from uint32 `[m]` places into records, uint8 `[m, stride]`."""
        self._kernels.pack(*self._arguments(places, records))

    def unpack(self, places: np.ndarray, records: np.ndarray) -> None:
        """Copies records to places."""
        self._kernels.unpack(*self._arguments(places, records))

    def _arguments(self, places: np.ndarray, records: np.ndarray) -> tuple[int, ...]:
        stride = records.strides[0]
        return places.ctypes.data, len(places), self._addresses.ctypes.data, records.ctypes.data, stride

    def poison(self, places: np.ndarray) -> None:
        """Leaves NaN in rows and state."""
        index = torch.from_numpy(places.astype(np.int64))
        for tensor in (self.rows, *self.state.values()):
            tensor[index] = torch.nan


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

    def fill(self, columns: Columns, places: np.ndarray, slots: np.ndarray) -> None:
        """Writes the initial rows of slots, their state and version, to places; both are uint32 `[m]`."""
        if len(slots) == 0:
            return
        initialize_slots(columns.rows, places, slots, self._pieces, self._streams, self._group.initializer.name)
        index = torch.from_numpy(places.astype(np.int64))
        for name, tensor in columns.state.items():
            tensor[index] = self._group.optimizer.initial_state[name]
        if columns.versions is not None:
            columns.versions[places] = 0

    def name(self, slot: int) -> str:
        """The table and row in a slot, for messages."""
        first, row, step, number = self._pieces[np.searchsorted(self._pieces[:, 0], slot, side="right") - 1].tolist()
        return f"table {self._group.tables[number].name!r}, row {row + (slot - first) * step}"
