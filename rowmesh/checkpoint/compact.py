"""Compacting: a full checkpoint of an increment and what it adds to, in its place."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.checkpoint.chain import SavedTable, read_chain
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.known import NUMBERS, SavedShards, saved_shards
from rowmesh.checkpoint.manifest import CoresEntry, TableEntry
from rowmesh.checkpoint.write import RowHolder, save
from rowmesh.dynamic import demoted_records as demoted
from rowmesh.dynamic.records import REMOVED

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
    save(folder, holder, dense.getbuffer(), metadata=manifest.metadata, replaces=manifest.identity, beside_steps=True)
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
        self.tensor_train_shape, self.dynamic = entry.cores, None
        if entry.known is not None:
            self.storage = "dynamic"
            rules = {"ttl_seconds": 0, "mode": "drop", **entry.known.rules}  # which some checkpoints do not have
            self.dynamic = SimpleNamespace(**rules, num_shards=rules["shards"])
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

    def records(self) -> _Records:
        """What it knows."""
        known, (saved,) = self._entries[0].known, saved_shards(self.name, self._entries, self._files)
        assert known is not None
        kinds = [kind for kind in known.parts[0].files if kind not in (REMOVED, demoted.REMOVED)]
        row_bytes = max(saved.read(kind, slice(0)).itemsize for kind in kinds) * self.dim
        return _Records(saved, max(part.step for part in known.parts), kinds, max(1, SHARD_BYTES // row_bytes))


class _Records:
    """What a dynamic table knows: `Records` that are only written."""

    is_first = True

    def __init__(self, saved: SavedShards, step: int, kinds: Sequence[str], size: int) -> None:
        self.shards, self.step, self._saved, self._kinds, self._size = saved.shards, step, saved, kinds, size

    @property
    def arrays(self) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """All but rows and their states."""
        for kind in self._kinds:
            if kind in NUMBERS and kind != demoted.FACTS:  # which are written with the rows
                yield kind, self._saved.read(kind, slice(None)).numpy()

    @property
    def rows(self) -> list[_KnownRows]:
        """Rows and states in the order of the ids."""
        kinds = [kind for kind in self._kinds if kind not in NUMBERS and not kind.startswith(demoted.PREFIX)]
        return self._cut(self._saved.num_ids, kinds, "")

    @property
    def demoted_rows(self) -> list[_KnownRows]:
        """The same of demoted ids, with their facts; none where ids are not demoted."""
        if demoted.IDS not in self._kinds:
            return []
        kinds = [kind for kind in self._kinds if kind.startswith(demoted.PREFIX)]
        kinds = [kind.removeprefix(demoted.PREFIX) for kind in kinds if kind == demoted.FACTS or kind not in NUMBERS]
        return self._cut(self._saved.num_demoted, kinds, demoted.PREFIX)

    def _cut(self, num_ids: int, kinds: Sequence[str], prefix: str) -> list[_KnownRows]:
        cuts = range(0, max(num_ids, 1), self._size)
        return [_KnownRows(self._saved, slice(first, first + self._size), kinds, prefix) for first in cuts]


class _KnownRows:
    """Some rows of a dynamic table, read when they are asked for."""

    def __init__(self, saved: SavedShards, which: slice, kinds: Sequence[str], prefix: str) -> None:
        self._saved, self._which, self._prefix = saved, which, prefix
        self.kinds = [kind for kind in kinds if kind != "values"]
        self.rows = saved.read(f"{prefix}ids", which).numpy()

    @property
    def values(self) -> Tensor:
        """`[n, D]`."""
        return self.read("values")

    @property
    def state(self) -> _State:
        """By name, each read when it is asked for."""
        return _State(self)

    def read(self, kind: str) -> Tensor:
        """The values, or a state."""
        return self._saved.read(self._prefix + kind, self._which)

    def forget(self) -> None:
        """No-op: nothing is kept."""


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
    def __init__(self, shard: _Shard | _KnownRows) -> None:
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

    def records(self, table: str) -> _Records:
        """What a dynamic table knows."""
        return self._by_name[table].records()

    def cores(self, table: str) -> _Cores:
        """The cores of a table."""
        return self._by_name[table].cores()
