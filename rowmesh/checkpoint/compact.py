"""Compacting: a full checkpoint of an increment and what it adds to, in its place."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.checkpoint.chain import Link, SavedTable, read_chain
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.known import NUMBERS, known_entry, saved_shards
from rowmesh.checkpoint.manifest import TableEntry
from rowmesh.checkpoint.write import save
from rowmesh.tables.dynamic import demoted_records as demoted
from rowmesh.tables.dynamic.records import REMOVED
from rowmesh.tables.shard import Form, LogicalShards, Which

SHARD_BYTES = 64 << 20
"""Of rows that are in memory at once."""


def compact(folder: Path) -> bool:
    """Makes a full checkpoint of an increment, in one process; increments that add to it add to the full one.

    What it added to stays. The increment stays until the full one is on disk.

    Returns:
        False: it was full.

    Raises:
        CheckpointError: a checkpoint of its chain is missing or damaged.
        CheckpointWriteError: it cannot be written.
    """
    chain = read_chain(folder)
    manifest = chain[0].manifest
    if manifest.parent is None:
        return False
    saved = _Saved(chain)
    dense = io.BytesIO()
    torch.save(saved.files[0].dense(), dense)
    save(folder, saved, dense.getbuffer(), metadata=manifest.metadata, replaces=manifest.identity, beside_steps=True)
    return True


class _Saved:
    """The tables of a chain, as `save` wants those of a collection."""

    def __init__(self, chain: Sequence[Link]) -> None:
        self.files = [SavedFiles(*link) for link in chain]
        self._entries = {name: [link.manifest.tables[name] for link in chain] for name in chain[0].manifest.tables}

    def synchronize(self) -> None:
        """No-op: nothing changes."""

    def shards(self, which: Which, /) -> list[_SavedRows]:
        """All tables, whole."""
        return [_READ[of_table[0].form](table, of_table, self.files) for table, of_table in self._entries.items()]


class _SavedRows(NamedTuple):
    """A table as it was saved; see `Rows`."""

    spec: Any
    form: Form
    arrays: Iterator[tuple[str, npt.NDArray[Any]]] = iter(())
    pieces: Mapping[str, Sequence[_Piece]] = MappingProxyType({})
    logical: LogicalShards | None = None
    is_common: bool = False


def _rows(table: str, entries: Sequence[TableEntry], files: Sequence[SavedFiles]) -> _SavedRows:
    saved, num_rows = SavedTable(table, entries, files), entries[0].num_rows
    # As they are in the files: of bfloat16 the bits.
    forms = {kind: files[-1].like(file) for kind, file in entries[-1].parts[0].files.items()}

    def piece(rows: range) -> _Piece:
        def read(kind: str) -> Tensor:
            target = forms[kind].new_empty(len(rows), *forms[kind].shape[1:])
            saved.fill(rows, {kind: target})
            return target

        return _Piece(rows, forms, read)

    size = _rows_at_once(math.prod(form.shape[1:]) * form.itemsize for form in forms.values())
    pieces = [piece(range(first, min(first + size, num_rows))) for first in range(0, num_rows, size)]
    return _SavedRows(_spec(table, entries[0]), "rows", pieces={"": pieces})


def _cores(table: str, entries: Sequence[TableEntry], files: Sequence[SavedFiles]) -> _SavedRows:
    entry = entries[0].cores
    assert entry is not None

    def arrays() -> Iterator[tuple[str, npt.NDArray[Any]]]:
        for kind, file in entry.files.items():
            like = files[0].like(file)
            yield kind, np.array(files[0].array(table, kind, entry.files, like, tuple(like.shape))[:])

    return _SavedRows(_spec(table, entries[0]), "cores", arrays())


def _ids(table: str, entries: Sequence[TableEntry], files: Sequence[SavedFiles]) -> _SavedRows:
    """What a dynamic table knows; demoted ids have their facts beside the states."""
    known, (saved,) = known_entry(entries[0]), saved_shards(table, entries, files)
    kinds = [kind for kind in known.parts[0].files if kind not in (REMOVED, demoted.REMOVED)]
    numbers = [kind for kind in kinds if kind in NUMBERS and kind != demoted.FACTS]
    of_rows = [kind for kind in kinds if kind not in numbers]
    of_demoted = [kind.removeprefix(demoted.PREFIX) for kind in of_rows if kind.startswith(demoted.PREFIX)]
    of_ids = [kind for kind in of_rows if not kind.startswith(demoted.PREFIX)]
    size = _rows_at_once(saved.read(kind, slice(0)).itemsize * entries[0].dim for kind in kinds)

    def pieces(num_ids: int, kinds: Sequence[str], prefix: str) -> list[_Piece]:
        cuts = [slice(first, first + size) for first in range(0, max(num_ids, 1), size)]
        reads = [lambda kind, cut=cut: saved.read(f"{prefix}{kind}", cut) for cut in cuts]
        return [_Piece(read("ids").numpy(), kinds, read) for read in reads]

    found = {"": pieces(saved.num_ids, of_ids, "")}
    if demoted.IDS in kinds:
        found[demoted.PREFIX] = pieces(saved.num_demoted, of_demoted, demoted.PREFIX)
    arrays = ((kind, saved.read(kind, slice(None)).numpy()) for kind in numbers)
    logical = LogicalShards(saved.shards, max(part.step for part in known.parts), known.seed)
    return _SavedRows(_spec(table, entries[0]), "ids", arrays, found, logical)


_READ = {"rows": _rows, "cores": _cores, "ids": _ids}


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
    return max(1, SHARD_BYTES // max(row_bytes))


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
