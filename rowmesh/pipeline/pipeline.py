"""Pipeline: trains batch after batch while the next ones are already on their way.

    for window in pipeline.windows(loader):
        for part in window:
            loss = mean_loss_of(model(part.embeddings), window.item, part.samples)
            (loss * part.weight).backward()  # gradients of micro-batches add up
        sparse_optimizer.step()
        dense_optimizer.step()

Before the step gradients may be clipped, or unscaled by a GradScaler, which may leave the step out.

The model is that of the plain loop. A batch is read and routed, and the owners of its rows learn of it, `depth` batches
ahead. Rows that no rank changes any more are fetched during the batch before; other rows are fetched, and gradients
sent, while the micro-batches are computed.

`rowmesh.pipeline.ends` says what becomes of a batch or a step that fails on one of the ranks.

Source: NestPipe §III–VI; EL-Rec §V.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from numbers import Integral
from typing import Generic, Self

from rowmesh.collection.module import EmbeddingCollection
from rowmesh.errors import (
    ConfigurationError,
    RowmeshError,
)
from rowmesh.exchange.window import FIRST, Form
from rowmesh.mesh.threads import cores_of
from rowmesh.ops.streams import Stream
from rowmesh.ops.window import MAX_PARTS
from rowmesh.pipeline.batch_in_flight import BatchInFlight, T
from rowmesh.pipeline.cutter import Clustering, Cutter, Sizes
from rowmesh.pipeline.device_recorder import DeviceRecorder
from rowmesh.pipeline.ends import Ends
from rowmesh.pipeline.loop import CurrentWindows, Loop, Setup
from rowmesh.pipeline.recorder import Recorder
from rowmesh.pipeline.schedule import COMPUTE, FINAL_BELOW, PREPARING, Task, make_schedule
from rowmesh.pipeline.sizes import WindowWork
from rowmesh.pipeline.streams import DeviceStreams, HostStreams, Streams
from rowmesh.sparse.convert import check_features

logger = logging.getLogger("rowmesh")
CORES_APART = 2.0
"""Cores of a rank from which on reading, copying and routing have a thread each."""


class Pipeline(Generic[T]):
    """Runs the batches of a loader through an EmbeddingCollection. Making one is collective.

    All ranks make it alike and have equally many batches. Between two windows ranks may look up and evaluate; the call
    waits until the step is done. Where they save dynamic tables, set rows or migrate, the pipeline pauses (`pause`).

    A step is done on all ranks or on none, and is known to be done when the next window is given, when `wait`, a
    look-up or a save has returned, or when the pipeline is closed.

    Args:
        embeddings: the tables.
        depth: K, batches ahead; 0 begins a batch when the one before is done.
        micro_batches: N, of an item; with `accumulate` items 1 to 31 in a window.
        accumulate: A, items whose gradients one step takes: a window has A items, the last perhaps fewer, and their
            micro-batches in turn.
        exchange: how the rows of a window travel: "delta" (each once), "naive" (with every micro-batch that has it, as
            in the paper) or "unsplit" (all with the first, gradients with the last).
        final_rows: whether rows that the batch before does not touch come during it; for delta, and a depth of 1 or
            more. None: with less than 4 micro-batches. With more, the first one needs few rows, and a message ahead
            costs more than it hides (docs/nestpipe.md).
        sizes: of micro-batches, "even" or "light_ends".
        clustering: of samples into micro-batches: "off", "greedy" or "light_ends".
        work: what a window has to do, for uneven sizes.
        verify: whether every row that is read must be the one that steps in turn would read; on a CPU.
        copy: what is done with an item after it is read, such as `lambda item: item.to(device, non_blocking=True)`, in
            a thread of its own, on a device on a stream of its own; returns the item that is trained on.
        joins: whether reading, copying and routing share a thread; None: where this rank has less than two cores, for
            which three threads would only fight.
        overlap: whether communication has threads of its own; without, everything is done in turn.
        trace: whether all that a device does is timed, for `recorder`; without, only what the program computes and
            waits for. Work of a host is timed anyway.
        disturb: is called before every task in its thread, for tests.

    Attributes:
        schedule: what is done when.
        make_schedule: makes one for another depth and number of micro-batches.
        cores: processors that this rank has to itself, on average.
        recorder: when tasks were done, by the clock of what did them.

    Raises:
        ConfigurationError: these do not go together, or not with tables on a device.

    Example:
        >>> import torch
        >>> from rowmesh import EmbeddingOptimizer, TableSpec
        >>> from rowmesh.data import Batch
        >>> from rowmesh.sparse import SparseBatch
        >>> embeddings = EmbeddingCollection([TableSpec(name="item", num_rows=10, dim=4)])
        >>> optimizer = EmbeddingOptimizer(embeddings)
        >>> sparse = SparseBatch.from_bags({"item": [[7], [3], [7]]})
        >>> batches = [Batch(torch.zeros(3, 0), sparse, torch.zeros(3))] * 2
        >>> with Pipeline(embeddings, micro_batches=2) as pipeline:
        ...     for window in pipeline.windows(batches):
        ...         for part in window:
        ...             part.embeddings.values.sum().backward()
        ...         optimizer.step()
        >>> pipeline
        Pipeline(depth 1, 2 micro-batches; delta: rows travel whole)
    """

    def __init__(
        self,
        embeddings: EmbeddingCollection,
        *,
        depth: int = 1,
        micro_batches: int = 1,
        accumulate: int = 1,
        exchange: Form = "delta",
        final_rows: bool | None = None,
        sizes: Sizes = "even",
        clustering: Clustering = "off",
        work: WindowWork | None = None,
        verify: bool = False,
        copy: Callable[[T], T] | None = None,
        joins: bool | None = None,
        overlap: bool = True,
        trace: bool = False,
        disturb: Callable[[Task], None] | None = None,
    ) -> None:
        _check(depth, micro_batches, accumulate, exchange)
        if embeddings.driven.may_lack_undo and depth > (most := 1 if overlap else 0):
            logger.info(
                "pipeline: depth %d instead of %d: batches of dynamic tables with an index on a device, or with "
                "averaged replicas, cannot be taken back once they are opened",
                most,
                depth,
            )
            depth = most
        self._engine, self._overlap, self._exchange = embeddings.driven, overlap, exchange
        self._known = [name for table in embeddings.tables for name in table.features]
        self.cores = cores_of(embeddings.mesh)
        if final_rows is None:
            final_rows = accumulate * micro_batches < FINAL_BELOW
        opens_ahead = not self._engine.always_lacks_undo
        finds_final = final_rows and depth > 0 and opens_ahead and exchange == "delta"
        more = {} if work is None else {"work": work}
        self._windows = CurrentWindows(
            self._engine, partial(self._engine.windows, exchange, finds_final=finds_final, verifies=verify)
        )
        agreements = self._engine.agreement("statuses", 1), self._engine.agreement("answers", 2)
        ends = Ends(embeddings.mesh, *agreements, is_divided=self._engine.is_divided)
        is_tiered = any(windows.is_tiered for windows in self._windows.all)
        is_on_device = any(windows.is_on_device for windows in self._windows.all)
        self.make_schedule = partial(
            make_schedule,
            is_tiered=is_tiered,
            is_on_device=is_on_device,
            opens_ahead=opens_ahead,
            copies=copy is not None,
        )
        joins = self.cores < CORES_APART if joins is None else joins
        self.schedule = self.make_schedule(depth, accumulate * micro_batches, fetches_final=finds_final, joins=joins)
        device = embeddings.device
        self.recorder = DeviceRecorder(partial(Stream.current, device)) if is_on_device else Recorder()
        clock = time.thread_time if overlap else time.process_time
        streams: Streams = HostStreams(self.schedule, self.recorder, clock)
        if is_on_device and overlap:
            streams = DeviceStreams(self.schedule, device, self.recorder, is_traced=trace)
        self._setup = Setup(
            embeddings,
            self._windows,
            self.schedule,
            streams,
            self.recorder,
            ends,
            Cutter(embeddings.tables, micro_batches, sizes=sizes, clustering=clustering, **more),
            micro_batches=micro_batches,
            accumulate=accumulate,
            copy=copy or (lambda item: item),
            overlap=overlap,
            disturb=disturb,
        )
        self._loop: Loop[T] | None = None  # the one that runs, or has failed
        self._first = FIRST  # the number of the first window of the next loop
        self._late_error: RowmeshError | None = None  # what failed after a loop was left

    def __repr__(self) -> str:
        sizes = f"depth {self.schedule.depth}, {self.schedule.num_parts} micro-batches"
        how = "by micro-batch" if self.can_split else "whole"
        return f"Pipeline({sizes}; {self._exchange}: rows travel {how})"

    @property
    def reasons(self) -> list[str]:
        """How the rows of each shard group travel, and why."""
        return [windows.reason for windows in self._windows.all]

    @property
    def threads(self) -> str:
        """Which threads there are, and why."""
        if not self._overlap:
            return "all is done in turn, in one thread"
        resources = [resource for resource in self.schedule.resources if resource != COMPUTE]
        text = f"threads: {', '.join(resources)}"
        if PREPARING not in resources:
            return text
        return f"{text} (reads, copies and routes: {self.cores:g} core(s) for this rank, too few for a thread each)"

    @property
    def can_split(self) -> bool:
        """Whether the rows of all tables can travel by micro-batch."""
        return all(windows.is_split for windows in self._windows.all)

    @property
    def window_bytes(self) -> int:
        """Memory of this rank for each batch in flight, of which there are K + 1 and more; on a CPU."""
        return self._engine.window_bytes

    def take_exposed_share(self) -> float:
        """The share of the time that computation waited for rows, since this was asked last; begins the totals anew.

        On a device, of what it has done by now, and by its clock.
        """
        return self.recorder.take().exposed_share

    def windows(self, items: Iterable[T], features: Sequence[str] | None = None) -> Generator[BatchInFlight[T]]:
        """The batches of a loader, one after the other. They are read in another thread, `depth` ahead.

        Where tables are on a device, items may be there too; what they have is kept until the next batch is computed.

        Args:
            items: what each has as `sparse` is a SparseBatch or a KeyedJaggedTensor.
            features: look up these alone, as `embeddings(batch, features=…)` does: batches may lack the others.

        Raises:
            DataError: a feature belongs to no table, or is named twice.
            RowmeshError: a micro-batch had no backward, or a batch no step; another pipeline runs; or something failed
                in another thread: names rank, stage and batch.
        """
        if self._loop is not None and not self._loop.is_over:
            raise RowmeshError("a pipeline runs one loader at a time; finish or close the loop before")
        self.close()
        if features is not None:
            check_features(features, self._known)
        loop = self._loop = Loop(self._setup, iter(items), features, self._first)
        try:
            yield from loop
        finally:
            loop.leave()
            if self._loop is loop:  # it may have been closed, and another loop begun
                self._leave()

    def wait(self) -> None:
        """Waits until the steps so far are done on this rank.

        Raises:
            RowmeshError: a batch is half way: it waits for its step; or something failed in another thread; or this is
                not the thread that runs the loop, which would go on meanwhile.
        """
        if self._loop is not None:
            self._loop.wait()

    def pause(self) -> None:
        """Waits for the steps so far, and takes back what was opened ahead: tables know what they know after these.

        The loop goes on with the next window, which takes one refill of the pipeline; items that were read come first.
        Saving and statistics of dynamic tables, setting rows, freezing and migrating call this. No-op where no loop
        runs. Collective: every rank calls it after the same step.

        Raises:
            RowmeshError: as `wait`; or batches were opened that cannot be taken back: those of dynamic tables with an
                index on a device, or with averaged replicas.
        """
        if self._loop is not None:
            self._loop.pause()

    def close(self) -> None:
        """Ends all threads, once they have done what was begun. Leaving the loop over `windows` early does so too.

        The steps that were taken are done then. Where one of several ranks leaves its loop early, the others learn so
        instead of their next step.

        Raises:
            RowmeshError: something failed that no loop has raised.
        """
        self._leave()
        self._raise_late_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave()
        if kind is None:
            self._raise_late_error()

    def _leave(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.leave()
            self._first, self._late_error = loop.first, loop.late_error

    def _raise_late_error(self) -> None:
        """Raises what failed when a loop was left."""
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error


def _check(depth: int, micro_batches: int, accumulate: int, exchange: str) -> None:
    for name, value in {"depth": depth, "micro_batches": micro_batches, "accumulate": accumulate}.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise ConfigurationError(f"{name} must be a whole number, got {value!r}")
    if depth < 0:
        raise ConfigurationError(f"depth must be 0 or more, got {depth}")
    if not 1 <= micro_batches <= MAX_PARTS:
        raise ConfigurationError(f"micro_batches must be 1 to {MAX_PARTS}, got {micro_batches}")
    if not 1 <= accumulate <= MAX_PARTS // micro_batches:
        raise ConfigurationError(
            f"accumulate must be 1 to {MAX_PARTS // micro_batches} with {micro_batches} micro-batches of each item, "
            f"got {accumulate}"
        )
    if exchange not in Form.__args__:
        raise ConfigurationError(f"exchange must be one of {list(Form.__args__)}, got {exchange!r}")
