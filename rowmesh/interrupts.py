"""Interrupts: Ctrl-C waits until an act that has begun ends, so that a program that catches it can go on.

Python raises KeyboardInterrupt between any two bytecodes of the main thread: amid a step, whose rows it would leave
half updated, or between taking a lock and noting that it is taken. While an act is held, the handler of SIGINT notes
that the signal came, and the one of before is called when the act ends.

A second Ctrl-C, a second or more after the first, interrupts at once: the act may be waiting for a rank that does not
come.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from signal import SIGINT, getsignal
from threading import get_ident
from types import FrameType
from typing import Any

_IMPATIENT_S = 1.0

# The functions themselves: what Python puts around them makes enums, and takes 6 µs where they take .6.
_set: Callable[[int, Any], Any] = getattr(signal.signal, "__wrapped__", signal.signal)
_get: Callable[[int], Any] = getattr(getsignal, "__wrapped__", getsignal)


class _State:
    """Of the main thread, which alone runs handlers of signals."""

    def __init__(self) -> None:
        self.thread = threading.main_thread().ident
        self.depth = 0  # acts, one within another
        self.before: Callable[[int, FrameType | None], Any] | None = None  # the handler that the program has
        self.noted_s: float | None = None  # when Ctrl-C came


_state = _State()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_state.__init__)


def hold() -> None:
    """Begins an act. `release` must follow, whatever happens; acts may be nested."""
    state = _state
    if get_ident() != state.thread:
        return
    if state.depth:
        state.depth += 1
    elif callable(before := _get(SIGINT)):  # else the system, or what is no Python, handles it
        state.before, state.noted_s = before, None
        _set(SIGINT, _note)
        state.depth = 1


def release() -> None:
    """Ends an act; calls the handler of before if Ctrl-C came meanwhile, which may raise KeyboardInterrupt."""
    state = _state
    if get_ident() != state.thread or not state.depth:
        return
    if state.depth > 1:
        state.depth -= 1
        return
    before = state.before
    state.depth = 0
    if _get(SIGINT) is _note:  # else what ran meanwhile has set another
        _set(SIGINT, before)
    if state.noted_s is not None and before is not None:
        state.noted_s = None
        before(SIGINT, None)


def _note(number: int, frame: FrameType | None) -> None:
    state, now_s = _state, time.monotonic()
    if state.noted_s is None:
        state.noted_s = now_s
    elif now_s - state.noted_s >= _IMPATIENT_S and state.before is not None:
        state.before(number, frame)
