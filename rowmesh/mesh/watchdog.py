"""Watchdog: looks after the other ranks while a call waits for them that nothing else ends."""

from __future__ import annotations

import logging
from threading import Event

from rowmesh.errors import PeerError
from rowmesh.mesh.interruptible import LOOK_S, Stopwatch
from rowmesh.mesh.joining import CERTAIN_S
from rowmesh.mesh.liveness import LivenessCheck
from rowmesh.mesh.processes import RankProcesses, State

logger = logging.getLogger("rowmesh")

_ANSWER_S = 1.0


class Watchdog:
    """Ends the waiting where a rank of this host is gone, or is stopped for the timeout.

    Ranks of other hosts cannot be seen, and one that is alive may do something long: where the timeout is over, a
    warning says who is waited for. `run_interruptibly` calls it ten times a second.

    Args:
        processes: of all ranks of the run.
        calls: which ranks wait for the same; those of a group of its own do not answer for other threads.
        doing: what they do, for the message.
        timeout_s: how long a stopped rank is waited for, in seconds.
        lost: set when the waiting is ended: the collective is abandoned.

    Attributes:
        watch: how long this rank has waited.
        calls: as given.
    """

    def __init__(
        self,
        processes: RankProcesses,
        calls: LivenessCheck,
        doing: str,
        *,
        timeout_s: float,
        lost: Event,
    ) -> None:
        self._processes, self.calls, self._doing, self.watch = processes, calls, doing, Stopwatch(LOOK_S)
        self._timeout_s, self._lost = timeout_s, lost
        self._since_s: dict[tuple[State, int], float] = {}
        self._answers = self._has_warned = False

    def __call__(self) -> None:
        """Looks at the processes once.

        Raises:
            PeerError: a rank is gone or stopped; names it.
        """
        processes, waited_s = self._processes, self.watch.read()
        if dead := self._seen("gone", CERTAIN_S):
            self._lost.set()
            raise processes.died(dead, self._doing)
        if stopped := self._seen("stopped", self._timeout_s):
            self._lost.set()
            raise PeerError(
                f"rank {processes.rank}: waited in vain for {processes.describe(stopped)} while {self._doing} (the "
                f"timeout is {self._timeout_s:.0f} s, this rank waited {self.watch})"
            )
        if not self._answers and waited_s >= min(_ANSWER_S, self._timeout_s / 4):
            self._answers = True
            self.calls.answer()
        # Where one is stopped, it may be the one that holds the store, and would not say who is missing.
        if waited_s >= self._timeout_s and not self._has_warned and not self._since_s:
            self._has_warned = bool(absent := self.calls.absent())
            if absent:
                text = "rank %d has waited %s while %s, for %s, and goes on"
                logger.warning(text, processes.rank, self.watch, self._doing, processes.describe(absent))

    def close(self) -> None:
        """The call is over, and nobody asks any more why."""
        if self._answers:
            self.calls.withdraw()

    def _seen(self, state: State, for_s: float) -> list[int]:
        """Ranks that have been in a state for so long."""
        now_s, ranks = self.watch.waited_s, self._processes.seen(state)
        before = self._since_s
        self._since_s = {key: since_s for key, since_s in before.items() if key[0] != state}
        self._since_s |= {(state, rank): before.get((state, rank), now_s) for rank in ranks}
        return [rank for rank in ranks if now_s - self._since_s[state, rank] >= for_s]
