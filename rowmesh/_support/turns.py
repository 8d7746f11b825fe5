"""Turns: what writes the rows of a collection beside training. The next that writes or sets rows waits for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

_NAME = "_written_beside_training"
"""Of an attribute of the collection: what writes refers to it, and a table of both would never let go of them."""


class _Awaited(Protocol):
    def wait(self) -> object:
        """Waits until it has ended, well or not, and ends its turn then: an interrupt does not."""
        ...


def wait_for_those_before(collections: Iterable[Any]) -> None:
    """Waits until nothing of these is being written beside training. Collective.

    Raises:
        CheckpointError: it could not be. That is said once: by this, or by who waited before.
        PeerError: a step of one of them ended half way, on any rank.
    """
    collections = [*collections]
    for each in collections:
        each.engine.check_whole()
    for each in collections:
        if (before := vars(each).get(_NAME)) is not None:
            before.wait()


def take_turn(collections: Iterable[Any], saving: _Awaited) -> None:
    """Says that these are being written: whoever is next waits for it."""
    for each in collections:
        vars(each)[_NAME] = saving


def end_turn(collections: Iterable[Any], saving: _Awaited) -> None:
    """Says that it writes these no more."""
    for each in collections:
        if vars(each).get(_NAME) is saving:
            del vars(each)[_NAME]
