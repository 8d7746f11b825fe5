"""Core arena: the cores of a group's tensor-train tables, and their optimizer state, whole on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.simd import STORAGE
from rowmesh.ops.tensor_train import reference, update_kernel
from rowmesh.tables import TableGroup, TableSpec, TensorTrainShape
from rowmesh.tensor_train.initialize import draw_cores
from rowmesh.tensor_train.lookup import LookedUp, Lookup, Workspace, addresses_of


@dataclass(frozen=True)
class Cores:
    """What a tensor-train table is: three cores, and a state of the optimizer for each.

    Attributes:
        table: its name.
        shape: how its rows and columns are factorized, and at which ranks.
        cores: G₁, G₂ and G₃, of `shape.core_shapes`, on one device.
        state: name of a state → a tensor for each core, of the core's shape.
    """

    table: str
    shape: TensorTrainShape
    cores: tuple[Tensor, ...]
    state: dict[str, tuple[Tensor, ...]]

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of int64 `[N]`, `[N, D]`: what a look-up gives, in plain torch and to rounding."""
        return reference.rows(self.cores, ids.to(self.cores[0].device))

    @property
    def states(self) -> list[tuple[Tensor, ...]]:
        """The states of each core."""
        return [tuple(kept[number] for kept in self.state.values()) for number in range(len(self.cores))]

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Memory of the cores, and of their state."""
        return sum(core.nbytes for core in self.cores), sum(t.nbytes for kept in self.state.values() for t in kept)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them by name: "core1" … "core3", and "core1.sum" for a state."""
        named = {f"core{number}": core for number, core in enumerate(self.cores, start=1)}
        for name, kept in self.state.items():
            named |= {f"core{number}.{name}": tensor for number, tensor in enumerate(kept, start=1)}
        return named


class CoreTables:
    """The cores of all tables of a group, in the memory of some device.

    Args:
        group: of tensor-train tables.
        device: where.

    Attributes:
        tables: the cores of each table, in order.
    """

    def __init__(self, group: TableGroup, device: torch.device) -> None:
        self.group = group
        self.tables = [_zeros(table, device) for table in group.tables]

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Memory of the cores, and of their state."""
        sizes = [cores.num_bytes for cores in self.tables]
        return sum(values for values, _ in sizes), sum(state for _, state in sizes)

    @property
    def buffer_bytes(self) -> int:
        """Memory of idle buffers."""
        return 0

    def initialize(self, seed: int, held: Iterable[object] = ()) -> None:
        """Gives all cores their first values, functions of (seed, table); `held` is for stores that hold rows."""
        for table, kept in zip(self.group.tables, self.tables, strict=True):
            try:
                drawn = draw_cores(kept.shape, table.initializer, seed, table.name, table.dtype)
            except ConfigurationError as error:
                raise ConfigurationError(f"table {table.name!r}: {error}") from None
            for core, values in zip(kept.cores, drawn, strict=True):
                core.copy_(values)

    def copy_from(self, other: CoreTables) -> None:
        """Takes all values from an arena of the same group."""
        for mine, theirs in zip(self.tables, other.tables, strict=True):
            for name, tensor in mine.tensors.items():
                tensor.copy_(theirs.tensors[name])

    def update(self, table: int, lookup: LookedUp, row_gradients: Tensor, numbers: tuple[float, ...]) -> None:
        """Updates the slices that a look-up read, given the gradients `[U, D]` of its rows."""
        cores = self.tables[table]
        lookup.update(cores.cores, row_gradients, self.group.optimizer.name, cores.states, numbers)


class CoreArena(CoreTables):
    """The cores of all tables of a group in the host's memory, and the kernels of the CPU.

    Args:
        group: of tensor-train tables.

    Attributes:
        address: 0: no row lies anywhere.
    """

    def __init__(self, group: TableGroup) -> None:
        super().__init__(group, torch.device("cpu"))
        self.address = 0
        self._workspaces = [Workspace() for _ in group.tables]  # one a table: its buffers keep their sizes

    @property
    def buffer_bytes(self) -> int:
        """Memory of idle buffers."""
        return sum(workspace.num_bytes for workspace in self._workspaces)

    def look_up(self, table: int, ids: Tensor, out: int, *, keep: bool) -> Lookup:
        """Writes the rows of distinct ids of a table, int64 `[U]`, to an address; `keep`: a backward may come."""
        cores = self.tables[table]
        lookup = Lookup(cores.shape, cores.cores[0].dtype, ids, self._workspaces[table], distinct=True)
        lookup.rows(cores.cores, out, keep=keep)
        return lookup

    def apply(
        self, table: int, gradients: Sequence[Tensor], touched: Sequence[Tensor], numbers: tuple[float, ...]
    ) -> None:  # fmt: skip
        """Updates slices of a table, given the gradients of its cores.

        Args:
            table: its number.
            gradients: of the shapes of the cores.
            touched: for each core an element a slice, of the cores' dtype; 0 where nothing changes.
            numbers: as `UpdateRule.numbers` gives them.
        """
        cores = self.tables[table]
        states = addresses_of(cores.states)
        kernel = update_kernel(STORAGE[cores.cores[0].dtype], self.group.optimizer.name)
        for number, core in enumerate(cores.cores):
            kernel(
                gradients[number].data_ptr(), touched[number].data_ptr(), len(core), core[0].nbytes, core.data_ptr(),
                *states[2 * number : 2 * number + 2], *numbers,
            )  # fmt: skip


def _zeros(table: TableSpec, device: torch.device) -> Cores:
    shape, initial = table.tensor_train_shape, table.optimizer.initial_state

    def full(value: float) -> tuple[Tensor, ...]:
        return tuple(torch.full(each, value, dtype=table.dtype, device=device) for each in shape.core_shapes)

    return Cores(table.name, shape, full(0.0), {name: full(value) for name, value in initial.items()})
