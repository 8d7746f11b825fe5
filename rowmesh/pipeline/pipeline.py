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

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import Generic, Self

from rowmesh.collection.control import Driver
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.outputs import Embeddings
from rowmesh.errors import (
    ConfigurationError,
    RowmeshError,
)
from rowmesh.exchange.window import FIRST, Form
from rowmesh.mesh.threads import cores_of
from rowmesh.ops.streams import Mark, Stream
from rowmesh.ops.window import MAX_PARTS
from rowmesh.pipeline.batch_in_flight import BatchInFlight, Part, Samples, T, Weigh
from rowmesh.pipeline.cutter import Clustering, Cutter, Sizes
from rowmesh.pipeline.device_recorder import DeviceRecorder
from rowmesh.pipeline.ends import Answer, Ends
from rowmesh.pipeline.recorder import WAIT, Recorder
from rowmesh.pipeline.runner import PipelineClosedError, Runner
from rowmesh.pipeline.schedule import COMPUTE, PREPARING, Task, make_schedule
from rowmesh.pipeline.sizes import WindowWork
from rowmesh.pipeline.stages import Stages
from rowmesh.pipeline.streams import DeviceStreams, HostStreams, Streams
from rowmesh.sparse import SparseBatch
from rowmesh.sparse.convert import as_batch, check_features, with_empty_bags
from rowmesh.tables.update_rules import Rate

