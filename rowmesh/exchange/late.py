"""Late: numbers of a device that the host reads later, without holding up what comes meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor


class Late:
    """A copy of a small tensor that is on its way to the host.

    Args:
        tensor: on a device.

    Example:
        >>> Late(torch.tensor([3, 4])).read()
        [3, 4]
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            self._host = tensor.clone()
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)  # else the copy would wait
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))  # all that was asked for before, no more

    def read(self) -> list[int]:
        """The numbers; waits until they are here."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
