"""Gate: look-ups of several threads at the same time, updates alone.

A look-up between two updates finds the rows that the first one left, also where other ranks read them: an update waits
for the look-ups of its rank, and no rank updates before all have come to it. Ctrl-C waits until a thread is out again
(`rowmesh._support.interrupts`): what it does inside is done whole, and the gate is not left taken.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

from rowmesh._support.faults import reach
from rowmesh._support.interrupts import hold, release


class Gate:
    """A lock for rows: look-ups may overlap, changes are alone. A thread must not enter it twice.

    While the main thread is inside, Ctrl-C is held.

    Args:
        is_shared: whether look-ups may overlap; else they take turns.

    Attributes:
        reading: to be held while rows are looked up; waits for threads that write or wait to write.
        writing: to be held while rows change; waits for all threads inside. Later look-ups wait.

    Example:
        >>> gate = Gate()
        >>> with gate.reading:
        ...     pass
    """

    def __init__(self, *, is_shared: bool = True) -> None:
        self.is_shared = is_shared
        self.max_reading = sys.maxsize if is_shared else 1
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)  # whose own methods take longer than the lock's
        self.num_reading = self.num_waiting = 0  # the second: threads that wait to write
        self.is_written = False
        self.reading, self.writing = _Reading(self), _Writing(self)

    def __reduce__(self) -> Any:
        """A copy is a new gate, with no thread inside."""
        return partial(Gate, is_shared=self.is_shared), ()


class _Reading:
    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        gate = self._gate
        hold()
        try:
            with gate.lock:
                while gate.is_written or gate.num_waiting or gate.num_reading >= gate.max_reading:
                    reach("gate.wait_to_read")
                    gate.changed.wait()
                gate.num_reading += 1
        except BaseException:
            release()
            raise

    def __exit__(self, *error: object) -> None:
        gate = self._gate
        with gate.lock:
            gate.num_reading -= 1
            if gate.num_waiting or not gate.is_shared:
                gate.changed.notify_all()
        release()


class _Writing:
    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        gate = self._gate
        hold()
        try:
            with gate.lock:
                gate.num_waiting += 1
                try:
                    while gate.is_written or gate.num_reading:
                        reach("gate.wait_to_write")
                        gate.changed.wait()
                    gate.is_written = True
                finally:
                    gate.num_waiting -= 1
                    if not gate.is_written:  # interrupted
                        gate.changed.notify_all()
        except BaseException:
            release()
            raise

    def __exit__(self, *error: object) -> None:
        gate = self._gate
        with gate.lock:
            gate.is_written = False
            gate.changed.notify_all()
        release()
