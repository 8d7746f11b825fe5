"""Failures: how ranks learn that a step of some tables ended half way on one of them.

Ranks have agreed on the step, and others may have updated their rows: nothing is undone. The rank that failed writes so
into the store through which the ranks of the run met; a rank that has waited for another for a second, whatever for,
looks there. From then on all that uses these tables raises, on every rank.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from rowmesh.errors import PeerError
from rowmesh.mesh.liveness import ask_store

_PREFIX = "rowmesh/failed"


class Failures:
    """The marks of a run on this rank, of tables that are in use here and not known to be half updated."""

    def __init__(self) -> None:
        self._marks: weakref.WeakSet[FailureMark] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add(self, mark: FailureMark) -> None:
        """Has waits of this run look at a mark."""
        with self._lock:
            self._marks.add(mark)

    def discard(self, mark: FailureMark) -> None:
        """Ends that."""
        with self._lock:
            self._marks.discard(mark)

    def find(self) -> str:
        """Which rank failed in which step of any of these tables; empty where none did."""
        with self._lock:
            marks = list(self._marks)
        return next((text for mark in marks if (text := mark.look())), "")


class FailureMark:
    """Whether a step of some tables ended half way on a rank.

    Args:
        failures: of the run.
        name: of the tables, the same on all ranks; None where there are no others.

    Attributes:
        text: which rank failed in which step, and of what; empty as long as this rank knows of none.

    Example:
        >>> mark = FailureMark(Failures(), None)
        >>> mark.check()
        >>> mark.set("rank 0 failed in step 5")
        >>> mark.check()
        Traceback (most recent call last):
        ...
        rowmesh.errors.PeerError: rank 0 failed in step 5; rows of ranks differ since, so these tables cannot be used...
    """

    def __init__(self, failures: Failures, name: str | None) -> None:
        self.text, self._failures = "", failures
        self._key = None if name is None else f"{_PREFIX}/{name}"
        failures.add(self)

    def set(self, text: str) -> None:
        """Says that this rank failed, or has learned that another did; the first text is kept."""
        key, found = self._key, self._read()
        if key is not None and not found:
            ask_store(lambda store: store.set(key, text))
        self.text = found or text
        self._failures.discard(self)

    def look(self) -> str:
        """Looks into the store, which takes a message."""
        if not self.text and (found := self._read()):
            self.text = found
            self._failures.discard(self)
        return self.text

    def _read(self) -> str:
        if (key := self._key) is None:
            return ""
        return ask_store(lambda store: store.get(key).decode() if store.check([key]) else "") or ""

    def check(self, error: Callable[[str], Exception] = PeerError) -> None:
        """Raises PeerError where this rank knows that a step ended half way."""
        if self.text:
            raise error(
                f"{self.text}; rows of ranks differ since, so these tables cannot be used any more; make their "
                "EmbeddingCollection anew and load a checkpoint"
            )

    def forgive(self) -> None:
        """Lets the tables be used here again: what this rank has of them is known to be of one step."""
        self.text = ""

    def close(self) -> None:
        """The tables are not in use any more."""
        self._failures.discard(self)
