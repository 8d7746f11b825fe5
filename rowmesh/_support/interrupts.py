"""Interrupts: Ctrl-C waits until an act that has begun ends, so that a program that catches it can go on.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: amid a step, whose rows it would leave
half updated, or between taking a lock and noting that it is taken. While an act is held, the handler of SIGINT notes
that the signal came, and the one of before is called when the act ends.

A second Ctrl-C, a second or more after the first, interrupts at once: the act may be waiting for a rank that does not
come.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable
from signal import SIGINT
from threading import get_ident
from types import FrameType
from typing import Any

_IMPATIENT_S = 1.0

# The functions that module signal wraps: its wrappers make enums, and take 6 µs where these take .2.
_signal: Any = importlib.import_module("_signal")
_set: Callable[[int, Any], Any] = _signal.signal
_get: Callable[[int], Any] = _signal.getsignal


class _Acts:
    """Acts of the main thread, which alone runs handlers of signals."""

    def __init__(self) -> None:
        self._thread = threading.main_thread().ident
        self._depth = 0  # acts, one within another
        self._before: Callable[[int, FrameType | None], Any] | None = None  # the handler that the program has
        self._noted_s: float | None = None  # when Ctrl-C came

    def hold(self) -> None:
        """Begins an act. `release` must follow, whatever happens; acts may be nested."""
        if get_ident() != self._thread:
            return
        if self._depth:
            self._depth += 1
        elif callable(before := _get(SIGINT)):  # else the system, or what is no Python, handles it
            self._before, self._noted_s = before, None
            _set(SIGINT, self._note)
            self._depth = 1

    def release(self) -> None:
        """Ends an act; calls the handler of before if Ctrl-C came meanwhile, which may raise KeyboardInterrupt."""
        if get_ident() != self._thread or not self._depth:
            return
        if self._depth > 1:
            self._depth -= 1
            return
        before = self._before
        self._depth = 0
        if _get(SIGINT) == self._note:  # else what ran meanwhile has set another
            _set(SIGINT, before)
        if self._noted_s is not None and before is not None:
            self._noted_s = None
            before(SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._noted_s is None:
            self._noted_s = now_s
        elif now_s - self._noted_s >= _IMPATIENT_S and self._before is not None:
            self._before(number, frame)


_acts = _Acts()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_acts.__init__)

hold, release = _acts.hold, _acts.release
