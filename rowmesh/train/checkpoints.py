"""Checkpoints of a run: all that its next step depends on, written between two steps."""

from __future__ import annotations

import contextlib
import errno
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rowmesh import checkpoint
from rowmesh.checkpoint import CheckpointWriteError
from rowmesh.checkpoint.series import BEST, Series, remove
from rowmesh.faults import reach
from rowmesh.files.advice import described
from rowmesh.files.links import link_tree
from rowmesh.observe.json_lines import utc_text
from rowmesh.train.config import Config
from rowmesh.train.job import Job
from rowmesh.train.resolve import anchored, resolve
from rowmesh.train.run_folder import CONFIG, UNFINISHED, RunFolder
from rowmesh.train.together import on_rank_0

WRITING = "writing a checkpoint"


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


class Checkpoints:
    """Writes them, and removes those that are not to stay. Every rank makes one.

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

    def may_write(self, step: int) -> bool:
        """Whether one could be written after a step: not while replicas that are averaged differ."""
        parallel = self._job.config.parallel
        return self._config.is_on and (parallel.synchronization == "exact" or step % parallel.sync_every == 0)

    def is_due(self, step: int, *, is_asked: bool) -> bool:
        """Whether one is to be written after a step."""
        every = self._config.every_steps
        is_time = every > 0 and step // every > self._tried // every
        return step != self.last and (is_asked or is_time)

    def write(self, step: int, state: Mapping[str, Any], *, has_best: bool) -> bool:
        """Writes one, with nothing under way; returns whether it is on disk. Collective: every rank calls it.

        Args:
            step: after which it is.
            state: all but the rows; plain values and tensors.
            has_best: whether the best model so far is part of it.

        Raises:
            CheckpointWriteError: it cannot be written, and `checkpoint.on_failure` is "stop".
        """
        mesh, place, started_s = self._job.mesh, self.series.at(step), time.perf_counter()
        self._tried = step
        try:
            on_rank_0(mesh, WRITING, lambda: self._begin(place, has_best))
            checkpoint.save(place, self._job.embeddings, state, metadata=self.metadata(step), group=mesh.group)
        except (OSError, CheckpointWriteError) as error:
            on_rank_0(mesh, WRITING, lambda: self._clean(place))
            self._fail(step, error)
            return False
        self.last = step
        on_rank_0(mesh, WRITING, self._prune)
        self._log(f"checkpoint after step {step:,} in {time.perf_counter() - started_s:.1f} s: {place}")
        return True

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

    def _clean(self, place: Path) -> None:
        if place.exists() and self.series.at(self.last) != place:
            remove(place)

    def _prune(self) -> None:
        with contextlib.suppress(OSError):  # the next one removes what stays
            self.series.prune(self._config.keep_last, self._config.keep_every)

    def _fail(self, step: int, error: OSError | CheckpointWriteError) -> None:
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
            "data": str(job.data.folder.absolute()),
            "identity": job.data.identity,
            "config": anchored(job.config).model_dump(exclude_none=True),
            "plan": job.embeddings.plan.to_json(),
        }


def restore_best(run: RunFolder, saved: Path | None) -> None:
    """Puts the best model of a checkpoint where the run keeps it; None: there was none by then. On rank 0."""
    remove(run.best)
    if saved is not None:
        link_tree(saved, run.best)
