"""Gate: look-ups of several threads at the same time, updates alone.

Whoever looks up between two updates finds the rows that the first one left, also where other ranks read them: an update
waits for the look-ups of its rank, and no rank updates before all have come to it.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

from rowmesh.faults import reach


class Gate:
    """Who may read rows, and who may change them. Not for a thread that is inside already.

    Args:
        is_shared: whether look-ups may overlap; else they take turns.

    Attributes:
        reading: to be held while rows are looked up.
        writing: to be held while rows change. Look-ups that come later wait.

    Example:
        >>> gate = Gate()
        >>> with gate.reading:
        ...     pass
    """

    def __init__(self, *, is_shared: bool = True) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # whose own methods take longer than the lock's
        self._is_shared = is_shared
        self._most = sys.maxsize if is_shared else 1
        self._num_reading = self._num_waiting = 0  # the second: who wants to write
        self._is_written = False
        self.reading, self.writing = _Reading(self), _Writing(self)

    def __reduce__(self) -> Any:
        """Of a copy, which is another one's."""
        return partial(Gate, is_shared=self._is_shared), ()

    def begin_reading(self) -> None:
        """Waits for those who write, or want to."""
        with self._lock:
            while self._is_written or self._num_waiting or self._num_reading >= self._most:
                reach("gate.wait_to_read")
                self._changed.wait()
            self._num_reading += 1

    def end_reading(self) -> None:
        """Lets others go on."""
        with self._lock:
            self._num_reading -= 1
            if self._num_waiting or not self._is_shared:
                self._changed.notify_all()

    def begin_writing(self) -> None:
        """Waits for all who are inside."""
        with self._lock:
            self._num_waiting += 1
            try:
                while self._is_written or self._num_reading:
                    reach("gate.wait_to_write")
                    self._changed.wait()
                self._is_written = True
            finally:
                self._num_waiting -= 1
                if not self._is_written:  # interrupted
                    self._changed.notify_all()

    def end_writing(self) -> None:
        """Lets others go on."""
        with self._lock:
            self._is_written = False
            self._changed.notify_all()


class _Reading:
    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._gate.begin_reading()

    def __exit__(self, *error: object) -> None:
        self._gate.end_reading()


class _Writing(_Reading):
    __slots__ = ()

    def __enter__(self) -> None:
        self._gate.begin_writing()

    def __exit__(self, *error: object) -> None:
        self._gate.end_writing()
