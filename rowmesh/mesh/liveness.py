"""Liveness: which ranks wait for the others. A collective that failed says only that it failed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

_answers: Counter[str] = Counter()  # by key: threads of this process that wait
_counting = threading.Lock()
_copies: list[tuple[Any, Any]] = []  # of the store in use, and of which one it is a copy


class LivenessCheck:
    """Answers of the ranks of a process group, in the store through which they met.

    A rank waits as long as any of its threads does.

    Args:
        rank: this one, by its number in the run.
        ranks: those of the group, by theirs.
        group: None where there is one rank.
        doing: what they answer that they do.
    """

    def __init__(self, rank: int, ranks: Iterable[int], group: Any, doing: str = "waiting") -> None:
        self._group = group
        name = getattr(group, "group_name", "")
        self._keys = {each: f"rowmesh/{doing}/{name}/{each}" for each in ranks}
        self._own_key = self._keys[rank]

    def answer(self) -> None:
        """Says that a thread of this rank waits."""
        with _counting:
            _answers[self._own_key] += 1
            if _answers[self._own_key] == 1:
                self._ask(lambda store: store.set(self._own_key, ""))

    def withdraw(self) -> None:
        """Takes that back; another thread may still wait."""
        with _counting:
            if _answers[self._own_key] > 0:
                _answers[self._own_key] -= 1
                if _answers[self._own_key] == 0:
                    self._ask(lambda store: store.delete_key(self._own_key))

    @property
    def is_here(self) -> bool:
        """Whether a thread of this rank has answered."""
        return _answers[self._own_key] > 0

    def absent(self) -> list[int] | None:
        """Ranks that have not answered; None where the store cannot be reached (the process that holds it is gone)."""
        return self._ask(lambda store: [rank for rank, key in self._keys.items() if not store.check([key])])

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        return None if self._group is None else ask_store(question)


def ask_store(question: Callable[[Any], Any]) -> Any:
    """The answer of the store through which ranks met; None where it cannot be reached."""
    try:
        return question(_copy_of(_get_default_store()))
    except (RuntimeError, ValueError):
        return None


def keep_store() -> None:
    """Connects to the store while it is there: to one whose process is gone, connecting takes the whole timeout."""
    _copy_of(_get_default_store())


def forget_store() -> None:
    """Lets go of the store, for the time when the process group ends."""
    _copies.clear()


def _copy_of(store: Any) -> Any:
    """A copy for this module alone: while a process group connects, it has the store for itself."""
    if not _copies or _copies[0][0] is not store:
        _copies[:] = [(store, store.clone())]
    return _copies[0][1]
