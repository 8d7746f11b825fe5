"""Lookout: watches the other ranks while a call waits for them that nothing else ends."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from rowmesh.errors import PeerError
from rowmesh.mesh.joining import CERTAIN_S
from rowmesh.mesh.patience import LOOK_S, Stopwatch
from rowmesh.mesh.processes import State

if TYPE_CHECKING:
    from rowmesh.mesh.mesh import Mesh

logger = logging.getLogger("rowmesh")

_ANSWER_S = 1.0


class Lookout:
    """Looks ten times a second, see `patiently`: a rank that is gone, or stopped for the mesh's timeout, ends the call.

    Ranks of other hosts cannot be seen, and one that is alive may do something long: where the timeout is over, a
    warning says who is waited for.

    Args:
        mesh: the ranks.
        doing: what they do, for the message.

    Attributes:
        watch: how long this rank has waited.
    """

    def __init__(self, mesh: Mesh, doing: str) -> None:
        self._mesh, self._doing, self.watch = mesh, doing, Stopwatch(LOOK_S)
        self._looks: Counter[State] = Counter()
        self._answers = self._has_warned = False

    def __call__(self) -> None:
        """Looks.

        Raises:
            PeerError: a rank is gone or stopped; names it.
        """
        mesh, waited_s = self._mesh, self.watch.read()
        if dead := self._seen("gone", CERTAIN_S):
            mesh.abandon_collective()
            raise mesh.died(dead, self._doing)
        if stopped := self._seen("stopped", mesh.timeout_s):
            mesh.abandon_collective()
            raise PeerError(f"rank {mesh.run.rank}: {mesh.not_come(stopped, self.watch)} while {self._doing}")
        if not self._answers and waited_s >= min(_ANSWER_S, mesh.timeout_s):
            self._answers = True
            mesh.roll_call.answer()
        if not self._has_warned and waited_s >= mesh.timeout_s:
            self._has_warned = True
            if absent := mesh.roll_call.absent():
                text = "rank %d has waited %s while %s, for %s, and goes on"
                logger.warning(text, mesh.run.rank, self.watch, self._doing, mesh.describe(absent))

    def close(self) -> None:
        """The call has returned."""
        if self._answers:
            self._mesh.roll_call.withdraw()

    def _seen(self, state: State, for_s: float) -> list[int]:
        """Ranks in a state, where there have been some for so long."""
        ranks = self._mesh.ranks_seen(state)
        self._looks[state] = self._looks[state] + 1 if ranks else 0
        return ranks if self._looks[state] * LOOK_S >= for_s else []
