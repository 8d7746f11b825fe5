"""Saving in the background: a checkpoint of the moment between two steps, written while training goes on."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import main_thread
from typing import Any, NamedTuple

import torch

from rowmesh._support.files.advice import as_refusal
from rowmesh._support.worker import Worker
from rowmesh.checkpoint.manifest import Parent
from rowmesh.checkpoint.room import Room
from rowmesh.checkpoint.snapshot import Snapshot
from rowmesh.checkpoint.write import save
from rowmesh.mesh.peers import Peers
from rowmesh.tables.shard import Changed, RowHolder, Rows, Which

logger = logging.getLogger("rowmesh")


class Base(NamedTuple):
    """The parent of an increment, and the changes since.

    Attributes:
        parent: the checkpoint that it adds to.
        changed: what changed since, as `Changes.take` gives it.
    """

    parent: Parent
    changed: Changed


def save_increment(
    folder: Path,
    embeddings: RowHolder,
    dense: Mapping[str, Any],
    base: Base,
    *,
    metadata: Mapping[str, Any] | None = None,
    peers: Peers | None = None,
) -> None:
    """Writes the rows that changed since another checkpoint, and waits for the disk; see `checkpoint.save`."""
    try:
        snapshot = Snapshot(embeddings, 0 if peers is None else peers.rank, base.changed)
    except Exception as error:  # the other ranks wait
        save(folder, _Failed(as_refusal(error)), dense, metadata=metadata, peers=peers)
        raise
    try:
        save(folder, snapshot, dense, metadata=metadata, peers=peers, parent=base.parent)
    finally:
        snapshot.close()


class BackgroundSave:
    """A checkpoint that a thread writes, as `checkpoint.save` writes it: the same files, to the bit.

    Making it is collective, between two steps, with nothing under way; every rank then calls `wait`. Small parts,
    `dense` and cores, are copied at once. For rows see `Snapshot`. Where a rank has no memory for that, or cannot begin
    a thread, making it succeeds on all ranks, and `wait` raises on all of them.

    Args:
        folder, embeddings, dense, metadata: as for `checkpoint.save`.
        peers: the ranks, of a process group that nothing else uses meanwhile; default: this process alone.
        base: of an increment: what it adds to, and what changed since; None: all rows are written.
        room: for pre-images and copies, which stays for the next one; default: of its own.
        at_end: called when it is on disk, by the thread that wrote it; raises nothing.
    """

    def __init__(
        self,
        folder: Path,
        embeddings: RowHolder,
        dense: Mapping[str, Any],
        *,
        metadata: Mapping[str, Any] | None = None,
        peers: Peers | None = None,
        base: Base | None = None,
        room: Room | None = None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        copied = io.BytesIO()
        self._peers, self._base, self._at_end = peers or Peers(), base, at_end
        self._error: BaseException | None = None
        self._failure: Exception | None = None
        self._snapshot: Snapshot | None = None
        try:
            self._snapshot = Snapshot(embeddings, self._peers.rank, None if base is None else base.changed, room)
            self._snapshot.read_ahead()
            if self._peers.rank == 0:
                torch.save(dict(dense), copied)
        except Exception as error:  # the other ranks' threads wait for this one's
            self._failure = as_refusal(error)
        except BaseException:
            self._close_snapshot()
            raise
        arguments = (folder, copied.getbuffer(), dict(metadata or {}))
        # No daemon: a program that ends waits for what it began to write.
        self._thread = Worker(target=self._run, args=arguments, name="rowmesh checkpoint", daemon=False)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._failure = self._failure or OSError(errno.EAGAIN, str(error))
            self._thread.run()
            if self._error is not None and not isinstance(self._error, Exception):
                raise self._error from None
        except BaseException:  # nobody would wait for it: it fails by itself, on all ranks
            self._close_snapshot()
            raise

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once on this rank."""
        return self._thread.has_ended

    @property
    def snapshot(self) -> Snapshot:
        """The rows of the moment; there is one unless this rank failed."""
        assert self._snapshot is not None
        return self._snapshot

    @property
    def error(self) -> BaseException | None:
        """Why it is not on disk, once it is done."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the checkpoint is on disk, or cannot be written; returns whether that is so by now.

        Raises:
            CheckpointWriteError, CheckpointError, PeerError: as `checkpoint.save`.
        """
        self._join(timeout_s)
        if not self.is_done:
            return False
        if self._error is not None:
            raise self._error
        return True

    def cancel(self) -> None:
        """Ends it, here and at other ranks, and removes what was written; for runs that fail."""
        self._close_snapshot()
        if not self.is_done:
            self._peers.abort()
        self._join()

    def _join(self, timeout_s: float | None = None) -> None:
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _close_snapshot(self) -> None:
        """Steps save no rows any more."""
        if self._snapshot is not None:
            self._snapshot.close()

    def _run(self, folder: Path, dense: memoryview, metadata: dict[str, Any]) -> None:
        try:
            try:
                self._save(folder, dense, metadata)
            finally:
                self._close_snapshot()
            self._at_end()
        except BaseException as error:  # raised where it is waited for
            self._error = error
            if not main_thread().is_alive():  # nobody will
                logger.error("the checkpoint in %s is not written: %s", folder, error)

    def _save(self, folder: Path, dense: memoryview, metadata: dict[str, Any]) -> None:
        if self._failure is not None or self._snapshot is None:
            save(folder, _Failed(self._failure), dense, metadata=metadata, peers=self._peers)
            return
        rows = self._snapshot
        rows.wait_ahead()
        parent = None if self._base is None else self._base.parent
        save(folder, rows, dense, metadata=metadata, peers=self._peers, parent=parent, beside_steps=True)
        with contextlib.suppress(OSError, MemoryError):  # the next one takes its memory when it wants it
            rows.prepare_next()


class _Failed:
    """In place of rows that could not be frozen: `save` fails on all ranks with the reason."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def shards(self, which: Which, /) -> Sequence[Rows]:
        """Raises what failed."""
        raise self._failure or RuntimeError("no snapshot")

    def synchronize(self) -> None:
        """No-op."""
