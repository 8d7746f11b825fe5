"""Device arena: the rows of a group that this rank owns, and their optimizer state, in a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.initialize import initialize
from rowmesh.tables.arena import Piece, compute_dtype
from rowmesh.tables.group import TableGroup
from rowmesh.tables.initializer import table_key
from rowmesh.tables.spec import TableSpec

if TYPE_CHECKING:
    from rowmesh.ops.merge_update.cuda import Merged

MOST_SLOTS = 2**31 - 1  # kernels read slots as signed 32-bit numbers
_BLOCK_BYTES = 1 << 26  # of initial values that are computed at a time


class DeviceArena:
    """Rows in slots 0 … num_slots − 1; what `rowmesh.tables.DenseArena` is on a CPU.

    Args:
        group: the tables.
        num_slots: rows this rank holds, of all tables together.
        device: where.
        rows: memory for them, `[num_slots, D]`, where they are not to be anywhere.

    Attributes:
        rows: `[num_slots, D]` of the group's dtype.
        state: optimizer state by name, `[num_slots, D]` or `[num_slots]`, float32 (float64 for float64 rows).

    Raises:
        ConfigurationError: there are more slots than kernels can tell apart.
        MemoryError: the device has no room.
    """

    def __init__(
        self, group: TableGroup, num_slots: int, device: torch.device, rows: Tensor | None = None
    ) -> None:  # fmt: skip
        from rowmesh.ops.merge_update import cuda

        if num_slots > MOST_SLOTS:
            raise ConfigurationError(
                f"group {group.name}: a rank would hold {num_slots:,} rows on {device}, and at most {MOST_SLOTS:,} can "
                "be told apart; use more ranks, or give some tables another optimizer, which makes a group of their own"
            )
        self.group, self.num_slots, self.device = group, num_slots, device
        self._update = cuda.update
        compute = compute_dtype(group.dtype)
        try:
            self.rows = torch.empty(num_slots, group.dim, dtype=group.dtype, device=device) if rows is None else rows
            self.state = {
                name: torch.full(
                    (num_slots,) if extent == "row" else (num_slots, group.dim),
                    group.optimizer.initial_state[name], dtype=compute, device=device,
                )
                for name, extent in group.optimizer.state.items()
            }  # fmt: skip
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"group {group.name} on {device}: {error}") from error

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Memory of the rows, and of the optimizer state."""
        return self.rows.nbytes, sum(tensor.nbytes for tensor in self.state.values())

    def initialize(self, seed: int, held: Iterable[Iterable[Piece]]) -> None:
        """Gives every row its initial value, the same as on a CPU; `held` as for `DenseArena`.

        Normal ones are computed by the host, as no two libraries have equal bits of a logarithm.
        """
        size = max(_BLOCK_BYTES // (self.group.dim * self.group.dtype.itemsize), 1)
        for table, pieces in zip(self.group.tables, held, strict=True):
            for piece in pieces:
                for begin in range(0, len(piece.rows), size):
                    part = slice(begin, begin + size)
                    self._fill(table, table_key(seed, table.name), piece.rows[part], piece.slots[part])

    def _fill(self, table: TableSpec, key: int, rows: range, slots: range) -> None:
        """Gives some rows of a table their initial values."""
        from rowmesh.ops.initialize import cuda

        a, b = table.initializer.parameters(table.num_rows)
        out, name = self.rows[slots.start : slots.stop], table.initializer.name
        rule: Any = {"first": rows.start, "stride": rows.step, "distribution": name, "a": a, "b": b}
        if name in cuda.DISTRIBUTIONS:
            cuda.initialize(out, key, **rule)
            return
        block = torch.empty_like(out, device="cpu")
        initialize(block, key, **rule)
        out.copy_(block)

    def apply(self, merged: Merged, gradients: Tensor, lr: float, scaling: float, step: int) -> None:
        """Updates the rows of merged requests in place.

        Args:
            merged: distinct slots, and which gradients are for each.
            gradients: `[M, D]`, in the order of the requests.
            lr: learning rate.
            scaling: what summed gradients are multiplied by.
            step: which update this is, from 1 (Adam's bias corrections).
        """
        optimizer = self.group.optimizer
        state = tuple(self.state.values())
        self._update(self.rows, state, merged, gradients, optimizer.name, optimizer.numbers(lr, scaling, step))

    def read_rows(self, slots: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
        """Copies of rows `[n, D]` and of their state in the host's memory; waits for the device."""
        places = self._places(slots)
        return self.rows[places].cpu(), {name: tensor[places].cpu() for name, tensor in self.state.items()}

    def write_rows(self, slots: np.ndarray, rows: Tensor, state: Mapping[str, Tensor]) -> None:
        """Sets rows and their state.

        Args:
            slots: `[n]` distinct integers.
            rows: `[n, D]` of the group's dtype.
            state: as in `state`, `[n, …]`.
        """
        places = self._places(slots)
        self.rows[places] = rows.to(self.device)
        for name, tensor in state.items():
            self.state[name][places] = tensor.to(self.device)

    def _places(self, slots: np.ndarray) -> Tensor:
        return torch.from_numpy(slots.astype(np.int64)).to(self.device)
