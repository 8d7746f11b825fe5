"""Compacting: a full checkpoint of an increment and what it adds to, in its place."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from rowmesh.checkpoint.chain import SavedTable, read_chain
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.manifest import CoresEntry, TableEntry
from rowmesh.checkpoint.write import RowHolder, save

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
    files = [SavedFiles(*link) for link in chain]
    rows = _Rows([_Table(name, [link.manifest.tables[name] for link in chain], files) for name in manifest.tables])
    dense = io.BytesIO()
    torch.save(files[0].dense(), dense)
    holder = cast("RowHolder", rows)  # to be written, it needs no more
    save(folder, holder, dense.getbuffer(), metadata=manifest.metadata, replaces=manifest.identity)
    return True


class _Rule(NamedTuple):
    name: str


class _Table:
    """A table as it was saved, in place of a `TableSpec`."""

    def __init__(self, name: str, entries: Sequence[TableEntry], files: Sequence[SavedFiles]) -> None:
        entry = entries[0]
        self.name, self.num_rows, self.dim = name, entry.num_rows, entry.dim
        self.dtype: torch.dtype = getattr(torch, entry.dtype)
        self.optimizer = _Rule(entry.optimizer)
        self.storage = "dense" if entry.cores is None else "tensor_train"
        self.tensor_train_shape = entry.cores
        self._entries, self._files = entries, files

    def shards(self) -> list[_Shard]:
        """Its rows."""
        saved = SavedTable(self.name, self._entries, self._files)
        # As they are in the files: of bfloat16 the bits.
        rooms = {kind: self._files[-1].like(file) for kind, file in self._entries[-1].parts[0].files.items()}
        row_bytes = max(math.prod(room.shape[1:]) * room.itemsize for room in rooms.values())
        size = max(1, SHARD_BYTES // row_bytes)
        cuts = [range(first, min(first + size, self.num_rows)) for first in range(0, self.num_rows, size)]
        return [_Shard(cut, rooms, saved) for cut in cuts]

    def cores(self) -> _Cores:
        """Its cores and their states."""
        entry, found = self._entries[0].cores, {}
        assert isinstance(entry, CoresEntry)
        for kind, file in entry.files.items():
            like = self._files[0].like(file)
            found[kind] = torch.from_numpy(
                np.array(self._files[0].array(self.name, kind, entry.files, like, tuple(like.shape))[:])
            )
        return _Cores(found)


@dataclass(frozen=True)
class _Cores:
    tensors: dict[str, Tensor]


class _Shard:
    """Some rows, read when they are asked for; `LocalRows` that are only read."""

    def __init__(self, rows: range, rooms: dict[str, Tensor], saved: SavedTable) -> None:
        self.rows, self._rooms, self._saved = rows, rooms, saved

    @property
    def values(self) -> Tensor:
        """`[n, D]`."""
        return self.read("values")

    @property
    def state(self) -> _State:
        """By name, each read when it is asked for."""
        return _State(self)

    def forget(self) -> None:
        """No-op: nothing is kept."""

    @property
    def kinds(self) -> list[str]:
        """The names of states."""
        return [kind for kind in self._rooms if kind != "values"]

    def read(self, kind: str) -> Tensor:
        """The values, or a state."""
        room = self._rooms[kind]
        target = room.new_empty(len(self.rows), *room.shape[1:])
        self._saved.fill(self.rows, {kind: target})
        return target


class _State(Mapping[str, Tensor]):
    def __init__(self, shard: _Shard) -> None:
        self._shard = shard

    def __getitem__(self, name: str) -> Tensor:
        return self._shard.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard.kinds)

    def __len__(self) -> int:
        return len(self._shard.kinds)


class _Rows:
    """What is saved."""

    def __init__(self, tables: Sequence[_Table]) -> None:
        self.tables, self._by_name = tables, {table.name: table for table in tables}

    def synchronize(self) -> None:
        """No-op: nothing changes."""

    def local_rows(self, table: str) -> list[_Shard]:
        """All rows of a table."""
        return self._by_name[table].shards()

    def cores(self, table: str) -> _Cores:
        """The cores of a table."""
        return self._by_name[table].cores()
