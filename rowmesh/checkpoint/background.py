"""Saving in the background: a checkpoint of the moment between two steps, written while training goes on."""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rowmesh.checkpoint.manifest import Parent
from rowmesh.checkpoint.snapshot import Changed, Room, Snapshot, Source
from rowmesh.checkpoint.write import Increment, save
from rowmesh.mesh.groups import abort


class Base(NamedTuple):
    """Of what a checkpoint is an increment.

    Attributes:
        parent: the checkpoint that it adds to.
        changed: what changed since, as `Changes.take` gives it.
    """

    parent: Parent
    changed: Changed


def save_increment(
    folder: Path,
    embeddings: Source,
    dense: Mapping[str, Any],
    base: Base,
    *,
    metadata: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the rows that changed since another checkpoint, and waits for the disk; see `checkpoint.save`."""
    snapshot = Snapshot(embeddings, 0 if group is None else dist.get_rank(group), base.changed)
    increment = Increment(base.parent, snapshot.changed_rows)
    try:
        save(folder, snapshot, dense, metadata=metadata, group=group, increment=increment)
    finally:
        snapshot.close()


class BackgroundSave:
    """A checkpoint that a thread writes, as `checkpoint.save` writes it: the same files, to the bit.

    Making it is collective, between two steps, with nothing under way; every rank then calls `wait`. What is small is
    copied at once: `dense` and cores. For rows see `Snapshot`.

    Args:
        folder, embeddings, dense, metadata: as for `checkpoint.save`.
        group: a process group that nothing else uses meanwhile; None for a single process.
        base: of an increment: what it adds to, and what changed since; None: all rows are written.
        room: for pre-images, which stays for the next one; default: of its own.

    Raises:
        RuntimeError, OSError: `dense` cannot be copied, or no thread begins.
    """

    def __init__(
        self,
        folder: Path,
        embeddings: Source,
        dense: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
        base: Base | None = None,
        room: Room | None = None,
    ) -> None:
        rank = 0 if group is None else dist.get_rank(group)
        copied = io.BytesIO()
        if rank == 0:
            torch.save(dict(dense), copied)
        self._group, self._error, self._base = group, None, base
        self.snapshot = Snapshot(embeddings, rank, None if base is None else base.changed, room)
        arguments = (folder, copied.getbuffer(), dict(metadata or {}))
        self._thread = threading.Thread(target=self._run, args=arguments, name="rowmesh checkpoint", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.snapshot.close()
            raise

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once on this rank."""
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """Why it is not on disk, once it is done."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the checkpoint is on disk, or cannot be written; returns whether that is so by now.

        Raises:
            CheckpointWriteError, CheckpointError: as `checkpoint.save`.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def cancel(self) -> None:
        """Ends it, here and at other ranks, and removes what was written; for runs that fail."""
        self.snapshot.close()
        if self._thread.is_alive() and self._group is not None:
            abort(self._group)
        self._thread.join()

    def _run(self, folder: Path, dense: memoryview, metadata: dict[str, Any]) -> None:
        try:
            increment = None if self._base is None else Increment(self._base.parent, self.snapshot.changed_rows)
            save(folder, self.snapshot, dense, metadata=metadata, group=self._group, increment=increment)
        except BaseException as error:  # raised where it is waited for
            self._error = error
        finally:
            self.snapshot.close()
