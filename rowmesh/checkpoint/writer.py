"""Writer: the checkpoints of a series, one after the other: full or increments, between steps or beside them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rowmesh.checkpoint.background import BackgroundSave, Base, save_increment
from rowmesh.checkpoint.chain import read_manifest
from rowmesh.checkpoint.changes import HOOK, ChangedSlots
from rowmesh.checkpoint.manifest import Identity, Parent
from rowmesh.checkpoint.owned import is_whole, remove
from rowmesh.checkpoint.room import Room
from rowmesh.checkpoint.series import Series
from rowmesh.checkpoint.snapshot import Snapshot
from rowmesh.checkpoint.write import WRITING, save
from rowmesh.errors import CheckpointError
from rowmesh.mesh import Mesh
from rowmesh.mesh.together import on_rank_0
from rowmesh.mesh.waiting import gather_objects
from rowmesh.tables.shard import RowHolder


class Rules(NamedTuple):
    """How checkpoints are written, and which stay.

    Attributes:
        asynchronous: whether training goes on while one is written.
        incremental: after a full one, so many that have only the rows that changed since the one before.
        keep_last: how many of the newest stay.
        keep_every: those after a multiple of so many steps stay besides; 0: none does.
        copy_bytes: memory of each rank for copies of rows ahead of the disk; None: a quarter of what is available,
            shared by the ranks of a host.
    """

    asynchronous: bool = False
    incremental: int = 0
    keep_last: int = 2
    keep_every: int = 0
    copy_bytes: int | None = None


class Written(NamedTuple):
    """A checkpoint that is on disk.

    Attributes:
        step: after which it is.
        place: its folder.
        seconds: from its beginning on.
        snapshot: the rows that it was written from beside training; None where training waited.
    """

    step: int
    place: Path
    seconds: float
    snapshot: Snapshot | None


class _UnderWay(NamedTuple):
    step: int
    place: Path
    started_s: float
    save: BackgroundSave


class Writer:
    """Writes the checkpoints of a series, one at a time, and removes those that are not to stay. Every rank makes one.

    Args:
        series: where they are.
        rows: whose rows are written.
        mesh: the ranks.
        rules: how they are written.
        last: after which step the newest is.

    Attributes:
        last: likewise, with those that were written since.
    """

    def __init__(self, series: Series, rows: RowHolder, mesh: Mesh, rules: Rules, last: int = 0) -> None:
        self._series, self._rows, self._mesh, self._rules, self.last = series, rows, mesh, rules, last
        self._under_way: _UnderWay | None = None
        self._room = Room(rules.copy_bytes, sharers=mesh.hosts.count(mesh.hosts[mesh.rank]))
        self._parent: Parent | None = None
        # Each of several writers has to know what changed since its own checkpoint.
        self._changes = ChangedSlots(rows, f"{HOOK} since {series.folder}") if rules.incremental else None
        self._peers = (mesh.with_process_group("checkpoints") if rules.asynchronous else mesh).peers

    @property
    def under_way(self) -> int | None:
        """After which step the one is that is being written beside training."""
        return None if self._under_way is None else self._under_way.step

    @property
    def is_done(self) -> bool:
        """Whether one was being written beside training, and `wait` would return at once on this rank."""
        return self._under_way is not None and self._under_way.save.is_done

    @property
    def error(self) -> BaseException | None:
        """Why that one is not on disk, once it is done."""
        return None if self._under_way is None else self._under_way.save.error

    def begin(
        self,
        step: int,
        dense: Mapping[str, Any],
        metadata: Mapping[str, Any],
        prepare: Callable[[Path], None] = remove,
    ) -> Written | None:
        """Writes one, with nothing under way, or begins to: `wait` then says when it is on disk.

        Collective: every rank calls it.

        Args:
            step: after which it is.
            dense: all but the rows; plain values and tensors.
            metadata: JSON values for its manifest.
            prepare: makes room in its folder; on rank 0.

        Raises:
            OSError, MemoryError, CheckpointError: it cannot be written; what there is of it is removed.
        """
        assert self._under_way is None
        place, started_s = self._series.at(step), time.perf_counter()
        try:
            on_rank_0(self._mesh, WRITING, lambda: prepare(place))
            base = self._base()
            if self._rules.asynchronous:
                saving = BackgroundSave(
                    place,
                    self._rows,
                    dense,
                    metadata=metadata,
                    peers=self._peers,
                    base=base,
                    room=self._room,
                    at_end=partial(self._tidy, step, place),
                )
                self._under_way = _UnderWay(step, place, started_s, saving)
                return None
            if base is None:
                save(place, self._rows, dense, metadata=metadata, peers=self._peers)
            else:
                save_increment(place, self._rows, dense, base, metadata=metadata, peers=self._peers)
        except (OSError, MemoryError, CheckpointError):
            self._discard(place)
            raise
        self._tidy(step, place)
        return self._written(step, place, started_s, None)

    def wait(self, timeout_s: float | None = None) -> Written | None:
        """Waits until the one that is being written is on disk, so long at most; None: it is not yet.

        Raises:
            OSError, CheckpointError, PeerError: it cannot be written; what there is of it is removed, and the next may
                begin.
        """
        under_way = self._under_way
        assert under_way is not None
        try:
            if not under_way.save.wait(timeout_s):
                return None
        except Exception:  # of whatever kind, it says that the writer has ended; an interrupt does not
            self._under_way = None
            self._discard(under_way.place)
            raise
        self._under_way = None
        return self._written(under_way.step, under_way.place, under_way.started_s, under_way.save.snapshot)

    def drop(self) -> None:
        """Ends the one that is being written, if there is one, and removes what there is of it."""
        under_way = self._under_way
        if under_way is None:
            return
        under_way.save.cancel()
        self._under_way = None
        if self._mesh.rank == 0 and not is_whole(under_way.place):
            remove(under_way.place)

    def close(self, grace_s: float = 0.0) -> None:
        """Updates cost nothing more; one that is being written has so many seconds to get on disk.

        Its rows are still those of its step, whatever ended training.
        """
        if self._changes is not None:
            self._changes.close()
        is_written = False
        if self._under_way is not None and grace_s:
            with contextlib.suppress(Exception):  # what ended training is the error to be seen
                is_written = self._under_way.save.wait(grace_s)
        if not is_written:
            self.drop()

    def _base(self) -> Base | None:
        """The parent of the next checkpoint, and the changes since; None: the next one is full. Collective.

        It is full where the one before cannot be added to (there is none that this process wrote, it failed, or as
        many increments as there may be came before), and where rows of any rank changed otherwise than by updates.
        """
        if self._changes is None:
            return None
        changed, parent, self._parent = self._changes.take(), self._parent, None
        own = None if parent is None else [parent.step, parent.identity.folder, parent.identity.digest, parent.depth]
        everyone = gather_objects(self._mesh, [changed is not None, own], WRITING)
        of_rank_0 = everyone[0][1]  # which alone knows the digest
        if changed is None or of_rank_0 is None or not all(is_known for is_known, _ in everyone):
            return None
        step, folder, digest, depth = of_rank_0
        return Base(Parent(step, Identity(folder, digest), depth), changed)

    def _written(self, step: int, place: Path, started_s: float, snapshot: Snapshot | None) -> Written:
        self.last = step
        return Written(step, place, time.perf_counter() - started_s, snapshot)

    def _tidy(self, step: int, place: Path) -> None:
        """Lets the next checkpoint add to the one on disk, and removes older ones; in the thread that wrote it."""
        if self._mesh.rank == 0:
            # The checkpoint is whole: an error here costs none; raised, it would fail this rank alone.
            with contextlib.suppress(CheckpointError, OSError, MemoryError):  # the next one is full
                if self._changes is not None:
                    self._note_parent(step, place)
            with contextlib.suppress(OSError, MemoryError):  # the next one removes what stays
                self._series.prune(self._rules.keep_last, self._rules.keep_every)

    def _note_parent(self, step: int, place: Path) -> None:
        """The next one adds to this one, where there is an increment left."""
        manifest = read_manifest(place)
        if manifest.depth < self._rules.incremental:
            self._parent = Parent(step, manifest.identity, manifest.depth)

    def _discard(self, place: Path) -> None:
        if self._mesh.rank == 0 and self._series.at(self.last) != place:
            remove(place)
