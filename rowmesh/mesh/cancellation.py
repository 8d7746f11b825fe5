"""Cancellation: whether threads that wait for other ranks should give up."""

from __future__ import annotations

from threading import Event


class Cancellation:
    """What a mesh and its parts look at while they wait.

    Attributes:
        event: set when nobody should wait any more; None where nobody may give up.

    Example:
        >>> cancellation = Cancellation()
        >>> cancellation.event = Event()
        >>> cancellation.event.set()
        >>> cancellation.is_set
        True
    """

    def __init__(self) -> None:
        self.event: Event | None = None

    @property
    def is_set(self) -> bool:
        """Whether to give up."""
        event = self.event
        return event is not None and event.is_set()
