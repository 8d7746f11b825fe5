"""Synchronizer: what a shard group asks of whatever keeps its replicas together; without replicas it does nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rowmesh.exchange.handshake import Step
from rowmesh.tables.update_rules import Update


class Synchronizer:
    """Keeps replicas together where there are none; `ReplicaSync` and `DynamicMeans` are those that work.

    Attributes:
        is_half_done: whether `finish` failed when rows had changed, or had been asked of other ranks.
    """

    is_half_done = False

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers."""
        return 0

    def begin(self, updates: Sequence[Update], step: Step) -> bool:
        """After gradients were pushed within this rank's replica; messages travel until `finish`.

        Returns:
            Whether a synchronization was due.

        Raises:
            PeerError: a rank does something else, or none answers.
        """
        return False

    def start(self) -> None:
        """As `begin` where a synchronization is due, between two steps; for rows that are averaged."""

    def finish(self) -> None:
        """Waits for the messages of other replicas, and updates.

        Where it fails before a row has changed, for want of memory say, it may be called again.
        """

    def forget(self) -> None:
        """Takes the rows of this rank as equal to those of the other replicas."""

    def begin_after(self, steps: int) -> None:
        """Says after how many steps the rows are, with nothing under way."""

    def rows_after(self, steps: int) -> bool:
        """Whether the rows here are those after so many steps, of replicas that are exact, wherever this is asked.

        Gradients of a later step may be under way: rows change when those of all replicas have come.
        """
        return False
