"""Progress: how long-running functions say how far they are."""

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0 to 1."""


def silent(what: str, share: float) -> None:
    """Says nothing."""
