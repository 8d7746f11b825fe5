"""Requests: what one rank asks all of them for, agreed on with the gradients of a step, so that all act after the same.

A clock and a signal reach ranks at different moments. A rank that has something to ask raises a flag, which the next
all-reduce of gradients sums: no message more, and every rank knows of it after the same step.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor

from rowmesh.errors import Terminated
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects
from rowmesh.ops.transfer import Late
from rowmesh.run.checkpoint_config import CheckpointConfig

NUM_FLAGS = 3
LAG = 8
"""Steps after which the flags of a device are read, which by then are on the host without waiting for them."""


class Requests:
    """Requests for a checkpoint, for the end of the run, and for a version to be published.

    Args:
        config: how often checkpoints are asked for.
        mesh: the ranks.
        publish_every_s: how often versions are asked for; 0: never.

    Attributes:
        checkpoint: whether all ranks know that one is asked for.
        end: whether all ranks know that the run is to end.
        version: whether all ranks know that one is to be published.
        signal: which one this rank got; 0: none.
        is_urgent: whether this rank asks for a checkpoint now, whatever the clock says.
        finds_lost_ranks: whether the steps go on until they find that a rank is lost, though a signal came before.
    """

    def __init__(self, config: CheckpointConfig, mesh: Mesh, publish_every_s: float = 0.0) -> None:
        self._config, self._mesh, self._publish_every_s = config, mesh, publish_every_s
        self._under_way: deque[Late] = deque()
        self._last_s = self._published_s = time.monotonic()
        self._is_over = self._is_leaving = False
        self.checkpoint = self.end = self.version = self.finds_lost_ranks = False
        self.signal = 0
        self.is_urgent = False

    def put(self, flags: Tensor) -> None:
        """Raises the flags of this rank, `[3]`, which are 0, before they are summed with its gradients."""
        if self.signal:
            flags[1] = 1.0
        if self._is_time(60.0 * self._config.every_minutes, self._last_s) or self.is_urgent:
            flags[0] = 1.0
        if self._is_time(self._publish_every_s, self._published_s):
            flags[2] = 1.0

    def _is_time(self, every_s: float, last_s: float) -> bool:
        return every_s > 0 and self._mesh.rank == 0 and time.monotonic() - last_s >= every_s

    def take(self, flags: Tensor) -> None:
        """Reads the flags of all ranks, once they are summed."""
        if not (self._config.is_on or self._publish_every_s):
            return
        self._under_way.append(Late(flags))
        while len(self._under_way) > (0 if flags.device.type == "cpu" else LAG):
            checkpoint, end, version = self._under_way.popleft().read()
            self.checkpoint |= checkpoint > 0
            self.end |= end > 0
            self.version |= version > 0

    def agree(self) -> bool:
        """Whether any rank got a signal by now. Collective; for the end of the loop, after which no flag is summed."""
        if self._config.is_on:
            self.end = any(gather_objects(self._mesh, bool(self.signal), "ending the training"))
        return self.end

    def done(self) -> None:
        """A checkpoint was written, or could not be: the next is asked for when its time has come."""
        self.checkpoint, self._last_s = False, time.monotonic()
        self._under_way.clear()

    def published(self) -> None:
        """A version was published, or could not be: the next is asked for when its time has come."""
        self.version, self._published_s = False, time.monotonic()
        self._under_way.clear()

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """For the time of a block SIGTERM and SIGUSR1 ask for an end, which must come within `checkpoint.grace_s`.

        When that time is over, or at once where another rank has died (unless the steps are to find that), Terminated
        is raised where the program is. A
        second signal asks for nothing more: schedulers and launchers send it to processes and their children alike.
        """
        if not self._config.is_on or threading.current_thread() is not threading.main_thread():
            yield
            return
        timers: list[threading.Timer] = []

        def heed(number: int, frame: FrameType | None) -> None:
            is_first, self.signal = not self.signal, self.signal or number
            if self._is_leaving:
                return
            if self._is_over or (self._mesh.dead_ranks() and not self.finds_lost_ranks):
                self._is_leaving = True
                raise Terminated(self.signal)
            if is_first:
                timers.append(timer := threading.Timer(self._config.grace_s, self._end_now, [number]))
                timer.daemon = True
                timer.start()

        before = {number: signal.signal(number, heed) for number in _signals()}
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)

    def ignore_signals(self) -> None:
        """From here on a signal interrupts nothing: the run is ending."""
        self._is_leaving = True

    def _end_now(self, number: int) -> None:
        self._is_over = True
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:
            signal.raise_signal(number)


def _signals() -> list[Any]:
    """Signals by which schedulers announce the end of a job; Windows has no SIGUSR1."""
    return [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
