"""Loop: one loop over the windows of a pipeline, in the thread of the program that computes.

It has one run of the pipeline's threads, or several where it pauses in between: a pause ends a run, takes back what it
opened ahead, and the next window begins another run with the items that were read.

`rowmesh.pipeline.stages` has what the threads do, and `rowmesh.pipeline.ends` what becomes of a batch or a step that
fails on one of the ranks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic

from rowmesh.collection.control import Driver
from rowmesh.collection.driven_engine import DrivenEngine
from rowmesh.collection.module import EmbeddingCollection
from rowmesh.collection.outputs import Embeddings
from rowmesh.errors import RowmeshError
from rowmesh.exchange.windows import Windows
from rowmesh.ops.streams import Mark
from rowmesh.pipeline.batch_in_flight import BatchInFlight, Part, Samples, T, Weigh
from rowmesh.pipeline.cutter import Cutter
from rowmesh.pipeline.ends import Answer, Ends
from rowmesh.pipeline.recorder import WAIT, Recorder
from rowmesh.pipeline.runner import PipelineClosedError, Runner
from rowmesh.pipeline.schedule import COMPUTE, Schedule, Task
from rowmesh.pipeline.stages import Stages
from rowmesh.pipeline.streams import Streams
from rowmesh.sparse import SparseBatch
from rowmesh.sparse.convert import as_batch, with_empty_bags
from rowmesh.tables.update_rules import Rate

_ACTIONS = ("read", "copy", "open", "final", "rows", "gradients", "norm", "update")
_LEAVE_S = 10.0  # for a batch that a loop that is left owes other ranks


class CurrentWindows:
    """The windows of each shard group, for where rows are now: they fetch and send. Making them is collective.

    Args:
        engine: of the tables.
        make: makes them for where rows are.

    Attributes:
        all: those that were made last.
    """

    def __init__(self, engine: DrivenEngine, make: Callable[[], list[Windows]]) -> None:
        self._engine, self._make = engine, make
        self.all, self._num_migrations = make(), engine.num_migrations

    def renew(self) -> list[Windows]:
        """Makes them anew where rows have migrated. Collective."""
        if self._num_migrations != self._engine.num_migrations:
            self.all, self._num_migrations = self._make(), self._engine.num_migrations
        return self.all


@dataclass(frozen=True)
class Setup(Generic[T]):
    """The parts that all loops of a pipeline share.

    Attributes:
        embeddings: the tables.
        windows: fetch rows and send gradients.
        schedule: what is done when.
        streams: in which the threads work.
        recorder: of when tasks were done.
        ends: where data end, and which step no rank takes.
        cutter: cuts items into micro-batches.
        micro_batches: N, of an item.
        accumulate: A, items of a window.
        copy: what is done with an item after it is read.
        overlap: whether the resources have threads.
        disturb: is called before every task in its thread.
    """

    embeddings: EmbeddingCollection
    windows: CurrentWindows
    schedule: Schedule
    streams: Streams
    recorder: Recorder
    ends: Ends
    cutter: Cutter
    micro_batches: int
    accumulate: int
    copy: Callable[[T], T]
    overlap: bool
    disturb: Callable[[Task], None] | None


class Loop(Generic[T]):
    """A loop; iterating gives its batches, in order.

    Args:
        setup: of the pipeline.
        reader: gives the items.
        features: that are looked up; None for all.
        first: the number of the first window.

    Attributes:
        first: the number of its first window, as if it never paused; once it is over, that of the next loop.
        is_over: whether it was left, or has come to its end.
        late_error: what failed when it was left, and nothing has raised.

    Raises:
        RowmeshError: all tables are frozen, or another pipeline runs.
    """

    def __init__(self, setup: Setup[T], reader: Iterator[T], features: Sequence[str] | None, first: int) -> None:
        self._setup, self._features, self.first = setup, features, first
        self._engine, self._schedule, self._streams = setup.embeddings.driven, setup.schedule, setup.streams
        self._recorder, self._ends = setup.recorder, setup.ends
        self._windows: Sequence[Windows] = ()
        self.is_over, self.late_error = False, None
        self._runner: Runner | None = None  # of the run; None while the loop pauses, and once it is over
        self._stages: Stages[T] | None = None  # of the run
        self._unused: Iterator[T] | None = None  # items that a loop which pauses goes on with
        self._begins_at = 0  # the first batch of the run
        self._thread = threading.get_ident()
        self._current: BatchInFlight[T] | None = None  # the one that is computed
        self._turn = 0  # the last one that was entered
        self._has_waited = False  # since the last turn was entered
        self._opened: dict[int, int] = {}  # by batch, of the last two that were given: which step of dynamic tables
        self._left_out: int | None = None  # the last batch, where it had no step and finite gradients
        self._begin(reader, 0)

    def _begin(self, reader: Iterator[T], first: int) -> None:
        """Begins a run over items, the first of which is the batch of this number."""
        if self._setup.embeddings.is_frozen:
            raise RowmeshError(
                "all tables are frozen, and a pipeline waits for their gradients; look them up in a plain loop, or "
                "call requires_grad_(True)"
            )
        cancelled = threading.Event()
        self._engine.take_over(Driver(self.squares, self.step, self.forget, self.wait, self.pause, cancelled))
        try:
            self._start(reader, first, cancelled)
        except BaseException:  # or no look-up would be possible any more
            self._engine.take_back(None)
            raise

    def _start(self, reader: Iterator[T], first: int, cancelled: threading.Event) -> None:
        setup, self._windows = self._setup, self._setup.windows.renew()
        self._opened, self._begins_at = {}, first
        self._turn = first - self._schedule.depth - 1
        self._ends.begin(self.first)
        for windows in self._windows:
            windows.begin(self.first + first)
        self._stages = stages = Stages(
            reader,
            self._engine,
            self._windows,
            self._ends,
            cutter=setup.cutter,
            accumulate=setup.accumulate,
            streams=self._streams,
            parts=self._parts,
            sparse_of=self._sparse_of,
            copy=setup.copy,
            first=self.first,
            begins_at=first,
        )
        actions = {name: getattr(stages, name) for name in _ACTIONS}
        actions["route"] = lambda task: stages.route(task, runner)
        actions["retrieve"] = lambda task: stages.retrieve(task, runner)
        self._streams.meet()  # after all work that set rows or used this memory
        on_streams = {name: partial(self._streams.run, action) for name, action in actions.items()}
        self._runner = runner = Runner(
            replace(self._schedule, first=first),
            on_streams,
            rank=self._engine.mesh.run.rank,
            threads=setup.overlap,
            disturb=setup.disturb,
            keep=stages.keep,
            cancelled=cancelled,
            compiling=self._engine.mesh.compiling,
        )

    def __iter__(self) -> Iterator[BatchInFlight[T]]:
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
        if pins := batch.window.route.pins:
            self._opened = {number: self._opened[number] for number in self._opened if number == batch.number - 1}
            self._opened[batch.number] = pins[-1].step

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
        batch.take_rates((), self._recorder.now())

    def _note_dense(self, batch: BatchInFlight[T]) -> None:
        """Notes when the dense network was updated: the driver's work after `wait` is not part of the step."""
        if (stepped := batch.take_stepped()) is not None:
            self._recorder.note(Task("dense", batch.number), COMPUTE, stepped, self._recorder.now())

    def _end_turn(self, runner: Runner, turn: int) -> None:
        """Passes over a batch that does not exist."""
        for part in range(self._schedule.num_parts):
            runner.done(Task("compute", turn, part))
        runner.done(Task("step", turn))

    def wait(self) -> None:
        """As `Pipeline.wait`."""
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
        """As `Pipeline.pause`."""
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
            self.leave()
            raise

    def leave(self) -> None:
        """Ends the loop, once its threads have done what was begun. No-op where it is over."""
        if self.is_over:
            return
        self.is_over = True
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
            self.late_error = refusal or late
        self.first += number  # of the next loop, whose batches are numbered anew

    def _end(self, runner: Runner, stages: Stages[T], number: int) -> RowmeshError | None:
        """Ends a run, and takes back what was opened of batches from a number on; returns what failed meanwhile."""
        self._runner = None
        self._engine.prepare_to_take_back()
        failure = runner.close(lambda: self._engine.take_back(self._last_opened(number)))
        self._streams.meet()  # before anything is dropped
        for windows in self._windows:
            windows.end()
        self.first += self._turn - number + self._schedule.depth + 2  # no window of this run is before one of the next
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
        self.first += self._begins_at  # of the next loop, as where a run ends

    def _last_opened(self, num_given: int) -> int | None:
        """The step that the last batch opened in dynamic tables that stands there, for `DrivenEngine.take_back`.

        All ranks find the same step, where they could agree on it.
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
        if runner.prepare_to_close(Task("rows", batch.number, self._schedule.num_parts - 1)):
            for windows in self._windows:
                windows.drop(batch.window)

    # Calls of the driver

    def _parts(self, batch: BatchInFlight[T]) -> Iterator[Part[T]]:
        """The micro-batches of a batch, each once its rows are there; goes on once it had its backward."""
        assert batch.window
        bounds = batch.window.bounds
        for part, samples in enumerate(map(slice, bounds, bounds[1:])):
            task = Task("compute", batch.number, part)
            start = self._await_rows(batch, task)
            weight = (samples.stop - samples.start) / max(bounds[-1], 1)
            place = part // self._setup.micro_batches
            first = bounds[place * self._setup.micro_batches]
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
            self._recorder.note(task, COMPUTE, start, self._recorder.now(), cpu_s=None)

    def _await_rows(self, batch: BatchInFlight[T], task: Task) -> Mark:
        """Waits until a micro-batch can be looked up; the time is exposed. Returns its end.

        A device's stream passes the first mark when it has no other work, and the second when rows are there. While the
        host waits for the threads that fetch rows, the time is exposed only if the device is idle.
        """
        runner, start = self._runner_of(batch), self._recorder.now()
        with self._stops_if_it_fails():
            runner.wait(task)
        self._streams.begin(task)
        end = self._recorder.now()
        self._recorder.note(task._replace(stage=WAIT), COMPUTE, start, end)
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

    def squares(self) -> list[float]:
        """The sum of squares of the gradients of the batch that was computed last, as each rank has it."""
        runner, batch = self._computed("clip or unscale")
        batch.ask_squares()
        runner.done(Task("call", batch.number))
        with self._stops_if_it_fails():
            runner.wait_for(Task("norm", batch.number))
        return batch.squares

    def step(self, lrs: Sequence[Rate]) -> None:
        """Takes the learning rates of the step of the batch that was computed last."""
        runner, batch = self._computed("step")
        if self._left_out is not None:
            raise RowmeshError(
                f"the step of batch {self._left_out} was left out, whose gradients would be added to those of batch "
                f"{batch.number}; a pipeline keeps none: call zero_grad() before the first micro-batch"
            )
        batch.take_rates(lrs, self._recorder.now())  # now it is taken, even if Ctrl-C comes before the next line
        self._request(runner, batch)

    def forget(self) -> None:
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

    def _sparse_of(self, item: Samples) -> SparseBatch:
        """The ids of an item that are looked up."""
        sparse, tables = as_batch(item.sparse), self._setup.embeddings.tables
        if self._features is None:
            return sparse
        return with_empty_bags(sparse, self._features, [name for table in tables for name in table.features])
