"""Checkpoints in the background, slowed so that steps fall into their writing, without a clock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from rowmesh._support.faults import arm
from rowmesh.checkpoint import read_manifest, snapshot
from rowmesh.checkpoint.manifest import DENSE

PATIENCE_S = 60.0


class Gate:
    """Lets a writer read one shard for each step, and all when it is waited for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_steps, self._is_open, self._is_awaited = 0, True, False
        self.num_slowed = 0

    def taken(self) -> None:
        """A snapshot was taken."""
        with self._changed:
            self._is_open, self._is_awaited = False, True

    def step(self) -> None:
        """A step was done; the first after a snapshot waits until its writer has begun."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._is_awaited, PATIENCE_S)
            self._num_steps += 1
            self._changed.notify_all()

    def open(self) -> None:
        """The writer is waited for, or has ended."""
        with self._changed:
            self._is_open, self._is_awaited = True, False
            self._changed.notify_all()

    def hold(self) -> None:
        """The writer comes to a shard."""
        with self._changed:
            self.num_slowed += not self._is_open
            self._is_awaited = False
            self._changed.notify_all()
            before = self._num_steps
            assert self._changed.wait_for(lambda: self._is_open or self._num_steps > before, PATIENCE_S)


@contextlib.contextmanager
def held(point: str) -> Iterator[threading.Event]:
    """Nothing that comes to a point goes on before the end of the block; says when something has come."""
    is_over, has_come = threading.Event(), threading.Event()

    def hold() -> None:
        has_come.set()
        assert is_over.wait(PATIENCE_S)

    with arm(point=point, action=hold):
        try:
            yield has_come
        finally:
            is_over.set()


@contextlib.contextmanager
def slowed(point: str, shard_rows: int = 8) -> Iterator[Gate]:
    """For the time of a block snapshots have small shards, at each of which a gate holds the writer.

    Args:
        point: "snapshot.read", before a shard is copied, or "snapshot.copied", after that.
        shard_rows: rows of a shard.
    """
    gate = Gate()
    with (
        mock.patch.object(snapshot, "SHARD_ROWS", shard_rows),
        arm(point="snapshot.taken", action=gate.taken),
        arm(point="loop.step", action=gate.step),
        arm(point="checkpoint.wait", action=gate.open),
        arm(point="snapshot.closed", action=gate.open),
        arm(point=point, action=gate.hold),
    ):
        yield gate


def sums_of(folder: Path) -> dict[str, tuple[str, ...]]:
    """Checksums of the rows and cores of a checkpoint, by file."""
    manifest = read_manifest(folder)
    assert set(manifest.checksums) == {
        DENSE,
        *(name for table in manifest.tables.values() for name in table.content.file_names),
    }
    return {name: each.blocks for name, each in manifest.checksums.items() if name != DENSE}
