"""SequenceBatch: the events of some users back to back, and what is to be predicted after each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.data.events.balance import balance


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    """Packed sequences for one step on one rank; B users, N events.

    Attributes:
        users: int64 `[B]`, their numbers.
        offsets: int64 `[B + 1]`, where the events of each begin.
        items: int64 `[N]`.
        times: int64 `[N]`, seconds since 1970.
        request_times: int64 `[N]`, the time of the event that follows, for which a prediction is asked.
        targets: int64 `[N]`, the item that follows, or −1 where nothing is predicted: in held-out splits something is
            after the last event alone.
        side: int64 `[N]` of each side column, rows of its own table.
    """

    users: Tensor
    offsets: Tensor
    items: Tensor
    times: Tensor
    request_times: Tensor
    targets: Tensor
    side: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_ids(self) -> int:
        """N."""
        return len(self.items)

    def take(self, users: NDArray[np.int64]) -> SequenceBatch:
        """The sequences at some positions of the batch, in their order."""
        offsets = self.offsets.numpy()
        events, bounds = spans(offsets[:-1][users], offsets[1:][users])
        index = torch.from_numpy(events)
        return SequenceBatch(
            users=self.users[torch.from_numpy(users)],
            offsets=torch.from_numpy(bounds),
            items=self.items[index],
            times=self.times[index],
            request_times=self.request_times[index],
            targets=self.targets[index],
            side={name: values[index] for name, values in self.side.items()},
        )

    def split(self, num_parts: int) -> list[SequenceBatch]:
        """Micro-batches with about as many ids each; see `balance`. Some are empty where there are few users."""
        lengths = np.diff(self.offsets.numpy())
        return [self.take(part) for part in balance(lengths, num_parts)]


def spans(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The numbers from each start to before its end, back to back, and where each run begins.

    >>> [values.tolist() for values in spans(np.array([7, 0]), np.array([9, 1]))]
    [[7, 8, 0], [0, 2, 3]]
    """
    lengths = ends - starts
    bounds = np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])
    return np.arange(bounds[-1]) - np.repeat(bounds[:-1] - starts, lengths), bounds
