"""Cores: what tensor-train tables are in place of rows, with their optimizer state; and look-ups of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.ops.initialize import initialize
from rowmesh.ops.prefixes import Workspace, sort_ids
from rowmesh.ops.tensor_train import Lookup, reference
from rowmesh.ops.update_slices import update_slices
from rowmesh.tables.group import TableGroup
from rowmesh.tables.initializer import Initializer, table_key
from rowmesh.tables.spec import TableSpec
from rowmesh.tables.tensor_train import TensorTrainShape


@dataclass(frozen=True)
class Cores:
    """The numbers of a tensor-train table: three cores, and a state of the optimizer for each.

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

    @classmethod
    def empty(cls, table: TableSpec, device: torch.device | None) -> Cores:
        """Cores of zeros, with the initial state."""
        shape, where = table.tensor_train_shape, device or torch.device("cpu")

        def full(value: float) -> tuple[Tensor, ...]:
            return tuple(torch.full(each, value, dtype=table.dtype, device=where) for each in shape.core_shapes)

        initial = table.optimizer.initial_state
        return cls(table.name, shape, full(0.0), {name: full(value) for name, value in initial.items()})

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of int64 `[N]`, `[N, D]`: what a look-up gives, in plain torch and to rounding."""
        return reference.rows(self.cores, ids.to(self.cores[0].device))

    @cached_property
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


class CoreArena:
    """The cores of all tables of a group.

    Args:
        group: of tensor-train tables.
        device: whose memory, and whose kernels (a CPU may interpret those of a GPU); None: the host's.

    Attributes:
        tables: the cores of each table, in order.
        version: changes with the values; products of prefixes are valid for one.
        address: 0: no row is stored.

    Raises:
        MemoryError: the device has no room.
    """

    def __init__(self, group: TableGroup, device: torch.device | None = None) -> None:
        self.group, self.is_on_device, self.address, self.version = group, device is not None, 0, 0
        try:
            self.tables = [Cores.empty(table, device) for table in group.tables]
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"group {group.name} on {device}: {error}") from error
        # Each table has its own workspace, whose buffers keep their sizes.
        self._workspaces = [None if self.is_on_device else Workspace() for _ in group.tables]

    def note_change(self) -> None:
        """The cores change: products made of them before are stale."""
        self.version += 1

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Memory of the cores, and of their state."""
        sizes = [cores.num_bytes for cores in self.tables]
        return sum(values for values, _ in sizes), sum(state for _, state in sizes)

    @property
    def buffer_bytes(self) -> int:
        """Memory of idle buffers."""
        return sum(workspace.num_bytes for workspace in self._workspaces if workspace is not None)

    def initialize(self, seed: int, held: Iterable[object] = ()) -> None:
        """Gives all cores their first values, functions of (seed, table); `held` is for stores that hold rows."""
        for table, kept in zip(self.group.tables, self.tables, strict=True):
            try:
                drawn = draw_cores(kept.shape, table.initializer, seed, table.name, table.dtype)
            except ConfigurationError as error:
                raise ConfigurationError(f"table {table.name!r}: {error}") from None
            for core, values in zip(kept.cores, drawn, strict=True):
                core.copy_(values)

    def copy_from(self, other: CoreArena) -> None:
        """Takes all values from an arena of the same group."""
        for mine, theirs in zip(self.tables, other.tables, strict=True):
            for name, tensor in mine.tensors.items():
                tensor.copy_(theirs.tensors[name])

    def look_up(
        self,
        table: int,
        ids: Tensor,
        out: Tensor | int,
        *,
        keep: bool,
        num: Tensor | None = None,
        first: Tensor | None = None,
    ) -> Lookup:
        """Computes the rows of distinct ids of a table.

        Args:
            table: its number.
            ids: int64 `[U]`; on a device `[N]`, of which the first ones are valid.
            out: `[U, D]`, or its address on a CPU; on a device `[M, D]`, of which rows of this table are written.
            keep: whether products are kept, for a backward.
            num: on a device int64 `[1]`: how many ids are valid.
            first: on a device int64 `[1]`: where their rows begin in `out`.
        """
        cores, workspace = self.tables[table], self._workspaces[table]
        table_rows, factors = cores.shape.num_rows, cores.shape.row_factors
        prefixes = sort_ids(ids, table_rows, factors, workspace, is_distinct=True, num=num, first=first)
        lookup = Lookup(prefixes, None, self.version)
        lookup.rows(cores.cores, out, keep=keep)
        return lookup

    def update(self, table: int, lookup: Lookup, row_gradients: Tensor, numbers: tuple[float, ...]) -> None:
        """Updates the slices that a look-up read, given the gradients `[U, D]` of its rows."""
        cores = self.tables[table]
        lookup.update(cores.cores, row_gradients, self.group.optimizer.name, cores.states, numbers)

    def apply(self, table: int, found: Sequence[Tensor], touched: Sequence[Tensor], numbers: tuple[float, ...]) -> None:
        """Updates slices of a table, given the gradients of its cores.

        Args:
            table: its number.
            found: gradients, of the shapes of the cores.
            touched: for each core an element a slice, of the cores' dtype; 0 where nothing changes.
            numbers: as `UpdateRule.numbers` gives them.
        """
        cores, rule, is_on_device = self.tables[table], self.group.optimizer.name, self.is_on_device
        for core, states, gradient, marks in zip(cores.cores, cores.states, found, touched, strict=True):
            update_slices(core, states, gradient, marks, rule, numbers, is_on_device=is_on_device)


