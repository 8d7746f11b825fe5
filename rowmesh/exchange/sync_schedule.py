"""Sync schedule: after which steps the replicas of tables are synchronized, and what their ranks compare then."""

from __future__ import annotations

from collections.abc import Sequence

from rowmesh.exchange.handshake import Step, check_operations
from rowmesh.mesh import Mesh


class SyncSchedule:
    """When the ranks of a replicate group synchronize: every so many steps, and when the program calls for it.

    Each time is an operation with a number, the same on all ranks: above 0 a step, below a call.

    Args:
        mesh: the ranks.
        every: steps between two synchronizations.
    """

    def __init__(self, mesh: Mesh, every: int) -> None:
        self._mesh, self._every, self._num_calls = mesh, every, 0
        self._digest = 0  # of the steps since the last synchronization, which other replicas have not seen

    def is_due(self, step: int) -> bool:
        """Whether replicas are synchronized after a step."""
        return step % self._every == 0

    def after(self, step: Step) -> Step | None:
        """The step, where a synchronization is due after it, with the digest of all since the last one; else None."""
        step, is_due = step.after(self._digest), self.is_due(step.number)
        self._digest = 0 if is_due else step.digest
        return step if is_due else None

    def call(self) -> int:
        """The operation of a synchronization that the program calls for, between two steps."""
        self._num_calls += 1
        return -self._num_calls

    def check(self, received: Sequence[int], operation: int, step: Step | None) -> None:
        """Raises on all ranks where one does something else than this one; arguments as for `check_operations`.

        Raises:
            PeerError: a rank does.
            ConfigurationError: ranks had different learning rates since they compared them last.
        """
        rule = "every rank must call forward, step and synchronize equally often and in the same order"
        check_operations(self._mesh, received, operation, step, _describe, rule)


def _describe(operation: int) -> str:
    return f"is in step {operation}" if operation > 0 else f"is in synchronize {-operation}"
