"""Ends: where a pipeline's data end, and which step no rank takes; the same on all ranks.

*Ahead.* What fails while a batch is read, routed or prefetched ends the data there: the loop gets the batches before,
and the error in the place of the batch. Other ranks learn of it before the batch's first row travels (`RankState`), and
end there too, as they do where a rank has no further batch.

*A step* is a request. Before its update ranks tell each other whether they take it, and at which learning rates
(`Answer`); where one does not, none does. So the rows of all ranks are those after the same steps. The same words go
before the gradients are measured, for clipping or a GradScaler, and where a step is left out.

*A loop that is left* on one of several ranks owes the others messages whose sizes are known. It sends them without
having computed the batch, in this turn or, where the batch of this turn has had its step, in the next one, and says so
in the place of a step. All ranks then know where they stopped. They have entered the same turns, the one after the
refused batch too: there rows wait for its update in vain, and a batch that is opened before rows says that it is none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import IntEnum
from struct import pack, unpack

import numpy as np

from rowmesh.errors import PeerError, RefusedError, RowmeshError
from rowmesh.exchange.agreement import Agreement
from rowmesh.exchange.handshake import Step, check_rates, joined, parted
from rowmesh.exchange.window import RankState
from rowmesh.mesh import Mesh
from rowmesh.mesh.plain import error_from_plain


class Answer(IntEnum):
    """Whether a rank takes the step of a batch."""

    TAKES = 0
    """It does."""
    FORGETS = 1
    """It does, and has forgotten its gradients."""
    LEFT = 2
    """Its loop was left amid the batch."""
    LEFT_BEFORE = 3
    """Its loop was left before it was given the batch."""
    MEASURES = 4
    """It has called for the norm of the gradients, and takes no step yet."""
    SKIPS = 5
    """It leaves the step out."""


_DIFFERS = {
    Answer.FORGETS: "called zero_grad() before the step",
    Answer.MEASURES: "called for the norm of the gradients (clip_grad_norm_, or a GradScaler)",
    Answer.SKIPS: "left out the step",
}
"""What a rank did that all do or none."""


class Ends:
    """Where one run over a loader ends. Threads of a pipeline read and write it.

    What this rank meets ahead is written by the threads that meet it, what all ranks know by the thread that exchanged
    it, and the driver reads both after the tasks that wrote them.

    Args:
        mesh: the ranks.
        statuses: has them compare which batch they have.
        answers: has them compare which step they take; its messages are sent by another thread.
        is_divided: whether what ranks learn in the first message of a batch is known in their replica group alone.

    Attributes:
        here: the first batch that does not exist on this rank, once it is known.
        over: the first batch that exists for no rank, once those know that compared it; see `is_known`.
        refused: the batch whose step no rank has taken.
        num_decided: batches that stand in dynamic tables, once all ranks know.
        has_left: the loop was left, and nothing more is read.
    """

    def __init__(self, mesh: Mesh, statuses: Agreement, answers: Agreement, *, is_divided: bool) -> None:
        self._mesh, self._statuses, self._answers, self.is_divided = mesh, statuses, answers, is_divided
        self.is_alone, self._lock = mesh.world_size == 1, threading.Lock()
        self.begin(0)

    def begin(self, first: int) -> None:
        """A run begins, whose first window has this number."""
        self._first = first
        self.here: int | None = None
        self.over: int | None = None
        self.refused: int | None = None
        self.num_decided: int | None = None
        self.has_left = False
        self._is_known = False  # whether all ranks know where it is over
        self._errors: dict[int, RowmeshError] = {}  # by batch, what ends the data there on this rank
        self._why: RowmeshError | None = None  # what another rank has ended them by

    # Ahead

    def end_here(self, number: int, error: RowmeshError | None = None, *, everywhere: bool = False) -> None:
        """There is no such batch on this rank, and no later one.

        Args:
            number: of the batch.
            error: what ended the data; None: there are no more.
            everywhere: whether all ranks know, or those of the replica group.
        """
        with self._lock:  # a batch may fail while a later one is read
            if error is not None:
                self._errors.setdefault(number, error)
            self.here = number if self.here is None else min(self.here, number)
        if everywhere or self.is_alone:
            self._end(number)

    def error(self, number: int) -> RowmeshError | None:
        """Why this rank has no such batch, where something failed or its loop was left; None else."""
        if self.has_left and number not in self._errors:
            return RowmeshError(f"its loop was left before batch {number}")
        return self._errors.get(number)

    def refuse(self, number: int, refused: RefusedError) -> None:
        """Ranks that decide together about a batch know that some of them have none, or none that can be routed."""
        if self.is_divided:
            self._end(number, PeerError(f"{refused} (batch {number} of the pipeline)"))
            return
        statuses = [
            RankState.ENDED
            if rank in refused.without
            else RankState.FAILED
            if rank in refused.refused
            else self._first + number
            for rank in range(self._mesh.world_size)
        ]
        self.compare(number, statuses, None if refused.first is None else error_from_plain(refused.first))

    def is_over(self, number: int) -> bool:
        """Whether this rank, and all that it compares batches with, know that there is no such batch."""
        return self.over is not None and number >= self.over

    def is_known(self, number: int) -> bool:
        """Whether all ranks know."""
        return self._is_known and self.is_over(number)

    def status(self, number: int, *, has_batch: bool) -> int:
        """The number of a window of this rank, or why it has none."""
        if number in self._errors:
            return RankState.FAILED
        if has_batch:
            return self._first + number
        return RankState.LEFT if self.has_left else RankState.ENDED

    def ask(self, number: int, status: int) -> bool:
        """Whether all ranks have a batch; where not, it is the end. Collective and blocking: 8 bytes a rank."""
        has_all = self.compare(number, self._statuses(status)[:, 0].tolist())
        self._is_known = self._is_known or not has_all
        return has_all

    def compare(self, number: int, statuses: Sequence[int], first: BaseException | None = None) -> bool:
        """The same, given the statuses of all ranks, and what the first that failed has met, where that is known."""
        here = self._first + number
        if all(each == here for each in statuses):
            return True
        why = None
        if failed := self._name(statuses, RankState.FAILED):
            why = f"{failed} could not read batch {number} or make it ready; {first or 'its own error says why'}"
        elif left := self._name(statuses, RankState.LEFT):
            why = f"the loop of {left} was left before batch {number}"
        elif any(each != RankState.ENDED for each in statuses):
            ended, has = self._name(statuses, RankState.ENDED), self._name(statuses, here)
            why = (
                f"ranks are out of step: {ended or 'another rank'} has no batch {number} and {has or 'another'} has; "
                "every rank must bring equally many batches to its pipeline"
            )
        self._end(number, None if why is None else PeerError(f"rank {self._mesh.name(self._mesh.rank)}: {why}"))
        return False

    def _end(self, number: int, why: RowmeshError | None = None) -> None:
        if not self.is_over(number):
            self.over, self._why, self._is_known = number, why, not self.is_divided
            self._decide(number)

    def _decide(self, count: int) -> None:
        """Notes that no more batches stand: a step may be refused before the end that a later batch has met."""
        self.num_decided = count if self.num_decided is None else min(count, self.num_decided)

    def check(self) -> None:
        """Raises what ended the data, where they did not simply end on all ranks alike."""
        error = None if self.over is None else self._errors.get(self.over, self._why)
        if error is not None:
            raise error

    def _name(self, values: Sequence[int], *wanted: int) -> str:
        """The ranks that have one of these values; "" where none has."""
        names = [str(self._mesh.name(rank)) for rank, value in enumerate(values) if value in wanted]
        return f"rank{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""

    # A step

    def agree(self, number: int, answer: Answer, step: Step) -> None:
        """Makes sure that all ranks do the same with a batch. Collective and blocking: 16 bytes a rank.

        Args:
            number: of the batch.
            answer: of this rank.
            step: number and learning rates; none where it is not taken, or not yet.

        Raises:
            PeerError, ConfigurationError: on all ranks alike, where one does not take it, or at other learning rates.
        """
        if self.is_alone:
            return
        words = self._answers(joined(self._first + number, step), answer)
        answers = words[:, 1].tolist()
        try:
            self._check_answers(number, answers, step.number - 1)
            check_rates(self._answers.mesh, parted(words[:, 0].tolist())[1], step)
        except RowmeshError:
            self.refused = number
            self._decide(number + (Answer.LEFT_BEFORE not in answers))
            raise

    def exchange_squares(self, squares: float) -> list[float]:
        """What each rank has measured, once all agree that they measure. Collective and blocking: 16 bytes a rank."""
        if self.is_alone:
            return [squares]
        (bits,) = unpack("<q", pack("<d", squares))
        return self._answers(bits, Answer.MEASURES)[:, 0].copy().view(np.float64).tolist()

    def _check_answers(self, number: int, answers: Sequence[int], last_step: int) -> None:
        me, last = f"rank {self._mesh.name(self._mesh.rank)}", f"the last step of all ranks is {last_step}"
        if left := self._name(answers, Answer.LEFT, Answer.LEFT_BEFORE):
            where = "amid" if Answer.LEFT in answers else "before"
            raise PeerError(
                f"{me}: {left} left its loop {where} batch {number}, whose step no rank has taken; its own error says "
                f"why; {last}"
            )
        if len(set(answers)) > 1:
            kind = next(kind for kind in _DIFFERS if kind in answers)
            raise PeerError(
                f"{me}: {self._name(answers, kind)} {_DIFFERS[kind]} of batch {number} and other ranks did not; do so "
                f"on all ranks or on none; no rank has taken the step, and {last}"
            )
