"""Turns: what writes the rows of a collection beside training. The next that writes or sets rows waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary


class _Awaited(Protocol):
    def wait(self) -> object: ...


_under_way: WeakKeyDictionary[object, _Awaited] = WeakKeyDictionary()


def wait_for_those_before(collections: Iterable[object]) -> None:
    """Waits until nothing of these is being written beside training. Collective.

    Raises:
        CheckpointError: it could not be.
    """
    for before in filter(None, [_under_way.pop(each, None) for each in collections]):
        before.wait()


def take_turn(collections: Iterable[object], saving: _Awaited) -> None:
    """Says that these are being written: whoever is next waits for it."""
    _under_way.update(dict.fromkeys(collections, saving))


def end_turn(collections: Iterable[object]) -> None:
    """Says that these are being written no more."""
    for each in collections:
        _under_way.pop(each, None)