def draw_cores(
    shape: TensorTrainShape, initializer: Initializer, seed: int, name: str, dtype: torch.dtype
) -> list[Tensor]:
    """Cores of independent normal values, a function of (seed, name) alone: equal on every rank.

    Rows are then distributed as a dense table's would be: an element of a row is a sum of R₁ · R₂ products of three
    values, so that its variance is R₁ · R₂ · σ⁶. σ is chosen so that it is that of the initializer; means are zero and
    rows are uncorrelated.

    Raises:
        ConfigurationError: the initializer's mean is not zero, or it is constant.

    Example:
        >>> from rowmesh.tables import Normal
        >>> shape = TensorTrainShape.choose(10, 4, rank=2)
        >>> [tuple(core.shape) for core in draw_cores(shape, Normal(std=1.0), 0, "item", torch.float32)]
        [(2, 1, 2), (2, 2, 2, 2), (3, 2, 2)]
    """
    std = standard_deviation(initializer, shape.num_rows)
    sigma = (std / math.sqrt(shape.ranks[0] * shape.ranks[1])) ** (1 / 3)
    cores = []
    for number, core_shape in enumerate(shape.core_shapes):
        core = torch.empty(core_shape, dtype=dtype, device="cpu")
        key = table_key(seed, f"{name}/core{number}")
        initialize(core.view(core_shape[0], -1), key, first=0, stride=1, distribution="normal", a=0.0, b=sigma)
        cores.append(core)
    return cores


def standard_deviation(initializer: Initializer, num_rows: int) -> float:
    """That of the elements of a dense table.

    Raises:
        ConfigurationError: its mean is not zero, which sums of products of independent values cannot have; or it is
            constant, and cores of zeros would never learn.
    """
    a, b = initializer.parameters(num_rows)
    mean, std = ((a + b) / 2, (b - a) / math.sqrt(12)) if initializer.name == "uniform" else (a, b)
    if mean != 0.0 or std <= 0.0:
        raise ConfigurationError(
            f"a tensor-train table starts from rows of mean 0 and a standard deviation above 0; {initializer} has mean "
            f"{mean:g} and standard deviation {std:g}; take Uniform(bound=...), Normal(std=...) or from_pretrained"
        )
    return std
