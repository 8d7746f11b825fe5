"""Compacting: a full checkpoint of an increment and what it adds to, in its place."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import torch

from rowmesh.checkpoint.chain import ChainLink, read_chain
from rowmesh.checkpoint.files import SavedFiles
from rowmesh.checkpoint.saved_tables import reader_of
from rowmesh.checkpoint.write import save
from rowmesh.tables.shard import Rows, Which


def compact(folder: Path) -> bool:
    """Makes a full checkpoint of an increment, in one process; increments that add to it add to the full one.

    The checkpoints that it added to stay. The increment stays until the full one is on disk.

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
    saved = _ChainTables(chain)
    dense = io.BytesIO()
    torch.save(saved.files[0].dense(), dense)
    save(folder, saved, dense.getbuffer(), metadata=manifest.metadata, replaces=manifest.identity, beside_steps=True)
    return True


class _ChainTables:
    """The tables of a chain, as `save` wants those of a collection."""

    def __init__(self, chain: Sequence[ChainLink]) -> None:
        self.files = [SavedFiles(*link) for link in chain]
        self._entries = {name: [link.manifest.tables[name] for link in chain] for name in chain[0].manifest.tables}

    def synchronize(self) -> None:
        """No-op: nothing changes."""

    def shards(self, which: Which, /) -> list[Rows]:
        """All tables, whole."""
        return [reader_of(table, of_table, self.files).whole() for table, of_table in self._entries.items()]
