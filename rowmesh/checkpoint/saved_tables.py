"""Saved tables: a table of a checkpoint, or of a chain, that is loaded into a shard, or written anew as a whole.

`reader_of` gives the reader of an entry: rows, cores and dynamic tables differ here, and in `entries`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.checkpoint.chain import SavedTable
from rowmesh.checkpoint.entries import CoresEntry, KnownEntry, RowsEntry, TableEntry
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.known import NUMBERS, known_entry, saved_shards
from rowmesh.checkpoint.manifest import as_numpy
from rowmesh.errors import CheckpointError
from rowmesh.exchange.resolve.known import no_state
from rowmesh.ops.prefixes import Workspace, sort_ids
from rowmesh.ops.tensor_train import Lookup
from rowmesh.tables.dynamic import demoted_records as demoted
from rowmesh.tables.dynamic.records import REMOVED
from rowmesh.tables.shard import Form, LogicalShards, Rows, TableShard
from rowmesh.tables.tensor_train import TensorTrainShape

_PIECE_BYTES = 64 << 20  # of rows that are read at once


class TableReader:
    """A table that was saved.

    Args:
        table: its name.
        entries: of the table, the newest first.
        files: of the same checkpoints.
    """

    def __init__(self, table: str, entries: Sequence[TableEntry], files: Sequence[SavedFiles]) -> None:
        self._table, self._entries, self._files = table, entries, files

    def load(self, shard: TableShard, *, optimizer_state: bool) -> None:
        """Sets what this rank holds of a table of the same form.

        Raises:
            CheckpointError: a file is missing, damaged, or has something else.
        """
        raise NotImplementedError

    def fill(self, rows: range, values: Tensor) -> None:
        """Reads values `[len(rows), D]` of rows that have numbers.

        Raises:
            CheckpointError: see `load`; or rows have ids.
        """
        raise CheckpointError(f"the rows of table {self._table!r} have ids and no numbers; load or export the table")

    def whole(self) -> Rows:
        """All of it, to be written, as it is in the files: of bfloat16 the bits."""
        raise NotImplementedError


def reader_of(table: str, entries: Sequence[TableEntry], files: Sequence[SavedFiles]) -> TableReader:
    """The reader of a table, by the form of its newest entry; see `TableReader`."""
    return _READERS[type(entries[0].content)](table, entries, files)


class _SavedByRow(TableReader):
    """Rows that have numbers."""

    def __init__(self, table: str, entries: Sequence[TableEntry], files: Sequence[SavedFiles]) -> None:
        super().__init__(table, entries, files)
        self._saved = SavedTable(table, entries, files)

    def load(self, shard: TableShard, *, optimizer_state: bool) -> None:
        """See `TableReader`."""
        for view in shard.views:
            self._saved.fill(view.rows, {"values": view.values, **(view.state if optimizer_state else {})})
            view.commit()

    def fill(self, rows: range, values: Tensor) -> None:
        """See `TableReader`."""
        self._saved.fill(rows, {"values": values})

    def whole(self) -> Rows:
        """See `TableReader`."""
        num_rows, full = self._entries[0].num_rows, self._files[-1]
        forms = {kind: full.like(file) for kind, file in self._entries[-1].parts[0].files.items()}

        def piece(rows: range) -> _Piece:
            def read(kind: str) -> Tensor:
                target = forms[kind].new_empty(len(rows), *forms[kind].shape[1:])
                self._saved.fill(rows, {kind: target})
                return target

            return _Piece(rows, forms, read)

        size = _rows_at_once(math.prod(form.shape[1:]) * form.itemsize for form in forms.values())
        pieces = [piece(range(first, min(first + size, num_rows))) for first in range(0, num_rows, size)]
        return _WholeTable(_spec(self._table, self._entries[0]), "rows", pieces={"": pieces})


class _SavedCores(TableReader):
    """Cores, which an increment has whole."""

    @property
    def _cores(self) -> CoresEntry:
        found = self._entries[0].cores
        assert found is not None
        return found

    def load(self, shard: TableShard, *, optimizer_state: bool) -> None:
        """See `TableReader`."""
        for view in shard.views:
            for name, target in view.fields.items():
                if optimizer_state or "." not in name:
                    own = target.cpu()  # a copy where cores are on a device
                    self._read(name, own)
                    target.copy_(own)
            view.commit()

    def fill(self, rows: range, values: Tensor) -> None:
        """Computes the bits that a look-up of the same ids gives."""
        shape, cores = self._read_cores
        ids = torch.arange(rows.start, rows.stop, rows.step, device="cpu")
        found = sort_ids(ids, shape.num_rows, shape.row_factors, self._workspace, is_distinct=True)
        Lookup(found).rows(cores, values, keep=False)

    @cached_property
    def _workspace(self) -> Workspace:
        return Workspace()

    @cached_property
    def _read_cores(self) -> tuple[TensorTrainShape, tuple[Tensor, ...]]:
        entry, cores = self._entries[0], list[Tensor]()
        factors: Any = (self._cores.row_factors, self._cores.dim_factors, self._cores.ranks)
        shape = TensorTrainShape(entry.num_rows, entry.dim, *factors)
        for number, of_core in enumerate(shape.core_shapes, start=1):
            core = torch.empty(of_core, dtype=getattr(torch, entry.dtype), device="cpu")
            self._read(f"core{number}", core)
            cores.append(core)
        return shape, tuple(cores)

    def _read(self, kind: str, target: Tensor) -> None:
        """Reads a core, or the state of one, to the host's memory."""
        file = self._files[0].array(self._table, kind, self._cores.files, target, tuple(target.shape))
        as_numpy(target)[:] = file[:]

    def whole(self) -> Rows:
        """See `TableReader`."""
        return _WholeTable(_spec(self._table, self._entries[0]), "cores", self._arrays(), is_common=True)

    def _arrays(self) -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for kind, file in self._cores.files.items():
            like = self._files[0].like(file)
            yield kind, np.array(self._files[0].array(self._table, kind, self._cores.files, like, tuple(like.shape))[:])


