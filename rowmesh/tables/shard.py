"""Shards: what a rank holds of a table, in one form for all ways in which tables are stored.

Saving, loading, snapshots, state dictionaries, averages and publishing go by them: `EmbeddingCollection.shards` gives
the shards of all tables. Readers see `Rows`; a `TableShard` can be set and frozen, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.tables.cores import Cores
from rowmesh.tables.dense import compute_dtype
from rowmesh.tables.dynamic.records import KnownBefore
from rowmesh.tables.dynamic.saved_shards import SavedShards
from rowmesh.tables.row_store import Piece, RowStore
from rowmesh.tables.spec import TableSpec

Which = Literal["owned", "held", "group"]
"""Whose rows: those that this rank owns, where replicas divide rows among themselves; all that it holds, copies too; or
those that it owns within its replica group, as they are, without a message to any rank."""
Form = Literal["rows", "ids", "cores"]
"""How an entry of a table is found: by the number of a row, by an id, or by the name of a core, which is one entry."""
STORED_ROWS = 65_536
"""Rows that are copied at a time."""
ROWS = "rows"
"""The array of the numbers of rows, where only those that changed are saved."""


Vectors = tuple[npt.NDArray[np.int64], Tensor]
"""Numbers of rows, or ids, `[N]`, and their values `[N, D]`."""


class RowPiece(Protocol):
    """Some rows of a table, few enough to be copied: values and optimizer state, valid until `forget`.

    Attributes:
        rows: their numbers, or ids.
    """

    @property
    def rows(self) -> Sized: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def state(self) -> Mapping[str, Tensor]: ...
    def forget(self) -> None: ...


class LogicalShards(NamedTuple):
    """Which logical shards of a dynamic table a rank has.

    Attributes:
        shards: which.
        step: how many batches were opened for training.
        seed: of the rows from which ids start.
        replica: of this rank; the first one tells of the table.
    """

    shards: range
    step: int
    seed: int
    replica: int = 0


class Rows(Protocol):
    """Contents of a table: all that a rank holds, or what changed of it; as it is, or as it was at one moment.

    Attributes:
        spec: the table.
        form: what finds its entries.
        is_common: whether all ranks have the same, of which the first one is saved.
        logical: of form "ids" the logical shards; None where this rank has none.
    """

    @property
    def spec(self) -> TableSpec: ...
    @property
    def form(self) -> Form: ...
    @property
    def is_common(self) -> bool: ...
    @property
    def logical(self) -> LogicalShards | None: ...
    @property
    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """By name what there is beside rows: ids with their counts, sketches, numbers of rows that changed, cores."""
        ...

    @property
    def pieces(self) -> Mapping[str, Sequence[RowPiece]]:
        """The rows, piece by piece, by what the names of their fields begin with: `""`; demoted ones apart."""
        ...


class RowSource(Protocol):
    """A source of tables to save: an `EmbeddingCollection`, a snapshot of one, …"""

    def synchronize(self) -> None: ...
    def shards(self, which: Which, /) -> Sequence[Rows]: ...


class RowHolder(RowSource, Protocol):
    """A holder of tables, which can be loaded and frozen too: an `EmbeddingCollection`, or several."""

    @property
    def tables(self) -> Sequence[TableSpec]: ...
    @property
    def row_epoch(self) -> tuple[int, int]: ...
    def forget_differences(self) -> None: ...
    def shards(self, which: Which, /) -> Sequence[TableShard]: ...


@dataclass(frozen=True)
class LocalRows:
    """Some rows of a table that are in this rank's memory.

    Attributes:
        rows: which rows of the table they are.
        values: `[n, D]`, a view of the arena.
        state: optimizer state by name, `[n, D]` or `[n]`, views.
    """

    rows: range
    values: Tensor
    state: dict[str, Tensor]

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """Values and state by the names of `fields_of`."""
        return {"values": self.values, **self.state}

    def commit(self) -> None:
        """Puts values and state that were changed where rows are kept: these are there already."""

    def forget(self) -> None:
        """Frees what was copied: nothing was."""


class StoredRows(LocalRows):
    """Some rows of a tiered table or on a device: copies, read when they are asked for, which only `commit` writes
    back.

    Attributes:
        rows: which rows of the table they are.
    """

    def __init__(self, arena: RowStore, rows: range, slots: range) -> None:
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "_source", (arena, np.array(slots, np.uint32)))

    @classmethod
    def of(cls, arena: RowStore, piece: Piece) -> list[LocalRows]:
        """A piece of a table, in parts small enough to be read one by one."""
        cuts = [slice(first, first + STORED_ROWS) for first in range(0, len(piece.rows), STORED_ROWS)]
        return [cls(arena, piece.rows[cut], piece.slots[cut]) for cut in cuts]

    def __getattr__(self, name: str) -> Any:
        """Reads values and state at first sight."""
        if name not in ("values", "state"):
            raise AttributeError(name)
        arena, slots = self._source
        values, state = arena.read_rows(slots)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "state", state)
        return values if name == "values" else state

    def commit(self) -> None:
        """Writes values and state, and forgets them."""
        arena, slots = self._source
        arena.write_rows(slots, self.values, self.state)
        self.forget()

    def forget(self) -> None:
        """Frees the copies; they are read again when they are asked for."""
        for name in ("values", "state"):
            self.__dict__.pop(name, None)


@dataclass(frozen=True)
class LocalCore(LocalRows):
    """A core of a tensor-train table, whole.

    Attributes:
        name: "core1", "core2" or "core3".
    """

    name: str

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """Values and state by the names of `fields_of`."""
        return {self.name: self.values, **{f"{self.name}.{name}": state for name, state in self.state.items()}}


class PlacedRows(NamedTuple):
    """Rows and where they are in their store.

    Attributes:
        rows: their numbers, or ids.
        slots: of each.
    """

    rows: range | npt.NDArray[np.int64]
    slots: range | npt.NDArray[Any]


class Changed(NamedTuple):
    """The changes since an earlier moment.

    Attributes:
        marks: by `id` of a store, a byte for each slot: 0 where its row was not updated.
        known: by name, what dynamic tables knew then, of those that this rank saves.
    """

    marks: Mapping[int, npt.NDArray[np.uint8]]
    known: Mapping[str, KnownBefore] = MappingProxyType({})


class ShardMoment:
    """A shard between two steps, for a thread that reads it beside later ones: copies, but for rows in their store.

    Args:
        places: of the rows, in the order in which they are written.
        arrays: see `Rows`.

    Attributes:
        expected: uint32, ascending, the slots of all rows, where `places` takes long to put them in order; else None.
    """

    expected: npt.NDArray[np.uint32] | None = None

    def __init__(self, places: Sequence[PlacedRows] = (), arrays: Mapping[str, npt.NDArray[Any]] | None = None) -> None:
        self._places, self._arrays = places, arrays or {}

    @property
    def places(self) -> Sequence[PlacedRows]:
        """The places of the rows, in the order in which they are written."""
        return self._places

    @property
    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """See `Rows`."""
        yield from self._arrays.items()

    @property
    def apart(self) -> Mapping[str, Sequence[RowPiece]]:
        """Pieces of rows that are not in the store of the others; see `Rows.pieces`."""
        return {}

    def close(self) -> None:
        """Ends reading: steps keep nothing for it from now on. May be called again."""


class _ChangedRows(ShardMoment):
    """The rows of a table that changed, and their numbers."""

    def __init__(self, spec: TableSpec, places: Sequence[PlacedRows]) -> None:
        super().__init__(places)
        self._dtype = row_dtype(spec.num_rows)

    @property
    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        if self._places:
            numbers = np.concatenate([each.rows for each in self._places])
            yield ROWS, torch.from_numpy(numbers).to(self._dtype).numpy()


def row_dtype(num_rows: int) -> torch.dtype:
    """The type of the numbers of rows in an increment."""
    return torch.int32 if num_rows <= 2**31 else torch.int64


class Field(NamedTuple):
    """An array of a table: the values or a state of its rows, a core, or a state of a core.

    Attributes:
        name: "values", or the name of a state; "core1" …, "core1.sum" … of cores.
        shape: of the whole table's.
        dtype: of its numbers.
        is_state: whether it is of the optimizer.
        is_by_row: whether ranks have rows of it; else each has it whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_state: bool
    is_by_row: bool


