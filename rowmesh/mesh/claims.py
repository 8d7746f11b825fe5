"""Claims: uses of a mesh that one owner has at a time, such as its pipeline's process groups."""

from __future__ import annotations

import threading


class Claims:
    """Which uses have an owner, which alone may send through their process groups.

    Example:
        >>> claims = Claims()
        >>> claims.take("pipeline", wait_s=0.0), claims.take("pipeline", wait_s=0.0)
        (True, False)
        >>> claims.release("pipeline")
        >>> claims.take("pipeline", wait_s=0.0)
        True
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._taken: set[str] = set()
        self._ending: set[str] = set()

    def take(self, use: str, wait_s: float) -> bool:
        """Takes a use; False where it has an owner that does not release it within `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: use not in self._ending, wait_s)
            if use in self._taken:
                return False
            self._taken.add(use)
            return True

    def end(self, use: str) -> None:
        """Announces that the owner releases the use as soon as its threads have ended."""
        with self._changed:
            self._ending |= {use} & self._taken

    def release(self, use: str) -> None:
        """Releases a use, so that another owner can take it."""
        with self._changed:
            self._taken.discard(use)
            self._ending.discard(use)
            self._changed.notify_all()
