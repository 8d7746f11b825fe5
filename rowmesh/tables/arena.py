"""Dense arena: the rows of a group that this rank owns, and their optimizer state, in contiguous memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rowmesh.ops.initialize import initialize
from rowmesh.ops.memory import Buffer, Memory
from rowmesh.ops.merge_update import update_kernels
from rowmesh.ops.simd import COMPUTE_DTYPE, STORAGE
from rowmesh.tables.group import TableGroup
from rowmesh.tables.initializer import table_key


class Piece(Protocol):
    """Rows of a table and the slots they are in."""

    @property
    def rows(self) -> range: ...
    @property
    def slots(self) -> range: ...


class Merged(Protocol):
    """Distinct slots and the gradients for each, as `rowmesh.ops.merge_update.Merger` describes them."""

    @property
    def num_merged(self) -> int: ...
    @property
    def merged_slots(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def nexts(self) -> int: ...
    @property
    def addresses(self) -> int: ...
    @property
    def node_ends(self) -> int: ...
    @property
    def num_nodes(self) -> int: ...


class DenseArena:
    """Rows in slots 0 … num_slots − 1.

    Args:
        group: the tables.
        num_slots: rows this rank holds, of all tables together.
        allocate: where the rows are put (shared memory under one-sided transport).

    Attributes:
        rows: `[num_slots, D]` of the group's dtype.
        state: optimizer state by name, `[num_slots, D]` or `[num_slots]`, float32 (float64 for float64 rows).
    """

    def __init__(
        self, group: TableGroup, num_slots: int, allocate: Callable[[int], Memory] = Buffer
    ) -> None:  # fmt: skip
        self.group = group
        self.num_slots = num_slots
        storage = STORAGE[group.dtype]
        self._memory = allocate(num_slots * group.dim * group.dtype.itemsize)
        self.rows = self._memory.tensor(group.dtype, num_slots, group.dim)
        compute = COMPUTE_DTYPE[storage]
        self._state_memory: list[Buffer] = []
        self.state: dict[str, Tensor] = {}
        for name, extent in group.optimizer.state.items():
            shape = (num_slots,) if extent == "row" else (num_slots, group.dim)
            memory = Buffer(int(np.prod(shape)) * compute.itemsize)
            self._state_memory.append(memory)
            self.state[name] = memory.tensor(compute, *shape)
            if initial := group.optimizer.initial_state[name]:
                self.state[name].fill_(initial)
        self._update = update_kernels(group.dim, storage, group.optimizer.name)

    @property
    def address(self) -> int:
        """Where slot 0 is."""
        return self._memory.address

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Memory of the rows, and of the optimizer state."""
        return self._memory.num_bytes, sum(memory.num_bytes for memory in self._state_memory)

    def initialize(self, seed: int, held: Iterable[Iterable[Piece]]) -> None:
        """Gives every row its initial value; `held` has the pieces of each table, in consecutive slots."""
        for table, pieces in zip(self.group.tables, held, strict=True):
            a, b = table.initializer.parameters(table.num_rows)
            for piece in pieces:
                if len(piece.rows) == 0:
                    continue
                initialize(
                    self.rows[piece.slots.start : piece.slots.stop], table_key(seed, table.name),
                    first=piece.rows.start, stride=piece.rows.step, distribution=table.initializer.name, a=a, b=b,
                )  # fmt: skip

    def apply(
        self, merged: Merged, lr: float, scaling: float, step: int, part: tuple[int, int] | None = None
    ) -> None:  # fmt: skip
        """Updates the rows of merged requests in place.

        Args:
            merged: distinct slots and the gradients that were sent for each.
            lr: learning rate.
            scaling: what summed gradients are multiplied by.
            step: which update this is, from 1 (Adam's bias corrections).
            part: which of the distinct slots, first and one past the last; default: all.
        """
        addresses = [memory.address for memory in self._state_memory] + [0, 0]
        self._update.update_merged(
            merged.merged_slots, merged.heads, merged.nexts, merged.addresses, *(part or (0, merged.num_merged)),
            merged.node_ends, merged.num_nodes, self.address, addresses[0], addresses[1],
            *self.group.optimizer.numbers(lr, scaling, step),
        )  # fmt: skip


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype rows of `dtype` are pooled in: float32, or float64 for float64."""
    return COMPUTE_DTYPE[STORAGE[dtype]]
