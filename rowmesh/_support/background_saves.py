"""Background saves: writers of rows beside training. The next that writes or sets rows waits for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

_NAME = "_written_beside_training"
"""The name of an attribute of the collection: a writer refers to it, and a table of both would never let go of them."""


class _Awaited(Protocol):
    def wait(self) -> object:
        """Waits until it has ended, well or not, and says so then: an interrupt does not."""
        ...


def wait_for_background_saves(collections: Iterable[Any]) -> None:
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


def begin_background_save(collections: Iterable[Any], saving: _Awaited) -> None:
    """Says that these are being written: whoever is next waits for it."""
    for each in collections:
        vars(each)[_NAME] = saving


def end_background_save(collections: Iterable[Any], saving: _Awaited) -> None:
    """Says that it writes these no more."""
    for each in collections:
        if vars(each).get(_NAME) is saving:
            del vars(each)[_NAME]
