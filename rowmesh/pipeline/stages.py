"""Stages: what threads do with the batches of one loop over a pipeline, from reading to the update.

`rowmesh.pipeline.schedule` says in which order, and `rowmesh.pipeline.ends` what becomes of a batch that fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Generic

from rowmesh.collection.driven_engine import DrivenEngine
from rowmesh.errors import DataError, IdRangeError, NoRoomError, PeerError, RefusedError, RowmeshError
from rowmesh.exchange.window import Window
from rowmesh.exchange.windows import Windows
from rowmesh.pipeline.batch_in_flight import BatchInFlight, Part, T
from rowmesh.pipeline.cutter import Cutter
from rowmesh.pipeline.ends import Answer, Ends
from rowmesh.pipeline.runner import PipelineClosedError, Runner, SharedError, named
from rowmesh.pipeline.schedule import Task
from rowmesh.pipeline.streams import Streams
from rowmesh.sparse import SparseBatch
from rowmesh.sparse.split import concatenated
from rowmesh.tables.update_rules import Rate


class Stages(Generic[T]):
    """The batches in flight of one loop, and the tasks on them.

    A method below "In other threads" is the action of a stage, and runs in the thread of its resource.

    Args:
        reader: gives the items of the loader.
        engine: of the tables.
        windows: fetch rows and send gradients, one for each shard group.
        ends: where the data end; it has begun.
        cutter: cuts items into micro-batches.
        accumulate: items of a window.
        streams: keep what a device may still read.
        parts: gives the micro-batches of a batch to the loop.
        sparse_of: the ids of an item that are looked up.
        copy: what the program does with an item before it is routed.
        first: the number that the window of batch 0 has, or would have.
        begins_at: the first batch.
    """

    def __init__(
        self,
        reader: Iterator[T],
        engine: DrivenEngine,
        windows: Sequence[Windows],
        ends: Ends,
        *,
        cutter: Cutter,
        accumulate: int,
        streams: Streams,
        parts: Callable[[BatchInFlight[T]], Iterator[Part[T]]],
        sparse_of: Callable[[T], SparseBatch],
        copy: Callable[[T], T],
        first: int,
        begins_at: int,
    ) -> None:
        self._reader, self._engine, self._windows, self._ends = reader, engine, windows, ends
        self._cutter, self._accumulate, self._streams, self._parts = cutter, accumulate, streams, parts
        self._sparse_of, self._copy, self._first = sparse_of, copy, first
        self._begins_at = begins_at
        self._in_flight: dict[int, BatchInFlight[T]] = {}
        self._num_decided_ahead = 0  # batches whose turn to be decided together with other ranks has come
        self._num_averaged_ahead = 0  # batches whose turn to be averaged with other replica groups has come
        self._read_failure: Exception | None = None
        self._is_routed_over = False  # whether those that decide together know that there are no more

    def keep(self, task: Task, error: Exception) -> bool:
        """Keeps what failed ahead of the loop as the end of the data."""
        number, here = task.batch, self._ends.end_here
        failed = named(error, task, self._engine.mesh.run.rank)
        if task.stage == "route":
            if isinstance(error, RefusedError):
                self._end_routes(number)
                self._ends.refuse(number, error)
            elif isinstance(error, PipelineClosedError | PeerError):
                return False
            else:
                here(number, failed)
                with contextlib.suppress(RefusedError):  # which says what the error says
                    self._pass_over(number, error)
                batch = self._in_flight.get(number)
                if self._engine.is_decided_ahead and not (batch and batch.is_routed):  # the others failed with it
                    self._end_routes(number)
                    here(number, everywhere=True)
        elif task.stage == "open" and isinstance(error, (IdRangeError, RefusedError)):
            here(number, failed, everywhere=True)
        elif task.stage in ("read", "copy") or (task.stage == "retrieve" and isinstance(error, NoRoomError)):
            here(number, failed)
        else:
            return False
        return True

    def batch(self, number: int) -> BatchInFlight[T] | None:
        """A batch that was read; None where there is none, or this rank knows that not all ranks have one."""
        return None if self._ends.is_over(number) else self._in_flight.get(number)

    def _window(self, task: Task) -> Window | None:
        batch = self.batch(task.batch)
        return None if batch is None else batch.window

    def _status(self, task: Task) -> int:
        return self._ends.status(task.batch, has_batch=self._window(task) is not None)

    @property
    def _asks_late(self) -> bool:
        """Whether ranks compare what they have when the rows of a batch are due.

        Most do so in the first message of the batch. That does not suffice where there is none before its rows, where
        it does not reach all ranks, or where rows may find no room in fast memory after it.
        """
        can_split = any(windows.is_split for windows in self._windows)
        is_tiered = any(windows.is_tiered for windows in self._windows)
        return not self._ends.is_alone and (is_tiered or self._ends.is_divided or not can_split)

    def drop(self) -> None:
        """Takes back what was decided of batches that had no step; forgets them all, and the loader."""
        for batch in self._in_flight.values():
            for pin in () if batch.window is None else batch.window.route.pins:
                pin.drop()
        self._in_flight.clear()
        self._reader = iter(())

    def unused(self, number: int) -> Iterator[T]:
        """The items from a batch on, as the loader gave them, those first that were read; raises what reading did."""
        read = [item for each, batch in sorted(self._in_flight.items()) if each >= number for item in batch.read]
        failure, reader = self._read_failure, self._reader

        def again() -> Iterator[T]:
            yield from read
            if failure is not None:
                raise failure
            yield from reader

        return again()

    # In other threads

    def read(self, task: Task) -> None:
        if self._ends.here is not None or self._ends.has_left:
            return
        try:
            items = [*islice(self._reader, self._accumulate)]
        except Exception as error:
            self._read_failure = error
            raise
        if not items:
            self._ends.end_here(task.batch)
            return
        self._in_flight[task.batch] = BatchInFlight(self._parts, task.batch, items)

    def copy(self, task: Task) -> None:
        if (batch := self.batch(task.batch)) is not None and not self._ends.has_left:
            batch.take_copies([self._copy(item) for item in batch.items])

    def route(self, task: Task, runner: Runner) -> None:
        number, engine = task.batch, self._engine
        if self._is_routed_over if engine.is_decided_ahead else self._ends.is_over(number):
            return
        if not engine.can_undo:  # what is decided of it stands, so that it must be the loop's next batch
            runner.wait_for_step(number - 1)
        if engine.merges_next:  # nor may the step before it be refused, which replica groups do not know by themselves
            runner.wait_for_update(number - 1)
        batch = None if self._ends.has_left else self.batch(number)
        if batch is None:
            self._pass_over(number, self._ends.error(number))
            return
        items, sizes = self._cut(batch)
        sparse = concatenated(items)
        engine.check_ahead(sparse)
        self._num_decided_ahead = number + 1
        route = engine.route_ahead(sparse, items, is_short=len(items) < self._accumulate)
        batch.take_route()
        self._num_averaged_ahead = number + 1
        window = engine.make_window(route, sizes)
        window.begin(self._first + number)
        batch.take_window(window)

    def _cut(self, batch: BatchInFlight[T]) -> tuple[list[SparseBatch], list[int]]:
        """The ids of a window's items, and the samples of each micro-batch; those of items that lack have none."""
        found: list[SparseBatch] = []
        sizes: list[int] = []
        for place, item in enumerate(batch.items):
            _check_item(item, "sparse", "a SparseBatch or a KeyedJaggedTensor")
            sparse = self._sparse_of(item)
            order, of_item = self._cutter(sparse)
            if order is not None:
                _check_item(item, "take", "a method that takes samples, since they are clustered")
                batch.reorder(place, order)
                sparse = self._sparse_of(batch.items[place])
            found.append(sparse)
            sizes += of_item
        sizes += [0] * (len(sizes) // len(found) * (self._accumulate - len(found)))
        return found, sizes

    def _pass_over(self, number: int, error: Exception | None) -> None:
        """Says, where ranks decide together about a batch that is routed, that this rank has none."""
        if self._ends.is_alone or not self._engine.is_decided_ahead or self._num_decided_ahead > number:
            return
        self._num_decided_ahead = number + 1
        self._engine.pass_over(error)
        self._end_routes(number)
        self._ends.end_here(number, everywhere=True)

    def _end_routes(self, number: int) -> None:
        """All ranks that decide together about this batch know that there is none; other replica groups learn so now.

        By the next batch they all know anyway: they compare what they have before rows are given to the loop.
        """
        self._is_routed_over = True
        if self._ends.is_alone or self._num_averaged_ahead > number or self._ends.is_over(number - 1):
            return
        self._num_averaged_ahead = number + 1
        self._engine.pass_over_averages(number - self._begins_at)

    def open(self, task: Task) -> None:
        is_over = self._ends.is_over(task.batch)
        # Where this replica alone knows, from what it decided when it routed, the others wait to hear of it.
        if is_over and not (self._ends.is_divided and task.batch == self._ends.over):
            return
        for windows in self._windows:
            if windows.is_split and (not is_over or windows.tells_replicas):
                states = windows.open(self._window(task), self._status(task))
                if not self._ends.compare(task.batch, states) and not self._ends.is_divided:
                    return

    def retrieve(self, task: Task, runner: Runner) -> None:
        if window := self._window(task):
            try:
                for windows in self._windows:
                    windows.pin(window, lambda: runner.may_wait(task) and not self._ends.is_over(task.batch))
            except NoRoomError:
                if runner.is_of_use(task) and not self._ends.is_over(task.batch):
                    raise

    def final(self, task: Task) -> None:
        if window := self._window(task):
            for windows in self._windows:
                windows.early(window)

    def rows(self, task: Task) -> None:
        if task.part == 0 and self._asks_late and not self._ends.is_known(task.batch):
            self._ends.ask(task.batch, self._status(task))
        if window := self._window(task):
            for windows in self._windows:
                windows.fetch(window, task.part)

    def gradients(self, task: Task) -> None:
        if window := self._window(task):
            for windows in self._windows:
                windows.push(window, task.part)

    def norm(self, task: Task) -> None:
        batch = self.batch(task.batch)
        if batch is None or batch.window is None or not batch.is_measured:
            return
        self._agree(batch, batch.window, Answer.MEASURES)
        mine = self._engine.squares(self._windows, batch.window)
        batch.take_squares(self._ends.exchange_squares(mine))

    def update(self, task: Task) -> None:
        batch = self.batch(task.batch)
        if batch is None:
            return
        window, engine, rates = batch.window, self._engine, batch.lrs or ()
        assert window
        self._agree(batch, window, batch.answer, rates)
        if batch.answer == Answer.SKIPS:
            engine.skip_window(self._windows, window)
        else:
            engine.update_window(self._windows, window, rates, forgets=batch.answer == Answer.FORGETS)
        self._streams.keep(task.batch, window)
        self._streams.keep(task.batch + 1, batch.items)  # the program may use it until it computes the next one
        batch.release()
        del self._in_flight[task.batch]

    def _agree(self, batch: BatchInFlight[T], window: Window, answer: Answer, rates: Sequence[Rate] = ()) -> None:
        """Has ranks agree on what they do with a batch; where they do not, its rows may leave fast memory."""
        try:
            self._ends.agree(batch.number, answer, self._engine.next_step(rates))
        except RowmeshError as error:
            if self._ends.refused is None:
                raise
            for windows in self._windows:
                windows.drop(window)
            raise SharedError(error) from error


def _check_item(item: object, name: str, kind: str) -> None:
    if not hasattr(item, name):
        raise DataError(
            f"the loader of a pipeline gave an item of type {type(item).__name__} without {name!r}, {kind}; "
            "give items as rowmesh.data.Batch is"
        )
