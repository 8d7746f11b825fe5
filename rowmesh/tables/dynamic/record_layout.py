"""RecordLayout: the bytes of a demoted id's record in a store.

A record is the row, its optimizer state by name, and int64 last step + 1, count and frequency, without gaps.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rowmesh.tables import TableSpec
from rowmesh.tables.dense import compute_dtype

_FACT_BYTES = 24


class RecordLayout:
    """The bytes of a record.

    Args:
        table: whose rows they are.

    Attributes:
        width: bytes.

    Example:
        >>> from rowmesh.tables import Dynamic, Uniform
        >>> table = TableSpec(
        ...     name="user", dim=4, storage="dynamic", dynamic=Dynamic(capacity=9), initializer=Uniform(bound=0.1)
        ... )
        >>> RecordLayout(table).width  # 4 float32, one of row-wise AdaGrad, and 3 int64
        44
    """

    def __init__(self, table: TableSpec) -> None:
        lengths, dtype = {"row": (), "element": (table.dim,)}, compute_dtype(table.dtype)
        self._parts = [("", table.dtype, (table.dim,))]
        self._parts += [(name, dtype, lengths[extent]) for name, extent in table.optimizer.state.items()]
        self._initial = table.optimizer.initial_state
        self._bytes = [part.itemsize * (shape[0] if shape else 1) for _, part, shape in self._parts]
        self.width = sum(self._bytes) + _FACT_BYTES

    def completed(self, state: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
        """States by name of as many rows: those that are given, and the others as new rows have them."""
        missing = [part for part in self._parts[1:] if part[0] not in state]
        fresh = {name: torch.full((count, *shape), self._initial[name], dtype=dtype) for name, dtype, shape in missing}
        return {**state, **fresh}

    def pack(self, rows: Tensor, state: Mapping[str, Tensor], facts: np.ndarray) -> np.ndarray:
        """Records, uint8 `[n, width]`, of one id or more: of rows `[n, D]`, states by name, and facts `[n, 3]`."""
        tensors = [rows, *(state[name] for name, _, _ in self._parts[1:])]
        parts = [each.reshape(len(facts), -1).contiguous().view(torch.uint8).numpy() for each in tensors]
        return np.concatenate([*parts, np.ascontiguousarray(facts).view(np.uint8)], axis=1)

    def unpack(self, records: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Rows and states, copies."""
        tensors, first = {}, 0
        for (name, dtype, shape), size in zip(self._parts, self._bytes, strict=True):
            part = torch.from_numpy(np.ascontiguousarray(records[:, first : first + size]).reshape(-1))
            tensors[name] = part.view(dtype).reshape(len(records), *shape)
            first += size
        return tensors.pop(""), tensors

    def facts(self, records: np.ndarray) -> np.ndarray:
        """Facts, a copy."""
        return np.ascontiguousarray(records[:, self.width - _FACT_BYTES :]).reshape(-1).view(np.int64).reshape(-1, 3)
