"""Parts of a buffer in the host's memory, one for each member of a channel, and their messages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rowmesh.mesh.channel import Channel, Message, MessageCounters


def bounds_of(sizes: np.ndarray) -> np.ndarray:
    """Where each part begins, int64, and where the last one ends.

    >>> bounds_of(np.array([3, 0, 4])).tolist()
    [0, 3, 3, 7]
    """
    return np.concatenate([[0], np.cumsum(sizes)])


class Parts:
    """A buffer cut into one part a member."""

    __slots__ = ("_begin", "_bounds", "_bytes", "_item")

    def __init__(self, buffer: np.ndarray, begin: int, bounds: Sequence[int], item_bytes: int) -> None:
        self._bytes, self._begin, self._bounds, self._item = buffer, begin, bounds, item_bytes

    @property
    def tensor(self) -> Tensor:
        """uint8 `[n, item_bytes]`: all parts."""
        first, count = self._bounds[0], self._bounds[-1] - self._bounds[0]
        if count == 0:
            return torch.empty(0, self._item, dtype=torch.uint8, device="cpu")
        begin = self._begin + self._item * first
        whole = torch.frombuffer(self._bytes, dtype=torch.uint8, offset=begin, count=count * self._item)
        return whole.view(count, self._item)

    @property
    def sizes(self) -> list[int]:
        """Items of each member."""
        bounds = self._bounds
        return [bounds[k + 1] - bounds[k] for k in range(len(bounds) - 1)]


def post_parts(channel: Channel, out: Parts, into: Parts, counters: MessageCounters, doing: str) -> Message:
    """One all-to-all, of which this rank's own part need not arrive."""
    return channel.post(out.tensor, out.sizes, into.sizes, counters, doing, into.tensor, copies_own=False)
