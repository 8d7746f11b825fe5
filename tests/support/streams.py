"""Streams that are late: what is asked of them is done at random times, in any order that marks allow."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from rowmesh.tables.streams import Mark, Stream


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

    def mark(self):
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
