"""Runner: does the tasks of a schedule, each resource in a thread of its own, turn by turn.

The driver, the thread that computes, lets the others into a turn (`enter`), waits for what it needs (`wait`) and says
what it has done (`done`). No task of a turn begins before the driver enters the turn; then all its tasks are done. So
ranks that go through the same turns send the same messages, wherever they stop.

A task that fails stalls its resource. The others finish the steps that the driver has asked for; then the driver's next
wait raises what failed. Where all ranks fail alike (`SharedError`), all tasks of the turns that were entered are done.

Without threads all is done by the driver, as soon as it can be: the sequential loop.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from rowmesh._support.interrupts import hold, release
from rowmesh.errors import RowmeshError
from rowmesh.mesh.compiling import CompilingRanks
from rowmesh.pipeline.schedule import COMPUTE, SENDING, Schedule, Task

logger = logging.getLogger("rowmesh")

Action = Callable[[Task], None]
# Without the time in which ranks compile kernels:
_CLOSE_S = 10.0  # for what was begun, when the pipeline is closed
_GIVE_UP_S = 3.0  # for a message that no other rank will answer
_LOOK_S = 0.2  # how often a waiting driver looks whether a signal came


class PipelineClosedError(RowmeshError):
    """Another task failed, or the pipeline was closed."""


class SharedError(Exception):
    """Every rank meets this error in the same task, and so owes the others the same messages.

    Args:
        error: what the driver raises.
    """

    def __init__(self, error: RowmeshError) -> None:
        super().__init__(str(error))
        self.error = error


class Runner:
    """Does tasks.

    Args:
        schedule: what, in which order.
        actions: of every stage but those of the driver.
        rank: for messages.
        threads: whether resources have threads of their own.
        disturb: is called before every task, in its thread: for tests that look for races.
        keep: is given what a task raised; returns whether it keeps the error, and the task counts as done.
        cancelled: the event to set when no thread should wait for other ranks any more.
        compiling: which ranks compile kernels; limits of waiting do not count that time.

    Attributes:
        cancelled: set when no thread should wait for other ranks any more.
    """

    def __init__(
        self,
        schedule: Schedule,
        actions: Mapping[str, Action],
        *,
        rank: int = 0,
        threads: bool = True,
        disturb: Callable[[Task], None] | None = None,
        keep: Callable[[Task, Exception], bool] = lambda task, error: False,
        cancelled: threading.Event | None = None,
        compiling: CompilingRanks | None = None,
    ) -> None:
        self._schedule, self._actions, self._rank = schedule, actions, rank
        self._disturb, self._keep = disturb, keep
        self._changed = threading.Condition()
        self._done: set[Task] = set()
        self._turn = schedule.first - schedule.depth - 1  # the last one that was entered
        self._error: RowmeshError | None = None
        self._failed_batch = 0  # of the task that failed first
        self._is_shared = False  # whether all ranks meet this error
        self._stalled: set[str] = set()  # resources whose task failed
        self._last_step = self._last_update = schedule.first - 1  # the last batches of which these were done
        self._is_told = self._is_waiting_for_all = self._is_closing = False
        self.cancelled, self._compiling = cancelled or threading.Event(), compiling or CompilingRanks()
        self._when_silent: Callable[[], None] | None = None
        others = [resource for resource in schedule.resources if resource != COMPUTE]
        self._sending = {resource for resource in others if threads and resource in SENDING}  # whose threads are there
        self._left = {resource: self._queue(resource) for resource in others}
        self._next = {resource: next(queue) for resource, queue in self._left.items()}
        self._threads = [
            threading.Thread(target=self._serve, args=(resource,), name=f"rowmesh {resource}", daemon=True)
            for resource in (others if threads else ())
        ]
        self._compiling.begin()
        for thread in self._threads:
            thread.start()
        if self._threads:  # one that sends or receives while the interpreter goes would abort the process
            atexit.register(self.close)

    def enter(self, turn: int) -> None:
        """Lets all resources into a turn; without threads, once what can be done of the turns before is."""
        self._run_inline()
        with self._changed:
            self._turn = turn
            self._forget(turn)
            self._changed.notify_all()
        self._run_inline()

    def wait(self, task: Task, limit_s: float = math.inf) -> None:
        """Until a task of the driver may begin.

        Args:
            task: which.
            limit_s: how long at most, without the time in which ranks compile kernels.

        Raises:
            RowmeshError: a task of this turn or an earlier one failed, or the task cannot begin any more, and the steps
                that were asked for are done where they can be; names rank, stage and batch.
            PipelineClosedError: the time is up.
        """
        self._run_inline()
        needed = list(self._schedule.before(task))
        self._await(lambda: all(each in self._done for each in needed), limit_s)

    def wait_for(self, task: Task) -> None:
        """Until a task of another resource is done; raises what `wait` does."""
        self._run_inline()
        self._await(lambda: task in self._done)

    def done(self, task: Task) -> None:
        """Says that the driver has done a task; without threads, what follows is done when it waits again."""
        with self._changed:
            self._done.add(task)
            if task.stage == "step":  # nothing else is called for
                self._done.add(Task("call", task.batch))
                self._last_step = task.batch
            self._changed.notify_all()

    def wait_for_all(self) -> None:
        """Until all tasks of the turns so far are done; the driver's own must be.

        Raises:
            RowmeshError: a task failed.
        """
        self._run_inline()
        self._is_waiting_for_all = True
        try:
            self._await(lambda: all(turn > self._turn for turn, _ in self._next.values()))
        finally:
            self._is_waiting_for_all = False

    def wait_for_step(self, batch: int) -> None:
        """Has a task wait until the driver has asked for the step of a batch.

        Raises:
            PipelineClosedError: it does not.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.cancelled.is_set() or self._is_closing or self._last_step >= batch)
            if self._last_step < batch:
                raise PipelineClosedError(f"rank {self._rank}: the pipeline was closed")

    def wait_for_update(self, batch: int) -> None:
        """Has a task wait until the update of a batch is done.

        Raises:
            PipelineClosedError: it will not be.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.cancelled.is_set() or self._is_closing or not self._threads or self._last_update >= batch
            )
            if self._last_update < batch:
                raise PipelineClosedError(f"rank {self._rank}: the pipeline was closed")

    def is_of_use(self, task: Task) -> bool:
        """Whether a task's result is needed: while the pipeline is being closed, only what this turn needs is."""
        return not self._is_closing or task.batch <= self._turn + 1

    def may_wait(self, task: Task) -> bool:
        """Whether a task may wait for the updates of batches before its own."""
        if not self._threads or self.cancelled.is_set() or not self.is_of_use(task):
            return False
        return not self._is_waiting_for_all or Task("update", self._turn) not in self._done

    def prepare_to_close(self, task: Task) -> bool:
        """Starts no task whose result is not needed, and waits for a task of this turn; returns whether it is done."""
        with self._changed:
            self._is_closing = True
            self._wait_for(lambda: self.cancelled.is_set() or self._error is not None or task in self._done, _CLOSE_S)
            return task in self._done and not self.cancelled.is_set()

    def close(self, when_silent: Callable[[], None] | None = None) -> RowmeshError | None:
        """Ends the threads, once they have done all tasks that can be done; a task that waits longer is cancelled.

        Ranks that are closed at the same place have sent the same messages.

        Args:
            when_silent: is called once no thread of this runner sends any more: before this returns, or at the end of a
                thread that is busy for longer.

        Returns:
            The failure, where no other call has raised it.
        """
        atexit.unregister(self.close)
        self._when_silent = when_silent or self._when_silent
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        try:
            self._finish()
        finally:
            with self._changed:
                self.cancelled.set()
                self._changed.notify_all()
            self._join()
            self._compiling.end()
            self._tell_when_silent()
        error, self._error = self._error, None  # its traceback has the batches of the loop, and so their memory
        return None if self._is_told else error

    def _join(self) -> None:
        left_s = _GIVE_UP_S
        for thread in self._threads:
            while thread.is_alive() and left_s > 0.0:
                began_s = time.monotonic()
                thread.join(min(left_s, _LOOK_S))
                if not self._compiling.is_here:
                    left_s -= time.monotonic() - began_s
            if thread.is_alive():
                logger.warning("rank %d: the thread %r is still busy and is left alone", self._rank, thread.name)

    def _finish(self) -> None:
        """Waits until all tasks that can be done without the driver are done."""
        if self._threads:
            with self._changed:
                self._wait_for(lambda: self.cancelled.is_set() or not self._is_busy() or self.is_beyond_help, _CLOSE_S)
        else:
            self._do_what_can_be()

    def _queue(self, resource: str) -> Iterator[tuple[int, Task | None]]:
        """The tasks of a resource and their turns; None at the end of a turn."""
        turn = self._schedule.first - self._schedule.depth
        while True:
            for task in self._schedule.tasks(resource, turn):
                yield turn, task
            yield turn, None
            turn += 1

    def _serve(self, resource: str) -> None:
        try:
            self._serve_until_closed(resource)
        finally:
            with self._changed:
                self._sending.discard(resource)
            self._tell_when_silent()

    def _tell_when_silent(self) -> None:
        """Calls back, once, if no thread sends any more."""
        with self._changed:
            if self._sending or self._when_silent is None:
                return
            call, self._when_silent = self._when_silent, None
        call()

    def _serve_until_closed(self, resource: str) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.cancelled.is_set() or self._is_ready(resource))
                if self.cancelled.is_set():
                    return
            if not self._do_next(resource):
                return

    @property
    def is_beyond_help(self) -> bool:
        """Whether this rank failed by itself, and no step that was asked for can be finished any more."""
        return self._error is not None and not self._is_shared and self._is_settled()

    def _is_settled(self) -> bool:
        """Whether all steps that were asked for are done, but for those that cannot be."""
        return self._last_update >= self._last_step or self._schedule.stage("update").resource in self._stalled

    def _is_busy(self) -> bool:
        """Whether a thread does a task, or could begin one."""
        return any(self._is_ready(resource) for resource in self._next)

    def _is_ready(self, resource: str) -> bool:
        turn, task = self._next[resource]
        if turn > self._turn or resource in self._stalled:
            return False
        return task is None or all(each in self._done for each in self._schedule.before(task))

    def _do_next(self, resource: str) -> bool:
        """Does the next task of a resource; returns whether it went well.

        Ctrl-C waits until the task has ended and is noted: half of it could not be taken back, nor be done again.
        """
        hold()
        try:
            return self._do(resource)
        finally:
            release()

    def _do(self, resource: str) -> bool:
        _, task = self._next[resource]
        try:
            if task is not None:
                if self._disturb:
                    self._disturb(task)
                self._actions[task.stage](task)
        except Exception as error:
            if task is None or not self._keep(task, error):
                self._fail(resource, task, error)
                return False
        except BaseException:  # the driver, without threads, was interrupted: the task must not be done again
            self.cancelled.set()
            raise
        with self._changed:
            if task is not None:
                self._done.add(task)
                if task.stage == "update":
                    self._last_update = task.batch
            self._next[resource] = next(self._left[resource])
            self._changed.notify_all()
        return True

    def _fail(self, resource: str, task: Task | None, error: Exception) -> None:
        with self._changed:
            if self._error is None and not isinstance(error, PipelineClosedError):
                self._is_shared = isinstance(error, SharedError)
                self._error = named(error.error if isinstance(error, SharedError) else error, task, self._rank)
                self._failed_batch = -1 if task is None else task.batch
            self._stalled.add(resource)
            self._changed.notify_all()

    def _run_inline(self) -> None:
        """Without threads: does what can be done."""
        if not self._threads:
            self._do_what_can_be()

    def _do_what_can_be(self) -> None:
        is_busy = True
        while is_busy and not self.cancelled.is_set():
            is_busy = False
            for resource in self._next:
                while self._is_ready(resource) and self._do_next(resource):
                    is_busy = True

    def _await(self, condition: Callable[[], bool], limit_s: float = math.inf) -> None:
        is_done = False

        def is_over() -> bool:
            nonlocal is_done
            is_done = (self._error is None or self._failed_batch > self._turn) and condition()
            return is_done or (self._error is not None and self._is_settled())

        with self._changed:
            self._wait_for(lambda: self.cancelled.is_set() or is_over(), limit_s)
        if is_done:
            return
        self._raise()
        raise PipelineClosedError(f"rank {self._rank}: the pipeline was closed")

    def _wait_for(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Until a condition holds, or the time is up; time in which some rank compiles kernels does not count.

        Looks up now and then, so that a signal is handled: waiting for a lock without limit is not interrupted.
        """
        while not condition() and limit_s > 0.0:
            began_s = time.monotonic()
            self._changed.wait(min(limit_s, _LOOK_S))
            if limit_s < math.inf and not self._is_compiled():
                limit_s -= time.monotonic() - began_s

    def _is_compiled(self) -> bool:
        """Whether some rank compiles kernels. Ends of tasks are noted meanwhile: this may ask other processes."""
        self._changed.release()
        try:
            return self._compiling.is_anywhere
        finally:
            self._changed.acquire()

    def _raise(self) -> None:
        if self._error is not None:
            self._is_told = True
            raise self._error

    def _forget(self, turn: int) -> None:
        """Drops what no task can wait for any more.

        Batch `turn − 1` is computed, so the resources that fetch its rows have done turn `turn − 1 − depth`. Tasks of
        later turns wait for up to two batches before.
        """
        self._done = {task for task in self._done if task.batch >= turn - self._schedule.depth - 3}


def named(error: BaseException, task: Task | None, rank: int) -> RowmeshError:
    """The error with the rank, stage and batch it happened in."""
    where = "" if task is None else f" in stage {task.stage!r} of batch {task.batch}"
    text = str(error) if isinstance(error, RowmeshError) else f"{type(error).__name__}: {error}"
    kind = type(error) if isinstance(error, RowmeshError) else RowmeshError
    named = RowmeshError(f"rank {rank}{where}: {text}")
    with contextlib.suppress(TypeError):
        named = kind(f"rank {rank}{where}: {text}")
    named.__cause__ = error
    return named
