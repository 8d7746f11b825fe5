"""Interruptible: waiting that signals can interrupt, and that does not count what this process could not use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

T = TypeVar("T")

LOOK_S = 0.1
_SLACK_S = 10.0


class Stopwatch:
    """Seconds of waiting.

    Where this process is stopped and continued (Ctrl-Z, a debugger, a virtual machine that moves), its peers mostly
    are as well: the time in between is no sign that they are gone.

    Attributes:
        waited_s: seconds in which this process ran.
        stood_still_s: seconds in which it did not.

    Args:
        look_s: `read` is called at least so often; what takes longer by ten seconds is taken as standing still.
        began_s: when the waiting began, by `time.monotonic`; None is now.
    """

    def __init__(self, look_s: float, began_s: float | None = None) -> None:
        self.waited_s = self.stood_still_s = 0.0
        self._look_s = look_s
        self._last = time.monotonic() if began_s is None else began_s

    def read(self) -> float:
        """Seconds waited so far."""
        now = time.monotonic()
        passed, self._last = now - self._last, now
        counted = passed if passed <= self._look_s + _SLACK_S else self._look_s
        self.waited_s += counted
        self.stood_still_s += passed - counted
        return self.waited_s

    def __str__(self) -> str:
        """How long, for a message.

        >>> str(Stopwatch(1.0))
        '0.0 s'
        """
        stood = f", and stood still (stopped or asleep) for {self.stood_still_s:.0f} s" if self.stood_still_s else ""
        return f"{self.waited_s:.1f} s{stood}"


def run_interruptibly(call: Callable[[], T], look: Callable[[], None] = lambda: None) -> T:
    """Returns or raises as `call()`, which runs in a thread, so that this one still answers signals while it blocks.

    Args:
        call: blocks in code that is not Python, as process groups do while they connect.
        look: called ten times a second; what it raises ends the waiting. The thread is then left to itself.

    Example:
        >>> run_interruptibly(lambda: 3)
        3
    """
    outcome: Future[T] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    done = threading.Event()

    def run() -> None:
        try:
            if device is not None:  # which every thread chooses for itself
                torch.cuda.set_device(device)
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="rowmesh connecting", daemon=True).start()
    except RuntimeError:  # the system has none left; to wait is what must be done
        return call()
    while not done.wait(LOOK_S):
        look()
    return outcome.result()
