"""Cancellation: whether threads that wait for other ranks should stop."""

from __future__ import annotations

from threading import Event


class Cancellation:
    """Checked by a mesh and its parts while they wait.

    Attributes:
        event: set when all waits should end; None where waits cannot be cancelled.

    Example:
        >>> cancellation = Cancellation()
        >>> cancellation.watch(cancelled := Event())
        >>> cancelled.set()
        >>> cancellation.is_set
        True
    """

    def __init__(self) -> None:
        self.event: Event | None = None

    def watch(self, event: Event | None) -> None:
        """Has waits end when an event is set; None: from now on they cannot be cancelled."""
        self.event = event

    @property
    def is_set(self) -> bool:
        """Whether to stop waiting."""
        event = self.event
        return event is not None and event.is_set()
