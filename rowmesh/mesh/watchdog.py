"""Watchdog: looks after the other ranks while a call waits for them that nothing else ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rowmesh.errors import PeerError
from rowmesh.mesh.joining import CERTAIN_S
from rowmesh.mesh.patience import LOOK_S, Stopwatch
from rowmesh.mesh.processes import State
from rowmesh.mesh.roll_call import RollCall

if TYPE_CHECKING:
    from rowmesh.mesh.mesh import Mesh

logger = logging.getLogger("rowmesh")

_ANSWER_S = 1.0


class Watchdog:
    """Ends the waiting where a rank of this host is gone, or is stopped for the mesh's timeout.

    Ranks of other hosts cannot be seen, and one that is alive may do something long: where the timeout is over, a
    warning says who is waited for. `patiently` calls it ten times a second.

    Args:
        mesh: the ranks.
        doing: what they do, for the message.

    Attributes:
        watch: how long this rank has waited.
        calls: which ranks wait for the same; those of a group of its own do not answer for other threads.
    """

    def __init__(self, mesh: Mesh, doing: str) -> None:
        self._mesh, self._doing, self.watch = mesh, doing, Stopwatch(LOOK_S)
        self.calls = RollCall(mesh.rank, mesh.world_size, mesh.group)
        self._since_s: dict[tuple[State, int], float] = {}
        self._answers = self._has_warned = False

    def __call__(self) -> None:
        """Looks at the processes once.

        Raises:
            PeerError: a rank is gone or stopped; names it.
        """
        mesh, waited_s = self._mesh, self.watch.read()
        if dead := self._seen("gone", CERTAIN_S):
            mesh.abandon_collective()
            raise mesh.died(dead, self._doing)
        if stopped := self._seen("stopped", mesh.timeout_s):
            mesh.abandon_collective()
            raise PeerError(
                f"rank {mesh.run.rank}: waited in vain for {mesh.describe(stopped)} while {self._doing} (the timeout "
                f"is {mesh.timeout_s:.0f} s, this rank waited {self.watch})"
            )
        if not self._answers and waited_s >= min(_ANSWER_S, mesh.timeout_s / 4):
            self._answers = True
            self.calls.answer()
        # Where one is stopped, it may be the one that holds the store, and would not say who is missing.
        if waited_s >= mesh.timeout_s and not self._has_warned and not self._since_s:
            absent = [mesh.name(rank) for rank in self.calls.absent() or []]
            self._has_warned = bool(absent)
            if absent:
                text = "rank %d has waited %s while %s, for %s, and goes on"
                logger.warning(text, mesh.run.rank, self.watch, self._doing, mesh.describe(absent))

    def close(self) -> None:
        """The call is over, and nobody asks any more why."""
        if self._answers:
            self.calls.withdraw()

    def _seen(self, state: State, for_s: float) -> list[int]:
        """Ranks that have been in a state for so long."""
        now_s, ranks = self.watch.waited_s, self._mesh.ranks_seen(state)
        before = self._since_s
        self._since_s = {key: since_s for key, since_s in before.items() if key[0] != state}
        self._since_s |= {(state, rank): before.get((state, rank), now_s) for rank in ranks}
        return [rank for rank in ranks if now_s - self._since_s[state, rank] >= for_s]
