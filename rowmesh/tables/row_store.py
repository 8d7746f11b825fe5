"""Row store: what the exchange, checkpoints and migrations ask of the memory that has a group's rows on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.merge_update import Merged

Watcher = Callable[[Any, Any], None]
"""Gets distinct slots, and where in `RowStore.rows` they are, before the rows there are updated or averaged.

NumPy arrays, uint32; of rows that are all in a device's memory tensors there, int64, in which `END` stands for no slot.
"""


class Piece(Protocol):
    """Rows of a table and the slots they are in."""

    @property
    def rows(self) -> range: ...
    @property
    def slots(self) -> range: ...


class RowStore(Protocol):
    """Rows of a group, and their optimizer state, by slot.

    Attributes:
        device: where rows are updated.
        is_whole: whether `rows` and `state` have all slots.
        has_views: whether they have, in the host's memory: what is written there stays.
        rows: `[n, D]` of the group's dtype: all slots, or what a cache holds of them.
        state: optimizer state of these by name, `[n, D]` or `[n]`, float32 (float64 for float64 rows).
    """

    device: torch.device
    is_whole: bool
    has_views: bool

    @property
    def rows(self) -> Tensor: ...
    @property
    def state(self) -> Mapping[str, Tensor]: ...

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Memory of `rows`, and of `state`."""
        ...

    def initialize(self, seed: int, held: Iterable[Iterable[Piece]]) -> None:
        """Sets every row to its initial value; `held` has the pieces of each table, in consecutive slots."""
        ...

    def apply(self, merged: Merged, lr: float, scaling: float, step: int, part: tuple[int, int] | None = None) -> None:
        """Updates rows in place.

        Args:
            merged: which of `rows`, and the gradients for each; of cached rows these are cache slots, pinned.
            lr: learning rate.
            scaling: what summed gradients are multiplied by.
            step: which update this is, from 1 (Adam's bias corrections).
            part: which of the merged rows, first and one past the last; default: all, which a device takes alone.
        """
        ...

    def read_rows(self, slots: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of rows `[n, D]` and of their state in the host's memory, with every update so far.

        Args:
            slots: `[n]` integers.

        Raises:
            RowmeshError: they cannot be read; names the file.
        """
        ...

    def write_rows(self, slots: np.ndarray, rows: Tensor, state: Mapping[str, Tensor]) -> None:
        """Sets rows and their state.

        Args:
            slots: `[n]` distinct integers.
            rows: `[n, D]` of the group's dtype.
            state: as in `state`, `[n, …]`.

        Raises:
            RowmeshError: they cannot be written; names the file.
        """
        ...

    def watch(self, name: str, watcher: Watcher | None) -> None:
        """Has a function called before every update, one of each name; None: no more."""

    def close(self) -> None:
        """Stops threads and closes files, without writing what is left; may be called again."""