class _SavedIds(TableReader):
    """A dynamic table that was saved."""

    @property
    def _known(self) -> KnownEntry:
        return known_entry(self._entries[0])

    def load(self, shard: TableShard, *, optimizer_state: bool) -> None:
        """See `TableReader`."""
        spec, logical, parts = shard.spec, shard.logical, []
        states = list(spec.optimizer.state) if optimizer_state else []
        if logical is not None and logical.shards:
            forms = {"values": torch.empty(0, spec.dim, dtype=spec.dtype)}
            forms |= {name: form for name, form in no_state(spec).items() if name in states}
            parts = saved_shards(self._table, self._entries, self._files, forms=forms, shards=logical.shards)
        shard.replace(parts, states, self._known.step)

    def whole(self) -> Rows:
        """See `TableReader`; demoted ids have their facts beside the states."""
        known, (saved,) = self._known, saved_shards(self._table, self._entries, self._files)
        kinds = [kind for kind in known.parts[0].files if kind not in (REMOVED, demoted.REMOVED)]
        numbers = [kind for kind in kinds if kind in NUMBERS and kind != demoted.FACTS]
        of_rows = [kind for kind in kinds if kind not in numbers]
        of_demoted = [kind.removeprefix(demoted.PREFIX) for kind in of_rows if kind.startswith(demoted.PREFIX)]
        of_ids = [kind for kind in of_rows if not kind.startswith(demoted.PREFIX)]
        size = _rows_at_once(saved.read(kind, slice(0)).itemsize * self._entries[0].dim for kind in kinds)

        def pieces(num_ids: int, kinds: Sequence[str], prefix: str) -> list[_Piece]:
            cuts = [slice(first, first + size) for first in range(0, max(num_ids, 1), size)]
            reads = [lambda kind, cut=cut: saved.read(f"{prefix}{kind}", cut) for cut in cuts]
            return [_Piece(read("ids").numpy(), kinds, read) for read in reads]

        found = {"": pieces(saved.num_ids, of_ids, "")}
        if demoted.IDS in kinds:
            found[demoted.PREFIX] = pieces(saved.num_demoted, of_demoted, demoted.PREFIX)
        arrays = ((kind, saved.read(kind, slice(None)).numpy()) for kind in numbers)
        logical = LogicalShards(saved.shards, known.step, known.seed)
        return _WholeTable(_spec(self._table, self._entries[0]), "ids", arrays, found, logical)


_READERS: Mapping[type, Callable[[str, Sequence[TableEntry], Sequence[SavedFiles]], TableReader]] = {
    RowsEntry: _SavedByRow,
    CoresEntry: _SavedCores,
    KnownEntry: _SavedIds,
}


class _WholeTable(NamedTuple):
    """A table as it was saved; see `Rows`."""

    spec: Any
    form: Form
    arrays: Iterator[tuple[str, npt.NDArray[Any]]] = iter(())
    pieces: Mapping[str, Sequence[_Piece]] = MappingProxyType({})
    logical: LogicalShards | None = None
    is_common: bool = False


def _spec(name: str, entry: TableEntry) -> SimpleNamespace:
    """A table as it was saved, in place of a `TableSpec`."""
    dynamic = None
    if entry.known is not None:
        rules = {"ttl_seconds": 0, "mode": "drop", **entry.known.rules}  # which some checkpoints do not have
        dynamic = SimpleNamespace(**rules, num_shards=rules["shards"])
    return SimpleNamespace(
        name=name,
        num_rows=entry.num_rows,
        dim=entry.dim,
        dtype=getattr(torch, entry.dtype),
        optimizer=SimpleNamespace(name=entry.optimizer),
        tensor_train_shape=entry.cores,
        dynamic=dynamic,
    )


def _rows_at_once(row_bytes: Iterable[int]) -> int:
    return max(1, _PIECE_BYTES // max(row_bytes))


class _Piece:
    """Some rows, of which values and states are read when they are asked for."""

    def __init__(self, rows: Sized, kinds: Iterable[str], read: Callable[[str], Tensor]) -> None:
        self.rows, self._read = rows, read
        self.state = _State([kind for kind in kinds if kind != "values"], read)

    @property
    def values(self) -> Tensor:
        """`[n, D]`."""
        return self._read("values")

    def forget(self) -> None:
        """No-op: nothing is kept."""


class _State(Mapping[str, Tensor]):
    def __init__(self, kinds: Sequence[str], read: Callable[[str], Tensor]) -> None:
        self._kinds, self._read = kinds, read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._kinds)

    def __len__(self) -> int:
        return len(self._kinds)
