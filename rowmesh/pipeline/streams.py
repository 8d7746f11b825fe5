"""Streams: on a device, tasks launch work that is done later, each resource on a stream of its own.

[Note: streams]

*Which.* A task of a pipeline on a device only launches work; the runner's "done" means "launched". The threads of the
runner, one a resource, each launch on a stream of their own::

    reader         what the loader does on a device
    copier         copies batches to the device, where the program says how (`copy`)
    router         routes batches, sorts ids by row for the backward
    communication  keys, rows, gradients; merges and updates rows, and adds their gradients up where nothing else does
    compute        the program's own stream: pooling, the network, sums of gradients of rows
    ids            many ids of a batch, from pinned memory: the router's stream waits for each copy (`IdCopier`)
    tier           no work: tiered tables copy rows on streams of their own, for which communication waits

*Order between them.* The edges of the schedule are the events: a task that is done records one on the current stream
(`end`), and a task that begins makes its stream wait for the events of the tasks before it in the schedule (`begin`).
The runner makes sure that these are recorded by then. The host does not wait for any of this. It waits in two places,
both in the thread that communicates: for the sizes of messages; and, where no messages are sent, before an update for
the counts of its batch, which the device made when rows were fetched: the device computes that batch meanwhile.

Rows are read and updated on the communication stream alone, whose order is what makes them fresh: update of t − 1, rows
of t, final rows of t + 1 (those that t does not touch), gradients and update of t. That holds for rows that are
computed from cores, read from other ranks' memory, or changed by messages of other replicas. With one rank, the stream
that computes also reads rows where they are: it waits for the update before (rows of t come after it), and the update
waits for all gradients of t, hence for all reads before them.

*One communicator, one order.* NCCL needs the messages of a communicator to be posted in one order by all ranks. It may
also block for ever where two communicators of one device run at once, on every rank in another order, and do not fit on
it together. Rows and gradients, two threads on a CPU, are therefore one resource here, whose tasks have one declared
order: rows of t, keys of t + K, final rows of t + 1, gradients of t. The look-ups of the program use the same
communicator, but only while the pipeline has no work (`wait`). Sums of cores, replicate groups, and holders of one
copy a node have communicators of their own, which the same thread uses, in one order too. The average of the dense
network has its own communicator, as in any program with DistributedDataParallel; both together take a fraction of a
GPU's multiprocessors.

*Autograd* runs the backward of a micro-batch's vectors in a thread of its own, on the stream on which they were made.
So the event after which gradients are complete is recorded there, on what is the current stream then, not by the thread
that called `backward`.

*Memory.* Torch's allocator gives memory that is freed to the next that asks on the stream which it was allocated on, at
once, even while other streams still use it. So a tensor that another stream uses may be dropped only after its own
stream has waited for that one. Here all that a batch has, from its ids on the device to the rows that came and the
gradients that go, belongs to its window, and the window is dropped as a whole, when the router begins batch t + K + 2:

- the streams of the reader, the copier and the router have then waited for the event of the update of t (the schedule
  has that edge for nothing else), which came after all that computed t and all that was sent;
- the communication stream did that update itself;
- the stream that computes has waited for rows of t + 1, which come after that update.

So the host may run ahead, K + 2 windows are alive at most, and memory is the same in every run. Tensors within one
stream need nothing of this, and NCCL's messages are waited for, on the stream that posted them, before what they carry
is dropped. Four things are not the window's:

- What a loader gives may be on the device, copied there on the reader's stream, since that is where loaders run, or on
  the copier's. The program may use it up to the next batch. So it is dropped with the window of that one, whose update
  comes after all work that the program launched before.
- Gradients, also those that are left to the update, are allocated on the program's stream, which it may change between
  batches. `DeviceWindow` registers the stream that reads them with torch's allocator (`_used_here`).
- Many ids are copied to memory that stays: the copy waits for the kernel that read the ids before them.
- Pinned memory is kept by torch until it is copied.

At both ends of a loop, and before the program looks rows up, all streams meet (`meet`), and once more before the next
turn. For the program's look-up may have updated rows by messages of other replicas, whose memory belongs to the
communication stream, and may have passed the barrier after which other ranks' rows can be read.

*Time.* A task is timed by marks in its stream, one after its waits and one after its work (`recorder`, see
[Note: clocks] in `rowmesh.pipeline.device_recorder`). An event with a time costs the host some µs, and the device a
message to memory; a batch has a dozen tasks. So all tasks are timed only for a trace. Otherwise only the stream that
computes is, with three marks a micro-batch and two a batch, which give the exposed share. Steps in turn are always
timed: measuring stages is what they are for.

Source: NestPipe §V-B. Differs: batches have a stream of their own, and rows are updated on that of communication.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from rowmesh.ops.streams import Mark, Stream
from rowmesh.pipeline.recorder import Recorder
from rowmesh.pipeline.schedule import COMPUTE, REUSED_AFTER, Schedule, Span, Task

Action = Callable[[Task], None]
_OF_HOST = {"read": "reader", "retrieve": "tier"}
"""Stages that the host does, whatever their stream does meanwhile; where a trace shows them."""


class Streams(Protocol):
    """Where tasks are done, and after what."""

    def run(self, action: Action, task: Task) -> None:
        """Does a task of a thread of the runner."""
        ...

    def begin(self, task: Task) -> None:
        """Makes later work on the current stream wait for the tasks before this one."""
        ...

    def end(self, task: Task) -> None:
        """Notes that all work of a task is on the current stream by now."""
        ...

    def keep(self, batch: int, thing: object) -> None:
        """Keeps what belongs to a batch until no stream uses it."""
        ...

    def meet(self) -> None:
        """Makes later work on every stream wait for all work so far."""
        ...

    def forget(self) -> None:
        """Drops what is kept, when all have met."""
        ...


class HostStreams:
    """A CPU, or a device that does everything in turn, on its current stream: what is done is done.

    In turn, every task has its time between two marks of that one stream, also those that the host does: where the
    device is busy meanwhile they take none of a step, and where it waits for them all of theirs.

    Args:
        schedule: of the tasks.
        recorder: takes when each was done.
        clock: of the processor time of a task: its thread's or, where all is done in turn, that of the whole process,
            in which other threads read files and send messages for it.
    """

    def __init__(self, schedule: Schedule, recorder: Recorder, clock: Callable[[], float] = time.thread_time) -> None:
        self._schedule, self._recorder, self._clock = schedule, recorder, clock

    def run(self, action: Action, task: Task) -> None:
        """Does a task."""
        resource = self._schedule.stage(task.stage).resource
        start, cpu_s = self._recorder.now(), self._clock()
        action(task)
        self._recorder.note(task, resource, start, self._recorder.now(), self._clock() - cpu_s)

    def begin(self, task: Task) -> None:
        """No-op: the runner waited."""

    def end(self, task: Task) -> None:
        """No-op: the task is done."""

    def keep(self, batch: int, thing: object) -> None:
        """No-op: no stream uses it."""

    def meet(self) -> None:
        """No-op: the runner waited."""

    def forget(self) -> None:
        """No-op: nothing is kept."""


class DeviceStreams:
    """A device. See [Note: streams].

    Args:
        schedule: of the tasks.
        device: where; on the CPU, where kernels are interpreted, all is done at once, and by the same code.
        recorder: takes when tasks were done, where `is_traced`.
        streams: makes streams; tests have others.
    """

    def __init__(
        self,
        schedule: Schedule,
        device: torch.device,
        recorder: Recorder,
        *,
        is_traced: bool = False,
        streams: type[Stream] = Stream,
    ) -> None:
        self._schedule, self._device, self._make = schedule, device, streams
        self._recorder, self._is_traced = recorder, is_traced
        # Communication goes first, since others wait for it: a message that is gathered late is late on all ranks.
        self._streams = {
            resource: streams.new(device, is_urgent=resource == "communication")
            for resource in schedule.resources
            if resource != COMPUTE
        }
        self._marks: dict[Task, Mark] = {}  # the event of every task that another one may still wait for
        self._kept: dict[int, list[object]] = {}  # by batch, what other streams may still use
        self._lock = threading.Lock()  # of both

    def run(self, action: Action, task: Task) -> None:
        """Does a task on the stream of its resource, which is the current one meanwhile, with its device."""
        resource = self._schedule.stage(task.stage).resource
        stream = self._streams[resource]
        stream.wait_for(self._before(task))
        if task.stage == "route":  # its stream waits for the update of the batch that is dropped
            self._drop(task.batch - self._schedule.depth - REUSED_AFTER)
        work = partial(action, task)
        self._done(task, self._timed(stream, resource, work, task) if self._is_traced else _asked(stream, work))

    def _timed(self, stream: Stream, resource: str, work: Callable[[], None], task: Task) -> Mark:
        """Launches a task, and notes when it is done; returns the mark at its end."""
        if host := _OF_HOST.get(task.stage):
            start_s, end = time.perf_counter(), _asked(stream, work)
            self._recorder.add(Span(task, host, start_s, time.perf_counter()))
            return end
        start = stream.mark(has_time=True)
        stream.run(work)
        end = stream.mark(has_time=True)
        self._recorder.note(task, resource, start, end)
        return end

    def begin(self, task: Task) -> None:
        """Has the current stream wait for what a task comes after."""
        self._make.current(self._device).wait_for(self._before(task))

    def end(self, task: Task) -> None:
        """Records the event that others wait for."""
        self._done(task, self._make.current(self._device).mark())

    def _before(self, task: Task) -> list[Mark]:
        with self._lock:
            return [self._marks[each] for each in self._schedule.before(task) if each in self._marks]

    def _done(self, task: Task, mark: Mark) -> None:
        with self._lock:
            self._marks[task] = mark
            if task.stage == "update":  # what is still to come waits for nothing that is older, not even if it lags
                oldest = task.batch - self._schedule.depth - REUSED_AFTER
                self._marks = {each: mark for each, mark in self._marks.items() if each.batch >= oldest}

    def keep(self, batch: int, thing: object) -> None:
        """Keeps what belongs to a batch."""
        with self._lock:
            self._kept.setdefault(batch, []).append(thing)

    def _drop(self, batch: int) -> None:
        with self._lock:
            self._kept.pop(batch, None)

    def meet(self) -> None:
        """Makes the current stream wait for all others, and them for it.

        After this, memory of any stream may be dropped and used again.
        """
        current = self._make.current(self._device)
        current.wait_for([stream.mark() for stream in self._streams.values()])
        mark = current.mark()
        for stream in self._streams.values():
            stream.wait_for([mark])

    def forget(self) -> None:
        """Drops what is kept."""
        with self._lock:
            self._marks.clear()
            self._kept.clear()


def _asked(stream: Stream, work: Callable[[], None]) -> Mark:
    """Launches work; returns the mark at its end."""
    stream.run(work)
    return stream.mark()
