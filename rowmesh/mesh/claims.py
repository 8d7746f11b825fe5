"""Claims: uses of a mesh that one owner has at a time, such as its pipeline's process groups."""

from __future__ import annotations

import threading


class Claims:
    """Who may send through the groups of a use.

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
        """Takes a use, if nobody has it or who has it is about to release it; waits so long for that."""
        with self._changed:
            self._changed.wait_for(lambda: use not in self._ending, wait_s)
            if use in self._taken:
                return False
            self._taken.add(use)
            return True

    def end(self, use: str) -> None:
        """Says that the owner only waits for threads of its own, and will then release the use."""
        with self._changed:
            self._ending |= {use} & self._taken

    def release(self, use: str) -> None:
        """Lets somebody else take it."""
        with self._changed:
            self._taken.discard(use)
            self._ending.discard(use)
            self._changed.notify_all()
