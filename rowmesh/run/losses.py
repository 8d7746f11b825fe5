"""Losses of a run: summed, and looked at to stop where training diverged."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from rowmesh.ops.transfer import Late
from rowmesh.run.checks import check_loss

LAG = 8


class Losses:
    """The losses of a run's steps on this rank.

    On a CPU every loss is looked at as soon as it is there. A device is not waited for: its losses come to the host
    beside what it computes next, and are looked at LAG losses later, by which time they are there, and the device has
    enough to do should the host wait nevertheless. Updates made in between with gradients of a loss that is not finite
    are lost with the run: `rest` finds the loss before anything is written.

    Args:
        device: where losses are computed.
        lag: how many losses may be unknown; by default none on a CPU.
    """

    def __init__(self, device: torch.device, lag: int | None = None) -> None:
        self._lag = (0 if device.type == "cpu" else LAG) if lag is None else lag
        self._under_way: deque[tuple[Late, str]] = deque()

    def add(self, loss: Tensor, where: str) -> float:
        """Takes a loss before its backward.

        Args:
            loss: a sum over samples.
            where: step and rank, for the message.

        Returns:
            The sum of the losses that the host got to know by this: on a CPU this one.

        Raises:
            DivergedError: one of them is not finite; names its step.
        """
        self._under_way.append((Late(loss.detach()), where))
        return self._known(self._lag)

    def rest(self) -> float:
        """The sum of the losses that the host does not know yet; waits for the device.

        Raises:
            DivergedError: one of them is not finite; names its step.
        """
        return self._known(0)

    def _known(self, lag: int) -> float:
        total = 0.0
        while len(self._under_way) > lag:
            late, where = self._under_way.popleft()
            total += check_loss(late.read(), where)
        return total
