"""Worker: a thread that says by itself when it has ended."""

from __future__ import annotations

import threading
from typing import Any


class Worker(threading.Thread):
    """A thread whose end is known also where waiting for it was interrupted.

    Where Ctrl-C interrupts `join`, CPython 3.11 marks the thread as stopped although it runs: `is_alive`, the next
    `join` and the end of the program take it for done while it still writes. So this one sets an event at its end, for
    which `join` waits.

    Example:
        >>> worker = Worker(target=lambda: None)
        >>> worker.start()
        >>> worker.join()
        >>> worker.has_ended
        True
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._end = threading.Event()

    @property
    def has_ended(self) -> bool:
        """Whether it has done all that it does, well or not."""
        return self._end.is_set()

    def run(self) -> None:
        """Runs the target."""
        try:
            super().run()
        finally:
            self._end.set()

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended, so many seconds at most; where that is interrupted it may be called again.

        Raises:
            RuntimeError: it was not started, or it would wait for itself.
        """
        if self.ident is None:
            raise RuntimeError(f"{self.name} was not started")
        if self is threading.current_thread():
            raise RuntimeError(f"{self.name} cannot wait for its own end")
        if self._end.wait(timeout):
            super().join()  # a moment: it does nothing any more
