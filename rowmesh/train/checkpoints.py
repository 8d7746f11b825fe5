"""Checkpoints of a run: all that its next step depends on, written between two steps."""

from __future__ import annotations

import contextlib
import errno
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from rowmesh import checkpoint
from rowmesh.checkpoint import CheckpointError, CheckpointWriteError
from rowmesh.checkpoint.background import BackgroundSave, Base, save_increment
from rowmesh.checkpoint.changes import Changes
from rowmesh.checkpoint.manifest import MANIFEST, Identity, Parent
from rowmesh.checkpoint.room import Room
from rowmesh.checkpoint.series import BEST, Series, remove
from rowmesh.checkpoint.snapshot import Snapshot
from rowmesh.errors import PeerError, Terminated
from rowmesh.faults import reach
from rowmesh.files.advice import described
from rowmesh.files.links import link_tree
from rowmesh.mesh.waiting import gather_objects
from rowmesh.observe.json_lines import utc_text
from rowmesh.placement.text import bytes_text
from rowmesh.saving import why_not_asynchronous, why_not_by_changes
from rowmesh.train.config import Config
from rowmesh.train.job import Job
from rowmesh.train.resolve import anchored, resolve
from rowmesh.train.run_folder import CONFIG, UNFINISHED, RunFolder
from rowmesh.train.section import AUTO
from rowmesh.train.together import on_rank_0

WRITING = "writing a checkpoint"
LOOK_S = 0.1


def series_of(config: Config, run: RunFolder) -> Series:
    """The checkpoints of a run."""
    return Series(Path(config.checkpoint.folder) if config.checkpoint.folder else run.checkpoints)


def places_of(run: Path) -> list[Path]:
    """Where the checkpoints of a run may be, by its folder: those of one that is to replace it first."""
    places = []
    for folder in (run / UNFINISHED, run):
        if (folder / CONFIG).exists():
            places.append(series_of(resolve(folder / CONFIG), RunFolder(folder)).folder)
    return places


class _UnderWay(NamedTuple):
    """A checkpoint that is being written in the background."""

    step: int
    place: Path
    started_s: float
    save: BackgroundSave


