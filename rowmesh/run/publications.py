"""Publications of a run: versions of its tables and network, written between two steps for who serves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing

import numpy as np
import numpy.typing as npt
import torch

from rowmesh.checkpoint.changes import ChangedSlots
from rowmesh.errors import PeerError, RowmeshError, StoreError
from rowmesh.mesh.together import on_all_ranks
from rowmesh.mesh.waiting import gather_objects
from rowmesh.publish import Changes, PublishedTable, Publisher, open_target
from rowmesh.publish.generation import Generation
from rowmesh.publish.guard import closing_target, reason
from rowmesh.publish.opening import check_installed
from rowmesh.run.job import Job
from rowmesh.tables import Constant, TableSpec
from rowmesh.tables.dynamic.stores import Retry
from rowmesh.tables.shard import Changed, TableShard, Vectors

PUBLISHING = "publishing"
HOOK = "publications"
Log = Callable[[str], None]


class Publications:
    """Publishes what a run trains. Every rank makes one; `close` ends it.

    Args:
        job: what is trained.

    Raises:
        ConfigurationError: a package is not installed.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._config = job, job.config.publish
        self._opened = ExitStack()
        self._publisher: Publisher | None = None
        self._changes: ChangedSlots | None = None
        self._ids: dict[str, npt.NDArray[np.int64]] = {}  # of dynamic tables, those of this rank that readers have
        self._run, self._tried, self._published, self._before = "", 0, 0, 0
        if self._config.is_on:
            check_installed(self._config.to)

    def begin(self, step: int, run: str) -> None:
        """Says after which step the run goes on, 0 where it begins, and what it is called."""
        self._tried, self._run = step, run

    def close(self) -> None:
        """Updates of rows cost nothing more, and connections are closed; may be called again."""
        self._opened.close()

    def is_due(self, step: int, *, is_asked: bool) -> bool:
        """Whether one is to be published after a step; not while replicas that are averaged differ."""
        parallel, every = self._job.config.parallel, self._config.every_steps
        is_time = is_asked or (every > 0 and step // every > self._tried // every)
        return is_time and (parallel.synchronization == "exact" or step % parallel.sync_every == 0)

    def write(self, step: int, log: Log) -> None:
        """Publishes a version, with nothing under way. Collective and blocking.

        Versions that this run published before it was interrupted are left out.

        Args:
            step: after which it is.
            log: prints a line for the user.

        Raises:
            StoreError: the version cannot be published, and `publish.on_failure` is "stop".
        """
        self._tried = step
        self._attempt(step, log, lambda: step > self._before, otherwise="training goes on")

    def write_last(self, step: int, log: Log) -> None:
        """Publishes the model that the run keeps, unless readers have it. As `write`."""
        if self._config.is_on:
            kept = "the model of the run is written, and readers keep what was published before"
            self._attempt(step, log, lambda: step != self._published, otherwise=kept)

    def _attempt(self, step: int, log: Log, is_wanted: Callable[[], bool], *, otherwise: str) -> None:
        """Publishes what is wanted; where that fails, and the run does not end by it, `otherwise` says what holds."""
        started_s = time.perf_counter()
        try:
            publisher = self._publisher or self._open(log)
            if not is_wanted():
                return
            generation = self._publish(publisher, step)
        except PeerError:
            raise
        except RowmeshError as error:  # on all ranks
            text = f"what step {step:,} left cannot be published: {error}"
            if self._config.on_failure == "stop":
                raise StoreError(f"{text} (publish.on_failure is stop)") from error
            log(f"{text}; {otherwise}")
        else:
            self._published = step
            what = "all rows" if generation.is_whole else "what changed"
            elapsed_s = time.perf_counter() - started_s
            log(f"published generation {generation.number} after step {step:,} in {elapsed_s:.1f} s: {what}")

    def _open(self, log: Log) -> Publisher:
        """Opens the target on all ranks, or on none; finds what this run published before it was interrupted."""
        config, mesh, target, failure = self._config, self._job.mesh, None, ""
        with ExitStack() as opened:
            try:
                url, retry = os.path.expandvars(config.to), Retry(for_s=config.retry_s)
                target = opened.enter_context(closing_target(open_target(url, retry=retry)))
            except Exception as error:  # whatever a package raises that a target uses
                failure = reason(error)
            failures = [text for text in gather_objects(mesh, failure, PUBLISHING) if text]
            if target is None or failures:
                raise StoreError(failures[0])
            tables = {table.name: _published(table, self._job.config.train.seed) for table in self._tables}
            publisher = Publisher(
                target,
                tables,
                mesh=mesh,
                keep_last=config.keep_last,
                whole_every=config.whole_every,
                run=self._run,
            )
            newest = publisher.newest()
            self._opened.push(opened.pop_all())
        if newest is not None and self._run and newest.run == self._run:
            self._before = self._published = newest.step
            log(f"generation {newest.number} has step {newest.step:,} of this run already; later ones are published")
        self._changes = self._opened.enter_context(closing(ChangedSlots(self._job.embeddings, HOOK)))
        self._publisher = publisher
        return publisher

    @property
    def _tables(self) -> Sequence[TableSpec]:
        return self._job.embeddings.tables

    def _publish(self, publisher: Publisher, step: int) -> Generation:
        embeddings = self._job.embeddings
        embeddings.synchronize()
        changed = None if self._changes is None else self._changes.take()
        if not all(gather_objects(self._job.mesh, changed is not None, PUBLISHING)):
            publisher.begin_anew()
        wanted = None if publisher.is_whole else changed

        def prepare() -> tuple[dict[str, Changes], dict[str, npt.NDArray[np.int64]]]:
            shards = embeddings.shards("owned")
            found = {shard.spec.name: self._changes_of(shard, wanted) for shard in shards}
            return found, {shard.spec.name: shard.ids for shard in shards}

        # Which ids there are is asked of stores, too, which may fail on one rank alone.
        changes, ids = on_all_ranks(self._job.mesh, PUBLISHING, prepare)
        network = {name: tensor.detach().cpu() for name, tensor in self._job.network.state_dict().items()}
        generation = publisher.publish(step, changes, network)
        self._ids = ids
        return generation

    def _changes_of(self, shard: TableShard, changed: Changed | None) -> Changes:
        """The changes of a table that this rank publishes.

        An id that is demoted is published when its record is put: its row may have changed before. An id that comes
        back is published when its row changes.
        """
        mesh, readers_have = self._job.mesh, self._ids.get(shard.spec.name, np.empty(0, np.int64))
        rows = _as_float32(shard.vectors(changed, mesh.rank, mesh.world_size))
        return Changes(rows=rows, deleted=shard.gone(readers_have, changed))


def _published(table: TableSpec, seed: int) -> PublishedTable:
    """A table for readers. All rows of a table that is not dynamic are published, so that other ids are mistakes."""
    if table.dynamic is not None:
        return PublishedTable(dim=table.dim, initializer=table.initializer, seed=seed, missing=table.dynamic.missing)
    return PublishedTable(dim=table.dim, initializer=Constant(), missing="error")


def _as_float32(vectors: Iterator[Vectors]) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]:
    for ids, values in vectors:
        yield ids, values.detach().to("cpu", torch.float32).numpy()
