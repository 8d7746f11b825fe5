"""Update: the optimizer's numbers of one step, and who applies them."""

from __future__ import annotations

from typing import Protocol

from rowmesh.ops.merge_update import Merger, Singles


class Update:
    """The optimizer's numbers for one group and step."""

    __slots__ = ("lr", "scaling", "step")

    def __init__(self, lr: float, scaling: float, step: int) -> None:
        self.lr = lr
        self.scaling = scaling
        self.step = step


class Updater(Protocol):
    """What happens to merged rows, where it is not simply their update."""

    def apply(self, merged: Merger | Singles, update: Update, part: tuple[int, int] | None = None) -> None:
        """Takes the merged rows `part` (first and one past the last), or all."""
        ...