class Checkpoints:
    """Writes them, and removes those that are not to stay. Every rank makes one; at the end of the block none is left.

    With `checkpoint.asynchronous` one is written while training goes on. The next waits for it, so that there is never
    more than one under way, and ranks need not agree on leaving one out.

    Args:
        job: what is trained; its rows are the source that is written.
        run: the folder.
        log: prints a line for the user.
        last: after which step the newest is.

    Attributes:
        series: where they are.
    """

    def __init__(self, job: Job, run: RunFolder, log: Callable[[str], None], last: int = 0) -> None:
        self._job, self._run, self._log, self.last, self._tried = job, run, log, last, last
        self._config = job.config.checkpoint
        self.series = series_of(job.config, run)
        self._under_way: _UnderWay | None = None
        self._group: Any = None
        copy_bytes, hosts = self._config.copy_bytes, job.mesh.hosts
        sharers = hosts.count(hosts[job.mesh.rank])
        self._room = Room(None if copy_bytes == AUTO else copy_bytes, sharers=sharers)
        self._parent: Parent | None = None
        self._changes: Changes | None = None
        if self._config.is_on and self._config.incremental:
            if reason := why_not_by_changes(job.embeddings):
                log(f"checkpoints are full, not incremental: {reason}")
            else:
                self._changes = Changes(job.embeddings)
        self._is_asynchronous = self._config.is_on and self._config.asynchronous
        if self._is_asynchronous and (reason := why_not_asynchronous(job.embeddings)):
            self._is_asynchronous = False
            log(f"checkpoints are written between steps, not asynchronously: {reason}")
        if self._is_asynchronous:
            self._group = job.mesh.with_process_group("checkpoints").group

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Where training failed, one under way has `grace_s` to get on disk: its rows are still those of its step."""
        if self._changes is not None:
            self._changes.close()
        if self._under_way is None:
            return
        is_lost = isinstance(error, PeerError | Terminated) or bool(self._job.mesh.dead_ranks())
        is_written = False
        if not is_lost:
            with contextlib.suppress(Exception):  # the error of the block is the one to be seen
                is_written = self._under_way.save.wait(self._config.grace_s)
        if not is_written:
            self.drop()

    def drop(self) -> None:
        """Ends the one that is being written, if there is one, and removes what there is of it."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        under_way.save.cancel()
        if self._job.mesh.rank == 0 and not (under_way.place / MANIFEST).exists():
            remove(under_way.place)

    def may_write(self, step: int) -> bool:
        """Whether one could be written after a step: not while replicas that are averaged differ."""
        parallel = self._job.config.parallel
        return self._config.is_on and (parallel.synchronization == "exact" or step % parallel.sync_every == 0)

    def is_due(self, step: int, *, is_asked: bool) -> bool:
        """Whether one is to be written after a step."""
        every = self._config.every_steps
        is_time = every > 0 and step // every > self._tried // every
        return step != self.last and (is_asked or is_time)

    def write(self, step: int, state: Mapping[str, Any], *, has_best: bool) -> None:
        """Writes one, with nothing under way, or begins to: `wait` then says when `last` is it.

        Collective: every rank calls it. One that is still being written is waited for before.

        Args:
            step: after which it is.
            state: all but the rows; plain values and tensors.
            has_best: whether the best model so far is part of it.

        Raises:
            CheckpointWriteError: it cannot be written, or the one before could not, and `checkpoint.on_failure` is
                "stop".
        """
        self.wait()
        mesh, place, started_s = self._job.mesh, self.series.at(step), time.perf_counter()
        embeddings, metadata = self._job.embeddings, self.metadata(step)
        self._tried = step
        try:
            on_rank_0(mesh, WRITING, lambda: self._begin(place, has_best))
            base = self._base()
            if self._is_asynchronous:
                save = BackgroundSave(
                    place, embeddings, state, metadata=metadata, group=self._group, base=base, room=self._room
                )
                self._under_way = _UnderWay(step, place, started_s, save)
                return
            if base is None:
                checkpoint.save(place, embeddings, state, metadata=metadata, group=mesh.group)
            else:
                save_increment(place, embeddings, state, base, metadata=metadata, group=mesh.group)
        except (OSError, CheckpointWriteError) as error:
            self._fail(step, place, error)
        else:
            self._finish(step, place, started_s)

    def poll(self) -> bool:
        """Looks at the one that is being written, without waiting; for every step.

        Returns:
            Whether it could not be, and the run is to stop: all ranks must come to `wait` for that.
        """
        under_way = self._under_way
        if under_way is None or not under_way.save.is_done:
            return False
        if under_way.save.error is not None and self._config.on_failure == "stop":
            return True
        self.wait()
        return False

    def wait(self) -> None:
        """Waits until the one that is being written is on disk, or could not be.

        Raises:
            CheckpointWriteError: it could not, and `checkpoint.on_failure` is "stop".
        """
        under_way = self._under_way
        if under_way is None:
            return
        reach("checkpoint.wait", under_way.place)
        try:
            while not under_way.save.wait(LOOK_S):  # in pieces: a signal is heeded between them
                pass
        except (OSError, CheckpointWriteError) as error:
            self._under_way = None
            self._fail(under_way.step, under_way.place, error)
        else:
            self._under_way = None
            self._finish(under_way.step, under_way.place, under_way.started_s, _shortage(under_way.save.snapshot))

    def farewell(self, step: int, number: int, *, is_written: bool) -> str:
        """A line for the user where a signal ends the run."""
        by = f"by {signal.Signals(number).name}" if number else "by a signal to another rank"
        if is_written:
            return f"stopped   {by} after step {step:,}; the same command with --resume goes on from there"
        last = f"--resume goes on from step {self.last:,}" if self.last else "there is no checkpoint"
        return f"stopped   {by} after step {step:,} without a checkpoint of it; {last}"

    def _begin(self, place: Path, has_best: bool) -> None:
        reach("checkpoint.begin", place)
        if not self._run.path.exists():  # renamed, say: a model is to find the name free
            raise FileNotFoundError(errno.ENOENT, "the run's folder is gone", str(self._run.path))
        remove(place)  # of a run that came as far before it was resumed
        if has_best:
            place.mkdir(parents=True)
            link_tree(self._run.best, place / BEST)

    def _base(self) -> Base | None:
        """Of what the next one is an increment; None: it is full. Collective.

        It is full where the one before cannot be added to (there is none that this process wrote, it failed, or as
        many increments as there may be came before), and where rows of any rank changed otherwise than by updates.
        """
        if self._changes is None:
            return None
        changed, parent, self._parent = self._changes.take(), self._parent, None
        own = None if parent is None else [parent.step, parent.identity.folder, parent.identity.digest, parent.depth]
        everyone = gather_objects(self._job.mesh, [changed is not None, own], WRITING)
        of_rank_0 = everyone[0][1]  # which alone knows the digest
        if changed is None or of_rank_0 is None or not all(is_known for is_known, _ in everyone):
            return None
        step, folder, digest, depth = of_rank_0
        return Base(Parent(step, Identity(folder, digest), depth), changed)

    def _note_parent(self, step: int, place: Path) -> None:
        """The next one adds to this one, where there is an increment left. On rank 0."""
        with contextlib.suppress(CheckpointError):  # the next one is full
            manifest = checkpoint.read_manifest(place)
            if manifest.depth < self._config.incremental:
                self._parent = Parent(step, manifest.identity, manifest.depth)

    def _finish(self, step: int, place: Path, started_s: float, shortage: str = "") -> None:
        """One is on disk: older ones go."""
        self.last = step
        if self._changes is not None and self._job.mesh.rank == 0:
            self._note_parent(step, place)
        if self._job.mesh.rank == 0:
            with contextlib.suppress(OSError):  # the next one removes what stays
                self.series.prune(self._config.keep_last, self._config.keep_every)
        self._log(f"checkpoint after step {step:,} in {time.perf_counter() - started_s:.1f} s{shortage}: {place}")

    def _fail(self, step: int, place: Path, error: OSError | CheckpointWriteError) -> None:
        """One cannot be written: what there is of it goes, and that is said."""
        if self._job.mesh.rank == 0 and place.exists() and self.series.at(self.last) != place:
            remove(place)
        reason = described(error) if isinstance(error, OSError) else str(error)
        last = f"the last is of step {self.last:,}" if self.last else "there is none yet"
        text = f"the checkpoint after step {step:,} cannot be written, {last}: {reason}"
        if self._config.on_failure == "stop":
            raise CheckpointWriteError(f"{text} (checkpoint.on_failure is stop)") from error
        self._log(f"{text}; training goes on")

    def metadata(self, step: int) -> dict[str, Any]:
        """What is known before anything else is read: whether a run can go on from it, and under which plan."""
        job = self._job
        return {
            "kind": "checkpoint",
            "steps": step,
            "written": utc_text(),
            "data": job.data.place,
            "identity": job.data.identity,
            "config": anchored(job.config).model_dump(exclude_none=True),
            "plan": job.embeddings.plan.to_json(),
        }


def _shortage(snapshot: Snapshot) -> str:
    """Where memory for copies was short, that, and what steps did in place of them."""
    if not (snapshot.num_behind and snapshot.num_saved):
        return ""
    behind = bytes_text(snapshot.num_behind)
    return f", {behind} not copied at once (checkpoint.copy_bytes): steps saved {snapshot.num_saved:,} rows"


def restore_best(run: RunFolder, saved: Path | None) -> None:
    """Puts the best model of a checkpoint where the run keeps it; None: there was none by then. On rank 0."""
    remove(run.best)
    if saved is not None:
        link_tree(saved, run.best)
