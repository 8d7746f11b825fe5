"""Early stopping: which evaluation was the best, and whether it is long enough ago."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

LEAST_GAIN = 1e-5
"""Nats by which a loss must be lower to be better, or a share of itself: sums in other orders differ by less."""


@dataclass
class EarlyStopping:
    """Follows the losses of evaluations.

    A function of losses that are equal on all ranks, so that all decide alike.

    Attributes:
        patience: evaluations in a row that may bring nothing better; 0: any number.
        is_relative: whether a loss must be lower by a share of itself: one that is not in nats, of any scale.
        losses: of every evaluation, by step.
        best_step: after which the loss was least; 0 before the first evaluation.

    Example:
        >>> stopping = EarlyStopping(patience=2)
        >>> [stopping.add(step, loss) for step, loss in enumerate([0.6, 0.5, 0.51, 0.5], 1)]
        [True, True, False, False]
        >>> stopping.best_step, stopping.is_over
        (2, True)
    """

    patience: int
    is_relative: bool = False
    losses: dict[int, float] = field(default_factory=dict)
    best_step: int = 0

    def add(self, step: int, loss: float) -> bool:
        """Takes the loss after a step; returns whether none was better."""
        least = LEAST_GAIN * (loss if self.is_relative else 1.0)
        is_better = loss < self.best_loss - least
        self.losses[step] = loss
        if is_better:
            self.best_step = step
        return is_better

    @property
    def best_loss(self) -> float:
        """The least so far; infinite before the first."""
        return self.losses.get(self.best_step, math.inf)

    @property
    def since_best(self) -> int:
        """Evaluations since the best."""
        return sum(step > self.best_step for step in self.losses)

    @property
    def is_over(self) -> bool:
        """Whether training is to stop."""
        return 0 < self.patience <= self.since_best

    def state_dict(self) -> dict[str, Any]:
        """The state with which a run that continues decides as if it had not been interrupted."""
        return {"losses": dict(self.losses), "best_step": self.best_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken; patience is that of this run."""
        self.losses, self.best_step = dict(state["losses"]), int(state["best_step"])
