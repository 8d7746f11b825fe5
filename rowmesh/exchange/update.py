"""Update: the optimizer's numbers of one step, and who applies them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from rowmesh.ops.merge_update import Merger, Singles


class Update(NamedTuple):
    """The optimizer's numbers for one group and step.

    Attributes:
        lr: the learning rate.
        scaling: what summed gradients are multiplied by first.
        step: its number, from 1.
    """

    lr: float
    scaling: float
    step: int


class Updater(Protocol):
    """What happens to merged rows, where it is not simply their update."""

    def apply(self, merged: Merger | Singles, update: Update, part: tuple[int, int] | None = None) -> None:
        """Takes the merged rows `part` (first and one past the last), or all."""
        ...
