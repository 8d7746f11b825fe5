"""Publications of a run: versions of its tables and network, written between two steps for who serves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rowmesh.checkpoint.changes import Changes as ChangedSlots
from rowmesh.checkpoint.snapshot import Changed
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.errors import PeerError, RowmeshError, StoreError
from rowmesh.mesh.together import on_all_ranks
from rowmesh.mesh.waiting import gather_objects
from rowmesh.publish import Changes, PublishedTable, Publisher, open_target
from rowmesh.publish.generation import Generation
from rowmesh.publish.guard import closing_target, reason
from rowmesh.publish.opening import check_installed
from rowmesh.run.job import Job
from rowmesh.tables import Constant, RowStore, TableSpec
from rowmesh.tables.dynamic.stores import Retry
from rowmesh.tables.spec import names_of

PUBLISHING = "publishing"
HOOK = "publications"
CHUNK_ROWS = 1 << 16
Chunks = Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]]
Marks = Mapping[int, npt.NDArray[np.uint8]]
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

        One that this run published before it was interrupted is left out.

        Args:
            step: after which it is.
            log: prints a line for the user.

        Raises:
            StoreError: it cannot be, and `publish.on_failure` is "stop".
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
        marks = None if wanted is None else wanted.marks
        changes, ids = {}, {}
        dynamic = names_of(self._tables, "dynamic")
        # Which ids there are is asked of stores, too, which may fail on one rank alone.
        of_dynamic = on_all_ranks(
            self._job.mesh, PUBLISHING, lambda: {name: self._of_dynamic(name, wanted) for name in dynamic}
        )
        for table in self._tables:
            if table.storage == "dynamic":
                changes[table.name], ids[table.name] = of_dynamic[table.name]
            elif table.storage == "tensor_train":
                rows = _computed_rows(embeddings, table, self._job.mesh.rank, self._job.mesh.world_size)
                changes[table.name] = Changes(rows=rows)
            else:
                changes[table.name] = Changes(rows=_stored_rows(embeddings, table.name, marks))
        network = {name: tensor.detach().cpu() for name, tensor in self._job.network.state_dict().items()}
        generation = publisher.publish(step, changes, network)
        self._ids = ids
        return generation

    def _of_dynamic(self, table: str, changed: Changed | None) -> tuple[Changes, npt.NDArray[np.int64]]:
        """What is to be published of a dynamic table, and the ids that it has in fast memory here.

        An id that is demoted is published when its record is put: its row may have changed before. One that comes back
        is, when its row changes.
        """
        records, none = self._job.embeddings.records(table), np.empty(0, np.int64)
        if records is None or not records.is_first:
            return Changes(), none
        before, of_store = None, None
        if changed is not None:
            before, of_store = changed.known[table], changed.marks[id(records.arena)]
        pieces = records.rows
        ids = np.concatenate([none, *(piece.rows for piece in pieces)])

        def chunks() -> Chunks:
            for piece in pieces:
                kept = slice(None) if of_store is None else of_store[piece.slots] != 0
                yield piece.rows[kept], _vectors(_rows_at(records.arena, piece.slots[kept]))
            demoted = records.demoted(before)  # where all are wanted, the store is asked which these are
            for piece in [] if demoted is None else demoted.rows:
                yield piece.rows, _vectors(piece.values)
                piece.forget()

        left = np.setdiff1d(self._ids.get(table, none), ids, assume_unique=True)
        if before is not None and (demoted := records.demoted(before)) is not None:
            known = np.union1d(ids, demoted.ids)
            left = np.setdiff1d(np.union1d(left, demoted.gone), known, assume_unique=True)
        return Changes(rows=chunks(), deleted=left), ids


def _published(table: TableSpec, seed: int) -> PublishedTable:
    """A table for readers. Of one that is not dynamic all rows are published, so that other ids are mistakes."""
    if table.storage == "dynamic" and table.dynamic is not None:
        return PublishedTable(dim=table.dim, initializer=table.initializer, seed=seed, missing=table.dynamic.missing)
    return PublishedTable(dim=table.dim, initializer=Constant(), missing="error")


def _stored_rows(embeddings: EmbeddingCollection, table: str, marks: Marks | None) -> Chunks:
    """The rows that this rank owns, or those of them that are marked."""
    for store, piece in embeddings.stored_pieces(table):
        slots = piece.slots
        picked: Sequence[int] | npt.NDArray[np.intp] = range(len(slots))
        if marks is not None:
            picked = np.flatnonzero(marks[id(store)][slots.start : slots.stop : slots.step])
        for first in range(0, len(picked), CHUNK_ROWS):
            at = np.asarray(picked[first : first + CHUNK_ROWS], np.int64)
            places = slots.start + at * slots.step
            yield piece.rows.start + at * piece.rows.step, _vectors(_rows_at(store, places))


def _rows_at(store: RowStore, slots: npt.NDArray[np.int64]) -> Tensor:
    """Copies, without the states."""
    return store.rows[torch.from_numpy(slots)] if store.has_views else store.read_rows(slots.astype(np.uint32))[0]


def _computed_rows(embeddings: EmbeddingCollection, table: TableSpec, rank: int, world_size: int) -> Chunks:
    """A rank's share of the rows of a tensor-train table, all of which change with its cores."""
    cores = embeddings.cores(table.name)
    first, stop = (table.num_rows * each // world_size for each in (rank, rank + 1))
    for begin in range(first, stop, CHUNK_ROWS):
        ids = torch.arange(begin, min(begin + CHUNK_ROWS, stop))
        yield ids.numpy(), _vectors(cores.rows(ids))


def _vectors(rows: Tensor) -> npt.NDArray[np.float32]:
    return rows.detach().to("cpu", torch.float32).numpy()
