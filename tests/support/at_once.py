"""Calls that must not wait: for a writer of a pipe, say."""

from __future__ import annotations

import threading
from collections.abc import Callable

LONG_S = 30.0
"""Much more than any of these calls takes on a busy machine."""


def at_once(call: Callable[[], object]) -> object:
    """What a call returns or raises; fails where it does neither."""
    results: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert not thread.is_alive(), "it waits"
    if errors:
        raise errors[0]
    return results[0]
