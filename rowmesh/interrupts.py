"""Interrupts: Ctrl-C that waits until what must not be done by halves is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C within is heeded when the block has ended, however it ends.

    Python interrupts the main thread alone; in others, and where a program ignores Ctrl-C, this does nothing.

    >>> with interrupts_held():
    ...     pass
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(*came[0])
