"""Checkpoints of a run: all that its next step depends on, written between two steps."""

from __future__ import annotations

import contextlib
import errno
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rowmesh._support.faults import reach
from rowmesh._support.files.advice import as_refusal, described
from rowmesh._support.files.links import link_tree
from rowmesh._support.files.secrets import masked_values
from rowmesh._support.json_lines import utc_text
from rowmesh.checkpoint import CheckpointError, CheckpointWriteError
from rowmesh.checkpoint.owned import BEST, remove
from rowmesh.checkpoint.series import Series
from rowmesh.checkpoint.snapshot import Snapshot
from rowmesh.checkpoint.writer import Rules, Writer, Written
from rowmesh.errors import PeerError, RowmeshError, Terminated
from rowmesh.placement.text import bytes_text
from rowmesh.run.config import Config
from rowmesh.run.job import Job
from rowmesh.run.resolve import anchored, resolve
from rowmesh.run.run_folder import CONFIG, UNFINISHED, RunFolder
from rowmesh.run.section import AUTO

LOOK_S = 0.1


@contextlib.contextmanager
def held_folder(config: Config) -> Iterator[None]:
    """Keeps other runs out of `checkpoint.folder`; a run's own folder is claimed with the run. On rank 0.

    Raises:
        RowmeshError: another run writes there, or this one cannot.
    """
    if not config.checkpoint.folder:
        yield
        return
    folder = Path(config.checkpoint.folder)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Series(folder).held("give this one checkpoint.folder=… of its own"))
        except OSError as error:
            raise RowmeshError(f"cannot write in checkpoint.folder {folder}: {error.strerror or error}") from None
        yield


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
        self._job, self._run, self._log, self._tried = job, run, log, last
        self._config = config = job.config.checkpoint
        self.series = series_of(job.config, run)
        incremental, asynchronous = config.incremental if config.is_on else 0, config.is_on and config.asynchronous
        copy_bytes = None if config.copy_bytes == AUTO else config.copy_bytes
        rules = Rules(asynchronous, incremental, config.keep_last, config.keep_every, copy_bytes)
        self._writer = Writer(self.series, job.embeddings, job.mesh, rules, last)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Where training failed, one under way has `grace_s` to get on disk."""
        is_lost = isinstance(error, PeerError | Terminated) or bool(self._job.mesh.dead_ranks())
        self._writer.close(0.0 if is_lost else self._config.grace_s)

    @property
    def last(self) -> int:
        """After which step the newest is."""
        return self._writer.last

    def drop(self) -> None:
        """Ends the one that is being written, if there is one, and removes what there is of it."""
        self._writer.drop()

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
        """Writes a checkpoint, with no step under way, or begins to; after `wait`, `last` says whether it is there.

        Collective: every rank calls it. It first waits for a checkpoint that is still being written.

        Args:
            step: after which it is.
            state: all but the rows; plain values and tensors.
            has_best: whether the best model so far is part of it.

        Raises:
            CheckpointWriteError: it cannot be written, or the checkpoint before could not, and `checkpoint.on_failure`
                is "stop".
        """
        self.wait()
        self._tried = step
        prepare = partial(self._prepare, has_best=has_best)
        try:
            written = self._writer.begin(step, state, self.metadata(step), prepare)
        except (OSError, MemoryError, CheckpointError) as error:
            self._fail(step, error)
        else:
            self._finish(written)

    def poll(self) -> bool:
        """Looks at the one that is being written, without waiting; for every step.

        Returns:
            Whether it could not be, and the run is to stop: all ranks must come to `wait` for that.
        """
        if not self._writer.is_done:
            return False
        if self._writer.error is not None and self._config.on_failure == "stop":
            return True
        self.wait()
        return False

    def wait(self) -> None:
        """Waits until the one that is being written is on disk, or could not be.

        Raises:
            CheckpointWriteError: it could not, and `checkpoint.on_failure` is "stop".
        """
        if (step := self._writer.under_way) is None:
            return
        reach("checkpoint.wait", self.series.at(step))
        written = None
        try:
            while written is None:
                written = self._writer.wait(LOOK_S)  # in pieces: a signal is heeded between them
        except (OSError, MemoryError, CheckpointError) as error:
            self._fail(step, error)
        else:
            self._finish(written)

    def farewell(self, step: int, number: int, *, is_written: bool) -> str:
        """A line for the user where a signal ends the run."""
        by = f"by {signal.Signals(number).name}" if number else "by a signal to another rank"
        if is_written:
            return f"stopped   {by} after step {step:,}; the same command with --resume goes on from there"
        last = f"--resume goes on from step {self.last:,}" if self.last else "there is no checkpoint"
        return f"stopped   {by} after step {step:,} without a checkpoint of it; {last}"

    def _prepare(self, place: Path, has_best: bool) -> None:
        reach("checkpoint.begin", place)
        if not self._run.path.exists():  # renamed, say: a model is to find the name free
            raise FileNotFoundError(errno.ENOENT, "the run's folder is gone", str(self._run.path))
        remove(place)  # of a run that came as far before it was resumed
        if has_best:
            place.mkdir(parents=True)
            link_tree(self._run.best, place / BEST)

    def _finish(self, written: Written | None) -> None:
        if written is not None:
            shortage = "" if written.snapshot is None else _shortage(written.snapshot)
            what = f"checkpoint after step {written.step:,} in {written.seconds:.1f} s{shortage}"
            self._log(f"{what}: {written.place}")

    def _fail(self, step: int, error: OSError | MemoryError | CheckpointError) -> None:
        """Whatever a checkpoint could not be written for, `on_failure` says what comes of it."""
        reason = described(why) if isinstance(why := as_refusal(error), OSError) else str(why)
        last = f"the last is of step {self.last:,}" if self.last else "there is none yet"
        text = f"the checkpoint after step {step:,} cannot be written, {last}: {reason}"
        if self._config.on_failure == "stop":
            raise CheckpointWriteError(f"{text} (checkpoint.on_failure is stop)") from error
        self._log(f"{text}; training goes on")

    def metadata(self, step: int) -> dict[str, Any]:
        """Metadata that are read before all else: whether a run can go on from here, and under which plan."""
        job = self._job
        return {
            "kind": "checkpoint",
            "steps": step,
            "written": utc_text(),
            "data": job.data.place,
            "identity": job.data.identity,
            "config": masked_values(anchored(job.config).model_dump(exclude_none=True)),
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
