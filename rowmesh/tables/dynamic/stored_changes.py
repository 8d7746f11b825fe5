"""StoredChanges: which records were put into a store, and which left it, since a moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_EVENTS = 1 << 16
"""Changes that are kept, at least, before the changes of each id are joined."""


class Touched(NamedTuple):
    """The changes of a store since a moment.

    Attributes:
        put: by shard, the ids whose records are new there: in the order of their demotion where there is a limit, else
            ascending.
        gone: by shard, the ids whose records were there then, and are not any more; ascending.
        num_stored: int64 `[S]`, how many records each shard has now.
    """

    put: list[np.ndarray]
    gone: list[np.ndarray]
    num_stored: np.ndarray


class StoredChanges:
    """Notes what changes in a store, ten bytes a change, until it is closed; changes of one id are made one in time.

    Args:
        listeners: whom the store tells; this is one of them from now on.

    Example:
        >>> changes = StoredChanges([])
        >>> changes.note(np.array([4, 7]), is_there=True, was_there=False)
        >>> changes.note(np.array([4, 5]), is_there=False, was_there=True)
        >>> changes.put.tolist(), changes.gone.tolist()
        ([7], [5])
    """

    def __init__(self, listeners: list[StoredChanges]) -> None:
        self._listeners = listeners
        listeners.append(self)
        self._events: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_events, self._room = 0, MIN_EVENTS

    def note(self, ids: np.ndarray, *, is_there: bool, was_there: bool | np.ndarray) -> None:
        """Some records changed.

        Args:
            ids: int64 `[N]`, distinct.
            is_there: whether they are in the store now.
            was_there: whether they were before.
        """
        if not len(ids):
            return
        self._events.append((ids, np.full(len(ids), is_there), np.full(len(ids), was_there)))
        self._num_events += len(ids)
        if self._num_events > self._room:
            self._events = [self._joined()]
            self._num_events = len(self._events[0][0])
            self._room = max(MIN_EVENTS, 2 * self._num_events)

    def _joined(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Joins the changes of each id into one, in the order of the last ones."""
        none = np.empty(0, np.int64), np.empty(0, bool), np.empty(0, bool)
        ids, is_there, was_there = map(np.concatenate, zip(none, *self._events, strict=True))
        distinct, first = np.unique(ids, return_index=True)
        last = len(ids) - 1 - np.unique(ids[::-1], return_index=True)[1]
        order = np.argsort(last)
        return distinct[order], is_there[last[order]], was_there[first[order]]

    @property
    def put(self) -> np.ndarray:
        """The ids whose records were put, or written anew, and are there: int64 `[N]`, the last one last."""
        ids, is_there, _ = self._joined()
        return ids[is_there]

    @property
    def gone(self) -> np.ndarray:
        """The ids whose records were there at the beginning, and are not any more: int64 `[N]`."""
        ids, is_there, was_there = self._joined()
        return ids[was_there & ~is_there]

    def close(self) -> None:
        """Nothing is noted any more; may be called again."""
        if self in self._listeners:
            self._listeners.remove(self)


def by_shard(ids: np.ndarray, shards: np.ndarray, num_shards: int) -> list[np.ndarray]:
    """The ids of each shard, in their order.

    Args:
        ids: int64 `[N]`.
        shards: int64 `[N]`, of which each is, from 0 on.
        num_shards: how many there are.
    """
    order = np.argsort(shards, kind="stable")
    bounds: Sequence[int] = np.bincount(shards, minlength=num_shards).cumsum()[:-1].tolist()
    return np.split(ids[order], bounds)
