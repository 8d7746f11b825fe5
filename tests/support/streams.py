"""Streams that are late: what is asked of them is done at random times, in any order that marks allow."""

from __future__ import annotations

import threading
from collections import deque
from unittest import mock

import numpy as np
import torch

from rowmesh.exchange.window import Window
from rowmesh.ops.merge_update import DeviceMerged
from rowmesh.ops.streams import Mark, Stream
from rowmesh.pipeline.runner import Runner
from rowmesh.pipeline.streams import DeviceStreams


class LateMark(Mark):
    """Passes when its stream comes to it."""

    def __init__(self, machine):
        super().__init__()
        self._machine, self.is_done = machine, False

    @property
    def has_passed(self):
        return self.is_done

    def wait(self):
        self._machine.run_until(self)


class LateStream(Stream):
    """A queue of work, of marks, and of marks to wait for."""

    def __init__(self, machine):
        super().__init__(None)
        self._machine, self.queue = machine, deque()

    @property
    def is_able(self):
        return bool(self.queue) and (self.queue[0][0] != "wait" or self.queue[0][1].is_done)

    def mark(self, *, has_time=False):
        mark = LateMark(self._machine)
        self._machine.ask(self, "mark", mark)
        return mark

    def wait_for(self, marks):
        for mark in marks:
            self._machine.ask(self, "wait", mark)

    def run(self, work):
        self._machine.ask(self, "work", work)


class Machine:
    """A device whose streams advance at random; a stand-in for the class `Stream`, of which it makes some.

    Args:
        seed: of the order.
        eagerness: how much is done whenever something is asked, on average; 0: nothing before somebody waits.
    """

    def __init__(self, seed, eagerness):
        self._random, self._eagerness = np.random.default_rng(seed), eagerness
        self._lock = threading.RLock()
        self._streams = []
        self.stuck = None  # a stream that does nothing
        self.device = torch.device("cpu")
        self.compute = self.new(None)

    def new(self, device):
        self._streams.append(LateStream(self))
        return self._streams[-1]

    def current(self, device):
        return self.compute

    def ask(self, stream, kind, what):
        with self._lock:
            stream.queue.append((kind, what))
            self.run_some(self._random.poisson(self._eagerness), must=False)

    def finish(self):
        """Does all that was asked."""
        with self._lock:
            while any(stream.queue for stream in self._streams):
                self.run_some(1)

    def run_until(self, mark):
        """Does things until a mark has passed."""
        with self._lock:
            while not mark.is_done:
                self.run_some(1)

    def run_some(self, count, must=True):
        """Does so many things, each the first of a stream that need not wait."""
        with self._lock:
            for _ in range(count):
                able = [stream for stream in self._streams if stream is not self.stuck and stream.is_able]
                if not able:
                    assert not must, "streams wait for each other"
                    return
                kind, what = able[self._random.integers(len(able))].queue.popleft()
                if kind == "work":
                    what()
                elif kind == "mark":
                    what.is_done = True


class _Inline(Stream):
    """Work that is done when it is asked for, by a host that waits for what it comes after."""

    def __init__(self, machine, waits=True):
        super().__init__(None)
        self._machine, self._waits = machine, waits

    def mark(self, *, has_time=False):
        mark = LateMark(self._machine)
        mark.is_done = True
        return mark

    def wait_for(self, marks):
        for mark in marks if self._waits else ():
            mark.wait()


class _Pipelined:
    """Streams of a pipeline, of which that which communicates is late."""

    def __init__(self, seed, waits):
        self._machine, self._waits = Machine(seed, float(seed % 3)), waits

    def new(self, device, *, is_urgent=False):
        return self._machine.new(device) if is_urgent else _Inline(self._machine)

    def current(self, device):
        return _Inline(self._machine, self._waits)


class LateDeviceStreams(DeviceStreams):
    """Streams of a pipeline that are late, and spoil what is dropped, as its memory might be used again.

    Attributes:
        num_late: windows and items that were spoilt.
    """

    def __init__(self, schedule, device, recorder, seed, waits):
        super().__init__(schedule, device, recorder, streams=_Pipelined(seed, waits))

    @classmethod
    def with_seed(cls, seed, *, waits=True):
        """A stand-in for the class; `waits`: whether the stream that computes waits for rows."""
        make = lambda *args, is_traced: cls(*args, seed, waits)  # noqa: E731
        made = mock.Mock(side_effect=make, num_late=0)
        cls.made = made
        return made

    def _drop(self, batch):
        for thing in self._kept.get(batch, ()):
            self.made.num_late += 1
            if isinstance(thing, Window):
                spoil(thing)
            else:
                thing.labels.fill_(float("nan"))
        super()._drop(batch)


def spoil(window):
    """Writes over what a window has on the device."""
    for group in window.groups:
        arena = getattr(group.group.exchange.arena, "rows", None)  # cores are no rows
        memory = group.memory
        tensors = [memory.slots, memory._gradients, *([] if memory.source is arena else [memory.source])]
        for part, filed in zip(group.parts, memory.filed, strict=True):
            is_merged = isinstance(filed, DeviceMerged)
            if is_merged:
                tensors += [filed.order, filed.slots, filed.starts, filed.ranks, filed.num, filed.factors]
            else:
                tensors += [filed.cells, filed.pointers, filed.factors]
            tensors.append(part.look_up.recover)
        if memory._left is not None:
            tensors.append(memory._left._grad)
        for tensor in filter(lambda each: each is not None, tensors):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


def drive_all(schedule, run, compute, num_batches):
    """Does the tasks of a schedule in one thread: `compute` those of a turn's driver, `run` each of the others."""
    runner = Runner(schedule, dict.fromkeys((stage.name for stage in schedule.stages), run), threads=False)
    for turn in range(-schedule.depth, num_batches):
        runner.enter(turn)
        if turn >= 0:
            compute(runner, turn)
    runner.wait_for_all()
    runner.close()


class Real:
    """What a machine is, of the streams that there are: those of a GPU, or, on a CPU, everything at once."""

    new, current = Stream.new, Stream.current

    def __init__(self, device):
        self.device, self.compute = device, Stream.current(device)

    def finish(self):
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
