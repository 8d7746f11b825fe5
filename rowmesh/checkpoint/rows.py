"""Saved rows: the rows of one table of a checkpoint by their numbers, without a collection to load them into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.checkpoint.chain import ChainLink, read_chain
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.known import saved_shards
from rowmesh.checkpoint.manifest import Manifest
from rowmesh.checkpoint.saved_tables import reader_of
from rowmesh.errors import CheckpointError
from rowmesh.tables.dynamic import demoted_records as demoted

DEMOTED_VALUES = f"{demoted.PREFIX}values"


class SavedRows:
    """The rows of one table, whichever ranks wrote them; those of a tensor-train table are computed from its cores.

    Args:
        folder: the checkpoint.
        manifest: of the checkpoint.
        table: its name.
        verify: compare what is read with the checksums in the manifest.

    Raises:
        CheckpointError: there is no such table.
    """

    def __init__(self, folder: Path, manifest: Manifest, table: str, *, verify: bool = True) -> None:
        if table not in manifest.tables:
            raise CheckpointError(f"the model in {folder} has no table {table!r}, only: {', '.join(manifest.tables)}")
        chain = _chain(folder, manifest)
        files = [SavedFiles(*link, verify=verify) for link in chain]
        entry, self.table = manifest.tables[table], table
        self._saved = reader_of(table, [link.manifest.tables[table] for link in chain], files)
        self.num_rows, self.dim = entry.num_rows, entry.dim
        self.dtype: torch.dtype = getattr(torch, entry.dtype)

    def read(self, rows: range) -> Tensor:
        """Values `[len(rows), D]` of the table's dtype, with memory of their own.

        Raises:
            CheckpointError: a file is missing or damaged, or a row is in no file.
        """
        values = torch.empty(len(rows), self.dim, dtype=self.dtype, device="cpu")
        if len(rows):
            self._saved.fill(rows, values)
        return values


class SavedKnown:
    """The ids that a dynamic table knows, with their counts and rows, in the order of the shards; demoted ones too.

    Args:
        folder: the checkpoint.
        manifest: of the checkpoint.
        table: its name; of a dynamic table.
        verify: compare what is read with the checksums in the manifest.
    """

    def __init__(self, folder: Path, manifest: Manifest, table: str, *, verify: bool = True) -> None:
        self.table, chain = table, _chain(folder, manifest)
        entries = [link.manifest.tables[table] for link in chain]
        self.dim, self.dtype = entries[0].dim, getattr(torch, entries[0].dtype)
        forms = {"values": torch.empty(0, self.dim, dtype=self.dtype, device="cpu")}
        files = [SavedFiles(*link, verify=verify) for link in chain]
        self._parts = saved_shards(table, entries, files, forms=forms)
        self.num_ids = sum(part.num_ids + part.num_demoted for part in self._parts)

    def read(self, size: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Tensor]]:
        """Ids, counts and values `[n, D]`, at most `size` at a time.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        for part in self._parts:
            for begin in range(0, part.num_ids, size):
                some = slice(begin, begin + size)
                yield part.read("ids", some).numpy(), part.read("counts", some).numpy(), part.read("values", some)
            for begin in range(0, part.num_demoted, size):
                some = slice(begin, begin + size)
                ids, facts, values = (part.read(kind, some) for kind in (demoted.IDS, demoted.FACTS, DEMOTED_VALUES))
                yield ids.numpy(), facts[:, 1].numpy(), values


def _chain(folder: Path, manifest: Manifest) -> tuple[ChainLink, ...]:
    return (ChainLink(folder, manifest), *(read_chain(folder)[1:] if manifest.parent else ()))


def as_float(values: Tensor) -> npt.NDArray[Any]:
    """Values as NumPy has them: bfloat16 as float32.

    >>> as_float(torch.tensor([1.5], dtype=torch.bfloat16)).dtype
    dtype('float32')
    """
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
