"""Ctrl-C while something waits."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def interrupted(after_s: float = 0.2) -> Iterator[None]:
    """Ctrl-C comes to the block, which waits."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(after_s, lambda: signal.pthread_kill(main, signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.cancel()  # where the block did not wait: Ctrl-C would end the tests
        timer.join()