def fields_of(spec: TableSpec) -> list[Field]:
    """The fields of a whole table, in the order in which they are saved.

    Example:
        >>> [field.name for field in fields_of(TableSpec(name="item", num_rows=10, dim=4))]
        ['values', 'sum']
    """
    if spec.storage == "tensor_train":
        shapes = list(enumerate(spec.tensor_train_shape.core_shapes, start=1))
        named = [(f"core{number}", shape, False) for number, shape in shapes]
        named += [(f"core{number}.{name}", shape, True) for name in spec.optimizer.state for number, shape in shapes]
        return [Field(name, tuple(shape), spec.dtype, is_state, False) for name, shape, is_state in named]
    shapes, dtype = {"row": (spec.num_rows,), "element": (spec.num_rows, spec.dim)}, compute_dtype(spec.dtype)
    states = [Field(name, shapes[extent], dtype, True, True) for name, extent in spec.optimizer.state.items()]
    return [Field("values", shapes["element"], spec.dtype, False, True), *states]


class TableShard:
    """The shard of a table that this rank holds; as it is, until the next step.

    Attributes:
        spec: the table.
        form, is_common: see `Rows`.
    """

    form: Form
    is_common = False

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec

    @property
    def logical(self) -> LogicalShards | None:
        """See `Rows`."""
        return None

    @property
    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """See `Rows`."""
        yield from ()

    @property
    def pieces(self) -> Mapping[str, Sequence[RowPiece]]:
        """See `Rows`."""
        return {}

    @property
    def views(self) -> Sequence[LocalRows]:
        """Views that can be set: of rows that have numbers, or of cores, one by one; to be committed."""
        return []

    def replace(self, parts: Sequence[SavedShards], states: Sequence[str], step: int) -> None:
        """Replaces ids, all that is known of them, and their rows by what was saved. Rows with numbers have `views`.

        Args:
            parts: of the table; each shard of this rank is in one of them.
            states: of the optimizer, to be read too; others begin as those of new rows.
            step: how many batches had been opened for training.
        """
        raise NotImplementedError(f"the rows of table {self.spec.name!r} have numbers")

    @property
    def store(self) -> RowStore | None:
        """Has the rows; None where there are none."""
        return None

    @property
    def num_slots(self) -> int:
        """The end of the slots: one past the last slot of the rows in their store."""
        return 0

    def _places(self, changed: Changed | None) -> Iterator[PlacedRows]:
        """The rows in their store, or those of them that changed."""
        yield from ()

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The ids that have rows in the store; none where rows have numbers."""
        return np.empty(0, np.int64)

    def gone(self, before: npt.NDArray[np.int64], changed: Changed | None) -> npt.NDArray[np.int64]:
        """Which ids are known no more, neither in the store nor demoted: int64, ascending; none of numbered rows.

        Args:
            before: int64, distinct: ids that had rows in the store.
            changed: what changed since then; None: demoted ids are not asked for.

        Raises:
            StoreError: the store of demoted ids does not answer; names it.
        """
        return np.empty(0, np.int64)

    def vectors(self, changed: Changed | None, rank: int, world_size: int) -> Iterator[Vectors]:
        """The rows without their states, some at a time, or those that changed; demoted ones too.

        Args:
            changed: what changed; None: all are wanted. Rows that are computed from cores change all at once.
            rank: of rows that all ranks can compute, this one gives its share.
            world_size: how many ranks there are.

        Raises:
            StoreError: see `gone`.
        """
        for rows, slots in self._places(changed):
            assert self.store is not None
            for first in range(0, max(len(rows), 1), STORED_ROWS):
                cut = slice(first, first + STORED_ROWS)
                yield np.asarray(rows[cut], np.int64), _values_at(self.store, np.asarray(slots[cut], np.int64))

    def note(self) -> KnownBefore | None:
        """Which ids there are now, to be compared with later; it is to be closed. None where no ids have rows.

        Raises:
            StoreError: see `gone`.
        """
        return None

    def freeze(self, changed: Changed | None) -> ShardMoment:
        """The shard as it is now, or what changed of it; it is to be closed.

        Raises:
            StoreError: see `gone`.
        """
        return ShardMoment()


def _values_at(store: RowStore, slots: npt.NDArray[np.int64]) -> Tensor:
    """Copies, without the states."""
    return store.rows[torch.from_numpy(slots)] if store.has_views else store.read_rows(slots.astype(np.uint32))[0]


class StoredShard(TableShard):
    """Rows that have numbers, of a dense or tiered table.

    Args:
        spec: the table.
        store: has the rows.
        held: which, and where.
    """

    form: Form = "rows"

    def __init__(self, spec: TableSpec, store: RowStore, held: Sequence[Piece]) -> None:
        super().__init__(spec)
        self._store, self._held = store, held

    @property
    def store(self) -> RowStore:
        """Has the rows."""
        return self._store

    @property
    def views(self) -> list[LocalRows]:
        """Views of the rows; copies of their parts where they are in tiers or on a device."""
        store = self._store
        if not store.has_views:
            return [each for piece in self._held for each in StoredRows.of(store, piece)]
        found = []
        for piece in self._held:
            part = slice(piece.slots.start, piece.slots.stop, piece.slots.step)
            state = {name: tensor[part] for name, tensor in store.state.items()}
            found.append(LocalRows(piece.rows, store.rows[part], state))
        return found

    @property
    def pieces(self) -> Mapping[str, Sequence[RowPiece]]:
        """The views that have rows."""
        return {"": [each for each in self.views if len(each.rows)]}

    @property
    def num_slots(self) -> int:
        """The end of the slots: one past the last."""
        return max((piece.slots.stop for piece in self._held), default=0)

    def _places(self, changed: Changed | None) -> Iterator[PlacedRows]:
        """The rows, range by range, or those of each that changed."""
        marks = None if changed is None or not self.num_slots else changed.marks[id(self._store)]
        for piece in self._held:
            rows, slots = piece.rows, piece.slots
            if marks is not None:
                picked = np.flatnonzero(marks[slots.start : slots.stop : slots.step])
                rows, slots = rows.start + picked * rows.step, (slots.start + picked * slots.step).astype(np.uint32)
            if len(rows):
                yield PlacedRows(rows, slots)

    def freeze(self, changed: Changed | None) -> ShardMoment:
        """All rows, or those that changed; see `TableShard`."""
        places = list(self._places(changed))
        return ShardMoment(places) if changed is None else _ChangedRows(self.spec, places)


class CoreShard(TableShard):
    """The cores of a tensor-train table, which all ranks have.

    Args:
        spec: the table.
        cores: its cores.
    """

    form: Form = "cores"
    is_common = True

    def __init__(self, spec: TableSpec, cores: Cores) -> None:
        super().__init__(spec)
        self._cores = cores

    @property
    def arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        """Cores and their states, in the host's memory."""
        for name, tensor in self._cores.tensors.items():
            yield name, tensor.detach().cpu().numpy()

    @property
    def views(self) -> list[LocalRows]:
        """The cores, one by one, with their states."""
        cores, state = self._cores.cores, self._cores.state
        return [
            LocalCore(range(len(core)), core, {name: kept[number] for name, kept in state.items()}, f"core{number + 1}")
            for number, core in enumerate(cores)
        ]

    def freeze(self, changed: Changed | None) -> ShardMoment:
        """Copies of all: a step changes some of each core."""
        return ShardMoment(
            (), {name: tensor.detach().cpu().clone().numpy() for name, tensor in self._cores.tensors.items()}
        )

    def vectors(self, changed: Changed | None, rank: int, world_size: int) -> Iterator[Vectors]:
        """Computes the share of this rank."""
        first, stop = (self.spec.num_rows * each // world_size for each in (rank, rank + 1))
        for begin in range(first, stop, STORED_ROWS):
            ids = torch.arange(begin, min(begin + STORED_ROWS, stop))
            yield ids.numpy(), self._cores.rows(ids)
