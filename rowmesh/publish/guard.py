"""guarded: a target whose every failure is an error of rowmesh's that names it."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from rowmesh._support.files.advice import described
from rowmesh.errors import RowmeshError, StoreError

T = TypeVar("T")


def guarded(thing: T, name: str) -> T:
    """The same, but for errors: what it raises becomes a StoreError, unless it is one of rowmesh's.

    A target is code of others, or asks code of others: whatever goes wrong there is a version that was not published,
    or not read, and no end of the program.

    Args:
        thing: a target, or a part or rows of one.
        name: of the target.
    """
    guard: Any = _Guarded(thing, name)
    return guard


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
        except RowmeshError:
            raise
        except OSError as error:
            raise StoreError(f"{self._name} failed: {described(error)}") from error
        except Exception as error:  # whatever a package raises
            raise StoreError(f"{self._name} failed: {type(error).__name__}: {error}") from error
        return guarded(result, self._name) if gives_more else result
