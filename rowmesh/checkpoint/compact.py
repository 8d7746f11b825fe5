"""Compacting: a full checkpoint of an increment and what it adds to, in its place."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from rowmesh.checkpoint.chain import Link, SavedTable, read_chain
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.known import NUMBERS, saved_shards
from rowmesh.checkpoint.manifest import CoresEntry, TableEntry
from rowmesh.checkpoint.write import RowHolder, save
from rowmesh.tables.dynamic import demoted_records as demoted
from rowmesh.tables.dynamic.records import REMOVED

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
    holder = cast("RowHolder", saved)  # to be written, it needs no more
    save(folder, holder, dense.getbuffer(), metadata=manifest.metadata, replaces=manifest.identity, beside_steps=True)
    return True


class _Saved:
    """The tables of a chain, as `save` wants those of a collection."""

    def __init__(self, chain: Sequence[Link]) -> None:
        self.files = [SavedFiles(*link) for link in chain]
        self._entries = {name: [link.manifest.tables[name] for link in chain] for name in chain[0].manifest.tables}
        self.tables = [_spec(name, entries[0]) for name, entries in self._entries.items()]

    def synchronize(self) -> None:
        """No-op: nothing changes."""

    def local_rows(self, table: str) -> list[_Piece]:
        """All rows of a table."""
        entries = self._entries[table]
        saved, num_rows = SavedTable(table, entries, self.files), entries[0].num_rows
        # As they are in the files: of bfloat16 the bits.
        forms = {kind: self.files[-1].like(file) for kind, file in entries[-1].parts[0].files.items()}

        def piece(rows: range) -> _Piece:
            def read(kind: str) -> Tensor:
                target = forms[kind].new_empty(len(rows), *forms[kind].shape[1:])
                saved.fill(rows, {kind: target})
                return target

            return _Piece(rows, forms, read)

        size = _rows_at_once(math.prod(form.shape[1:]) * form.itemsize for form in forms.values())
        return [piece(range(first, min(first + size, num_rows))) for first in range(0, num_rows, size)]

    def cores(self, table: str) -> SimpleNamespace:
        """The cores of a table and their states."""
        entry, found = self._entries[table][0].cores, {}
        assert isinstance(entry, CoresEntry)
        for kind, file in entry.files.items():
            like = self.files[0].like(file)
            array = self.files[0].array(table, kind, entry.files, like, tuple(like.shape))
            found[kind] = torch.from_numpy(np.array(array[:]))
        return SimpleNamespace(tensors=found)

    def records(self, table: str) -> SimpleNamespace:
        """What a dynamic table knows; demoted ids have their facts beside the states."""
        entries = self._entries[table]
        known, (saved,) = entries[0].known, saved_shards(table, entries, self.files)
        assert known is not None
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

        return SimpleNamespace(
            is_first=True,
            shards=saved.shards,
            step=max(part.step for part in known.parts),
            seed=known.seed,
            arrays=((kind, saved.read(kind, slice(None)).numpy()) for kind in numbers),
            rows=pieces(saved.num_ids, of_ids, ""),
            demoted_rows=pieces(saved.num_demoted, of_demoted, demoted.PREFIX) if demoted.IDS in kinds else [],
        )


def _spec(name: str, entry: TableEntry) -> SimpleNamespace:
    """A table as it was saved, in place of a `TableSpec`."""
    storage, dynamic = "dense" if entry.cores is None else "tensor_train", None
    if entry.known is not None:
        rules = {"ttl_seconds": 0, "mode": "drop", **entry.known.rules}  # which some checkpoints do not have
        storage, dynamic = "dynamic", SimpleNamespace(**rules, num_shards=rules["shards"])
    return SimpleNamespace(
        name=name,
        num_rows=entry.num_rows,
        dim=entry.dim,
        dtype=getattr(torch, entry.dtype),
        optimizer=SimpleNamespace(name=entry.optimizer),
        storage=storage,
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
