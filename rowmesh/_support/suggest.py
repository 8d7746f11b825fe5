"""Suggestions in error messages: the known name that a wrong one comes nearest to."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The most similar of the known names, if any is similar; case does not count.

    Args:
        name: an unknown name.
        known: what it may have meant; of names that differ in case alone, the first.
        cutoff: how similar it must be, from 0 to 1.

    >>> nearest("clik", ["click", "hour"])
    'click'
    """
    lowered = {candidate.lower(): candidate for candidate in reversed(list(known))}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def hint(name: str, known: Iterable[str]) -> str:
    """The end of an error message: asks whether the nearest name was meant; empty where none is near.

    >>> hint("clik", ["click", "hour"])
    "; did you mean 'click'?"
    """
    match = nearest(name, known)
    return f"; did you mean {match!r}?" if match else ""