_ACTIONS = ("read", "copy", "open", "final", "rows", "gradients", "norm", "update")
logger = logging.getLogger("rowmesh")
CORES_APART = 2.0
"""Cores of a rank from which on reading, copying and routing have a thread each."""
_LEAVE_S = 10.0  # for a batch that a loop that is left owes other ranks


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
            micro-batches in turn. Not with dynamic tables.
        exchange: how the rows of a window travel: "delta" (each once), "naive" (with every micro-batch that has it, as
            in the paper) or "unsplit" (all with the first, gradients with the last).
        final_rows: whether rows that the batch before does not touch come during it; for delta, and a depth of 1 or
            more.
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
        final_rows: bool = True,
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
        if accumulate > 1 and embeddings.driven.is_decided_ahead:
            raise ConfigurationError(
                "dynamic tables decide about the ids of each item by itself, and a window that accumulates several "
                "decides once; leave accumulate out and take larger batches, or accumulate in a plain loop"
            )
        self._micro_batches, self._accumulate = micro_batches, accumulate
        if embeddings.driven.may_lack_undo and depth > (most := 1 if overlap else 0):
            logger.info(
                "pipeline: depth %d instead of %d: batches of dynamic tables with an index on a device, or with "
                "averaged replicas, cannot be taken back once they are opened",
                most,
                depth,
            )
            depth = most
        self._embeddings, self._engine, self._overlap, self._disturb = embeddings, embeddings.driven, overlap, disturb
        self._exchange, self._copy, self.cores = exchange, copy, cores_of(embeddings.mesh)
        finds_final = final_rows and depth > 0 and exchange == "delta"
        more = {} if work is None else {"work": work}
        self._cutter = Cutter(embeddings.tables, micro_batches, sizes=sizes, clustering=clustering, **more)
        self._make_windows = partial(self._engine.windows, exchange, finds_final=finds_final, verifies=verify)
        self._windows, self._num_migrations = self._make_windows(), self._engine.num_migrations
        agreements = self._engine.agreement("statuses", 1), self._engine.agreement("answers", 2)
        self._ends = Ends(embeddings.mesh, *agreements, is_divided=self._engine.is_divided)
        is_tiered = any(windows.is_tiered for windows in self._windows)
        is_on_device = any(windows.is_on_device for windows in self._windows)
        self.make_schedule = partial(
            make_schedule, is_tiered=is_tiered, is_on_device=is_on_device, copies=copy is not None
        )
        joins = self.cores < CORES_APART if joins is None else joins
        self.schedule = self.make_schedule(depth, accumulate * micro_batches, fetches_final=finds_final, joins=joins)
        device = embeddings.device
        self.recorder = DeviceRecorder(partial(Stream.current, device)) if is_on_device else Recorder()
        clock = time.thread_time if overlap else time.process_time
        self._streams: Streams = HostStreams(self.schedule, self.recorder, clock)
        if is_on_device and overlap:
            self._streams = DeviceStreams(self.schedule, device, self.recorder, is_traced=trace)
        self._runner: Runner | None = None  # of the run; None before a loop, after it, and while it pauses
        self._loop: object | None = None  # the loop over items
        self._unused: Iterator[T] | None = None  # items that a loop which pauses goes on with
        self._begins_at = 0  # the first batch of the run
        self._thread = 0  # which one runs the loop
        self._stages: Stages[T] | None = None  # of the loop that runs
        self._current: BatchInFlight[T] | None = None  # the one that is computed
        self._turn = 0  # the last one that was entered
        self._late_error: RowmeshError | None = None  # what failed after a loop was left
        self._has_waited = False  # since the last turn was entered
        self._known = [name for table in embeddings.tables for name in table.features]
        self._features: Sequence[str] | None = None  # that are looked up; None for all
        self._opened: dict[int, int] = {}  # by batch, of the last two that were given: which step of dynamic tables
        self._left_out: int | None = None  # the last batch, where it had no step and finite gradients
        self._first = FIRST  # the number of its first window

    def __repr__(self) -> str:
        sizes = f"depth {self.schedule.depth}, {self.schedule.num_parts} micro-batches"
        how = "by micro-batch" if self.can_split else "whole"
        return f"Pipeline({sizes}; {self._exchange}: rows travel {how})"

    @property
    def reasons(self) -> list[str]:
        """How the rows of each shard group travel, and why."""
        return [windows.reason for windows in self._windows]

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
        return all(windows.is_split for windows in self._windows)

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
        self._raise_late_error()
        if self._loop is not None:
            raise RowmeshError("a pipeline runs one loader at a time; finish or close the loop before")
        if features is not None:
            check_features(features, self._known)
        self._features, self._left_out = features, None
        loop, _ = object(), self._begin(iter(items), 0)
        self._loop = loop
        try:
            yield from self._turns()
        finally:
            if self._loop is loop:  # it may have been closed, and another loop begun
                self._stop()

    def _begin(self, reader: Iterator[T], first: int) -> None:
        """Begins a run over items, the first of which is the batch of this number."""
        if self._embeddings.is_frozen:
            raise RowmeshError(
                "all tables are frozen, and a pipeline waits for their gradients; look them up in a plain loop, or "
                "call requires_grad_(True)"
            )
        cancelled, self._thread = threading.Event(), threading.get_ident()
        self._engine.take_over(Driver(self._squares, self._step, self._forget, self.wait, self.pause, cancelled))
        try:
            self._start(reader, first, cancelled)
        except BaseException:  # or no look-up would be possible any more
            self._engine.take_back(None)
            raise

    def _start(self, reader: Iterator[T], first: int, cancelled: threading.Event) -> None:
        if self._num_migrations != self._engine.num_migrations:
            self._windows, self._num_migrations = self._make_windows(), self._engine.num_migrations
        self._opened, self._begins_at = {}, first
        self._turn = first - self.schedule.depth - 1
        self._ends.begin(self._first)
        for windows in self._windows:
            windows.begin(self._first + first)
        self._stages = stages = Stages(
            reader,
            self._engine,
            self._windows,
            self._ends,
            cutter=self._cutter,
            accumulate=self._accumulate,
            streams=self._streams,
            parts=self._parts,
            sparse_of=partial(_sparse_of, features=self._features, known=self._known),
            copy=self._copy or (lambda item: item),
            first=self._first,
            begins_at=first,
        )
        actions = {name: getattr(stages, name) for name in _ACTIONS}
        actions["route"] = lambda task: stages.route(task, runner)
        actions["retrieve"] = lambda task: stages.retrieve(task, runner)
        self._streams.meet()  # after all work that set rows or used this memory
        on_streams = {name: partial(self._streams.run, action) for name, action in actions.items()}
        self._runner = runner = Runner(
            replace(self.schedule, first=first),
            on_streams,
            rank=self._engine.mesh.run.rank,
            threads=self._overlap,
            disturb=self._disturb,
            keep=stages.keep,
            cancelled=cancelled,
            compiling=self._engine.mesh.compiling,
        )

    def _turns(self) -> Iterator[BatchInFlight[T]]:
        runner, stages = self._runner, self._stages
        while True:
            if (unused := self._unused) is not None:
                self._unused = None
                self._begin(unused, self._begins_at)
                runner, stages = self._runner, self._stages
            assert runner
            assert stages
            if self._has_waited:  # and the program may have updated rows, on its own stream
                self._streams.meet()
                self._has_waited = False
            self._turn += 1
            runner.enter(self._turn)
            if self._turn < self._begins_at:
                continue
            runner.wait(Task("compute", self._turn))
            if (batch := stages.batch(self._turn)) is None:
                self._end_turn(runner, self._turn)
                runner.wait_for_all()
                self._ends.check()
                return
            assert batch.window
            self._engine.tell(batch.window)
            self._note_given(batch)
            yield batch
            if batch.lrs is None:
                self._leave_out(batch)
            self._request(runner, batch)
            self._note_dense(batch)

    def _note_given(self, batch: BatchInFlight[T]) -> None:
        assert batch.window
        self._current = batch
        if (pin := batch.window.route.pin) is not None:
            self._opened = {number: self._opened[number] for number in self._opened if number == batch.number - 1}
            self._opened[batch.number] = pin.step

    def _request(self, runner: Runner, batch: BatchInFlight[T]) -> None:
        """Has the update of a batch begin, whose learning rates are there; once more where Ctrl-C came between."""
        runner.done(Task("step", batch.number))

    def _leave_out(self, batch: BatchInFlight[T]) -> None:
        """Leaves the step of a batch out, whose gradients the program has looked at.

        Raises:
            RowmeshError: it has not.
        """
        if not batch.is_measured:
            raise RowmeshError(
                f"batch {batch.number} had no step: after the backward of its last micro-batch call the step of "
                "the EmbeddingOptimizer; only a GradScaler, or a program that has clipped, may leave it out; "
                "Pipeline(…, accumulate=…) adds gradients up over several items"
            )
        if batch.answer == Answer.TAKES and batch.is_finite:
            self._left_out = batch.number
        batch.take_answer(Answer.SKIPS)
        batch.take_rates((), self.recorder.now())

    def _note_dense(self, batch: BatchInFlight[T]) -> None:
        """Notes when the dense network was updated: the driver's work after `wait` is not part of the step."""
        if (stepped := batch.take_stepped()) is not None:
            self.recorder.note(Task("dense", batch.number), COMPUTE, stepped, self.recorder.now())

    def _end_turn(self, runner: Runner, turn: int) -> None:
        """Passes over a batch that does not exist."""
        for part in range(self.schedule.num_parts):
            runner.done(Task("compute", turn, part))
        runner.done(Task("step", turn))

    def wait(self) -> None:
        """Waits until the steps so far are done on this rank.

        Raises:
            RowmeshError: a batch is half way: it waits for its step; or something failed in another thread; or this is
                not the thread that runs the loop, which would go on meanwhile.
        """
        if self._runner is None:
            return
        if threading.get_ident() != self._thread:
            raise RowmeshError(
                f"a pipeline trains in another thread than {threading.current_thread().name!r}, which reads rows, and "
                "changes them meanwhile; look rows up, read or save them in the pipeline's thread, between two windows"
            )
        if self._current is not None and self._current.lrs is None and self._current.is_measured:
            self._leave_out(self._current)
        if self._current is not None and self._current.lrs is None:
            raise RowmeshError(
                f"batch {self._current.number} of the pipeline is half way; look rows up, read or save them between "
                "two windows, after the optimizer's step"
            )
        if self._current is not None:
            self._request(self._runner, self._current)
            self._note_dense(self._current)
        with self._stops_if_it_fails():
            self._runner.wait_for_all()
        self._streams.meet()
        self._has_waited = True

    def pause(self) -> None:
        """Waits for the steps so far, and takes back what was opened ahead: tables know what they know after these.

        The loop goes on with the next window, which takes one refill of the pipeline; items that were read come first.
        Saving and statistics of dynamic tables, setting rows, freezing and migrating call this. No-op where no loop
        runs. Collective: every rank calls it after the same step.

        Raises:
            RowmeshError: as `wait`; or batches were opened that cannot be taken back: those of dynamic tables with an
                index on a device, or with averaged replicas.
        """
        if self._runner is None:
            return
        self.wait()
        runner, stages = self._runner, self._stages
        assert stages
        number = self._begins_at if self._current is None else self._current.number + 1
        self._engine.check_undo(self._last_opened(number))
        unused = stages.unused(number)
        self._end(runner, stages, number)
        self._unused, self._begins_at = unused, number

    @contextlib.contextmanager
    def _stops_if_it_fails(self) -> Iterator[None]:
        """Ends a loop that cannot go on; the program may keep it, with what was raised, and begin another one."""
        try:
            yield
        except RowmeshError:
            self._stop()
            raise

    def close(self) -> None:
        """Ends all threads, once they have done what was begun. Leaving the loop over `windows` early does so too.

        The steps that were taken are done then. Where one of several ranks leaves its loop early, the others learn so
        instead of their next step.

        Raises:
            RowmeshError: something failed that no loop has raised.
        """
        self._stop()
        self._raise_late_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop()
        if kind is None:
            self._raise_late_error()

    def _stop(self) -> None:
        self._loop = None
        if self._current is not None and self._current.lrs is None and self._current.is_finite is False:
            self._leave_out(self._current)
        self._say_that_it_is_left()
        runner, stages = self._runner, self._stages
        if runner is None or stages is None:
            return
        number = self._begins_at if self._current is None else self._current.number + 1
        self._runner = None
        refusal: RowmeshError | None = None
        try:
            if self._current is not None and self._current.lrs is not None:
                self._request(runner, self._current)
            refusal = self._part(runner, stages)
            self._make_room(runner)
        finally:
            late = self._end(runner, stages, number)
            self._late_error = refusal or late
        self._first += number  # of the next loop, whose batches are numbered anew

    def _end(self, runner: Runner, stages: Stages[T], number: int) -> RowmeshError | None:
        """Ends a run, and takes back what was opened of batches from a number on; returns what failed meanwhile."""
        self._runner = None
        self._engine.prepare_to_take_back()
        failure = runner.close(lambda: self._engine.take_back(self._last_opened(number)))
        self._streams.meet()  # before anything is dropped
        for windows in self._windows:
            windows.end()
        self._first += self._turn - number + self.schedule.depth + 2  # no window of this run is before one of the next
        stages.drop()
        self._streams.forget()
        self._current = self._stages = None
        return failure

    def _say_that_it_is_left(self) -> None:
        """Has a loop that is left while it pauses tell so the other ranks, which go on."""
        unused, self._unused = self._unused, None
        if unused is None:
            return
        if not self._ends.is_alone:
            with contextlib.suppress(RowmeshError):
                self._begin(unused, self._begins_at)
                self._ends.has_left = True  # nothing is read
                return
        self._first += self._begins_at  # of the next loop, as where a run ends

    def _last_opened(self, num_given: int) -> int | None:
        """The step that the last batch opened in dynamic tables that stands there, for `DrivenEngine.take_back`.

        The same on all ranks, where they could agree on it.
        """
        num_decided = num_given if self._ends.num_decided is None else min(num_given, self._ends.num_decided)
        return self._opened.get(num_decided - 1) if num_decided > self._begins_at else -1

    def _part(self, runner: Runner, stages: Stages[T]) -> RowmeshError | None:
        """Sends other ranks what they wait for, until all know where this one stopped; see `rowmesh.pipeline.ends`.

        Returns:
            The error for a step that the program asked for and no rank has taken, which nothing has raised yet.
        """
        ends, mine = self._ends, self._current
        if ends.is_alone or ends.is_known(self._turn) or runner.cancelled.is_set() or runner.is_beyond_help:
            return None
        ends.has_left = True
        if ends.refused is not None:  # all ranks enter the turn after
            if self._turn == ends.refused:
                self._enter_next(runner)
            return None
        stepped = -1 if mine is None or mine.lrs is None else mine.number
        try:
            self._go_through_turns(runner, stages, stepped)
        except PipelineClosedError:
            return None
        except RowmeshError as error:
            return error if ends.refused is None or stepped == ends.refused else None
        return None

    def _go_through_turns(self, runner: Runner, stages: Stages[T], stepped: int) -> None:
        """Passes over batches behind the last one that had its step, up to the end or to one whose step is refused.

        Raises:
            RowmeshError: a step was refused, or something failed.
        """
        while True:
            if self._turn > stepped and self._turn >= self._begins_at:
                runner.wait(Task("compute", self._turn), _LEAVE_S)
                if (batch := stages.batch(self._turn)) is None:
                    self._end_turn(runner, self._turn)
                    return
                self._abandon(runner, batch, Answer.LEFT if batch is self._current else Answer.LEFT_BEFORE)
            self._enter_next(runner)

    def _enter_next(self, runner: Runner) -> None:
        self._turn += 1
        runner.enter(self._turn)

    def _abandon(self, runner: Runner, batch: BatchInFlight[T], answer: Answer) -> None:
        """Lets a batch be sent that is not computed, or not all of it."""
        assert batch.window is not None
        if answer == Answer.LEFT_BEFORE:
            with contextlib.suppress(RowmeshError):
                self._engine.tell(batch.window, refuses=RowmeshError(f"its loop was left before batch {batch.number}"))
        batch.take_answer(answer)
        batch.window.lack_gradients()
        for part in range(batch.num_computed, batch.window.num_parts):
            runner.done(Task("compute", batch.number, part))
        runner.done(Task("step", batch.number))

    def _make_room(self, runner: Runner) -> None:
        """Unpins the rows of a batch that has no step: what is under way may wait for their room."""
        batch, is_tiered = self._current, any(windows.is_tiered for windows in self._windows)
        if not is_tiered or batch is None or batch.window is None or batch.lrs is not None:
            return
        if runner.prepare_to_close(Task("rows", batch.number, self.schedule.num_parts - 1)):
            for windows in self._windows:
                windows.drop(batch.window)

    def _raise_late_error(self) -> None:
        """Raises what failed when a loop was left."""
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    # Calls of the driver

    def _parts(self, batch: BatchInFlight[T]) -> Iterator[Part[T]]:
        """The micro-batches of a batch, each once its rows are there; goes on once it had its backward."""
        assert batch.window
        bounds = batch.window.bounds
        for part, samples in enumerate(map(slice, bounds, bounds[1:])):
            task = Task("compute", batch.number, part)
            start = self._await_rows(batch, task)
            weight = (samples.stop - samples.start) / max(bounds[-1], 1)
            place = part // self._micro_batches
            first = bounds[place * self._micro_batches]
            item, own = (
                batch.items[min(place, len(batch.items) - 1)],
                slice(samples.start - first, samples.stop - first),
            )
            yield Part(item, own, partial(self._pool, batch, part), weight)
            if batch.num_computed != part + 1:
                raise RowmeshError(
                    f"micro-batch {part} of batch {batch.number} had no backward; call loss.backward() for each before "
                    "the next one"
                )
            self.recorder.note(task, COMPUTE, start, self.recorder.now(), cpu_s=None)

    def _await_rows(self, batch: BatchInFlight[T], task: Task) -> Mark:
        """Waits until a micro-batch can be looked up; the time is exposed. Returns its end.

        A device's stream passes the first mark when it has no other work, and the second when rows are there. While the
        host waits for the threads that fetch rows, the time is exposed only if the device is idle.
        """
        runner, start = self._runner_of(batch), self.recorder.now()
        with self._stops_if_it_fails():
            runner.wait(task)
        self._streams.begin(task)
        end = self.recorder.now()
        self.recorder.note(task._replace(stage=WAIT), COMPUTE, start, end)
        return end

    def _pool(self, batch: BatchInFlight[T], part: int, weigh: Weigh | None) -> Embeddings:
        """The vectors of a micro-batch."""
        self._runner_of(batch)
        window, task = batch.window, Task("compute", batch.number, part)
        assert window
        if part != batch.num_computed:
            raise RowmeshError(f"micro-batch {part} of batch {batch.number} is looked up once, in its turn")

        def finished() -> None:
            runner = self._runner_of(batch)
            for windows in self._windows:
                windows.pack(window, part)
            batch.take_gradients(part)
            self._streams.end(task)  # on the stream of this backward, whatever thread it runs in
            runner.done(task)

        found = self._engine.pool_part(window, part, finished, weigh)
        return found if self._features is None else found.select(self._features)

    def _runner_of(self, batch: BatchInFlight[T]) -> Runner:
        """The runner of a batch."""
        if self._runner is None or batch is not self._current:
            raise RowmeshError(f"batch {batch.number} is not under way any more: its loop was left")
        return self._runner

    def _computed(self, doing: str) -> tuple[Runner, BatchInFlight[T]]:
        """The batch that was computed last, and waits for its step."""
        runner, batch = self._runner, self._current
        if runner is None or batch is None or not batch.is_computed or batch.lrs is not None:
            raise RowmeshError(
                f"there is nothing to {doing}: no batch of the pipeline had a backward of all micro-batches"
            )
        return runner, batch

    def _squares(self) -> list[float]:
        """The sum of squares of the gradients of the batch that was computed last, as each rank has it."""
        runner, batch = self._computed("clip or unscale")
        batch.ask_squares()
        runner.done(Task("call", batch.number))
        with self._stops_if_it_fails():
            runner.wait_for(Task("norm", batch.number))
        return batch.squares

    def _step(self, lrs: Sequence[Rate]) -> None:
        """Takes the learning rates of the step of the batch that was computed last."""
        runner, batch = self._computed("step")
        if self._left_out is not None:
            raise RowmeshError(
                f"the step of batch {self._left_out} was left out, whose gradients would be added to those of batch "
                f"{batch.number}; a pipeline keeps none: call zero_grad() before the first micro-batch"
            )
        batch.take_rates(lrs, self.recorder.now())  # now it is taken, even if Ctrl-C comes before the next line
        self._request(runner, batch)

    def _forget(self) -> None:
        """Forgets the gradients of the batch that was computed, which were sent already."""
        self._left_out, batch = None, self._current
        if batch is None or batch.lrs is not None or not batch.num_computed:
            return
        if not batch.is_computed:
            raise RowmeshError(
                f"gradients of batch {batch.number} are forgotten after {batch.num_computed} of its micro-batches, "
                "which the pipeline has sent; call zero_grad() before the first or after the last micro-batch"
            )
        batch.take_answer(Answer.FORGETS)


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


def _sparse_of(item: Samples, features: Sequence[str] | None, known: Sequence[str]) -> SparseBatch:
    """The ids of an item that are looked up: of these features, None for all."""
    sparse = as_batch(item.sparse)
    return sparse if features is None else with_empty_bags(sparse, features, known)
