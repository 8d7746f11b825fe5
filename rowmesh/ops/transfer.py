"""Transfers between host and device during which neither waits for the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a tensor of the host on a device; the tensor itself where that is where it is.

    Memory that is not pinned is copied to pinned memory first: otherwise the host would wait for all earlier work of
    the device. Torch's allocator reuses pinned memory only after copies from it are done, so the caller need not keep
    it.

    >>> upload(torch.tensor([3, 4]), torch.device("cpu")).tolist()
    [3, 4]
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


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
        # Pinned, or the copy would wait.
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))  # all that was asked for before, no more

    def read(self) -> Any:
        """The numbers, in lists as the tensor has dimensions; waits until they are here."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()
