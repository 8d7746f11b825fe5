"""guarded: a target whose every failure is an error of rowmesh's that names it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from rowmesh._support.files.advice import described
from rowmesh.errors import PeerError, RowmeshError, StoreError
from rowmesh.publish.target import Target

logger = logging.getLogger("rowmesh")
T = TypeVar("T")


def guarded(thing: T, name: str) -> T:
    """The same, but for errors: what it raises becomes a StoreError, unless it is one of rowmesh's that targets raise.

    A target is code of others, or asks code of others: whatever goes wrong there is a version that was not published,
    or not read, and no end of the program; nor is it a rank that died.

    Args:
        thing: a target, or a part or rows of one.
        name: of the target.
    """
    guard: Any = _Guarded(thing, name)
    return guard


@contextmanager
def closing_target(target: Target) -> Iterator[Target]:
    """Closes a target at the end. A connection that breaks by then takes nothing back, and is a line of the log."""
    try:
        yield target
    finally:
        try:
            target.close()
        except Exception as error:  # whatever a package raises
            logger.warning("%s could not be closed: %s", target.name, reason(error))


def reason(error: Exception) -> str:
    """The text of an error, after the name of its class unless that is OSError or one of rowmesh's; never empty.

    >>> reason(KeyError("user")), reason(StoreError("Redis is away")), reason(OSError(28, "No space left on device"))
    ("KeyError: 'user'", 'Redis is away', 'No space left on device; make room or choose another place')
    """
    name = type(error).__name__
    try:
        text = described(error) if isinstance(error, OSError) else str(error)
    except Exception:  # str() fails on some classes
        return name
    if not text:
        return name
    return text if isinstance(error, OSError | RowmeshError) else f"{name}: {text}"


class _Guarded:
    def __init__(self, thing: Any, name: str) -> None:
        self._thing, self._name = thing, name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._thing, attribute)
        if not callable(value):
            return value
        return partial(self._call, value, attribute in ("part", "open_rows"))

    def _call(self, method: Any, gives_more: bool, *arguments: Any) -> Any:
        try:
            result = method(*arguments)
        except Exception as error:  # whatever a package raises
            if isinstance(error, RowmeshError) and not isinstance(error, PeerError):
                raise
            raise StoreError(f"{self._name} failed: {reason(error)}") from error
        return guarded(result, self._name) if gives_more else result
