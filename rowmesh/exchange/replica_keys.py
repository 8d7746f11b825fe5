"""Replica keys: which rows the other replicas of a table will change by a window, known when it is opened.

The ranks of a replicate group send each other the distinct slots that their replicas ask for. So a rank knows which
rows of the next window are final, and which tiered rows to pin, whoever changes them. It takes 4 bytes for each row
that a replica asks a rank for, to each of the others; gradients take D times as much.

Source: NestPipe §IV-B, Table IV (with two-dimensional sparse parallelism). Differs: the paper does not say how rows
that other replicas change are kept from the dual buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel

_DOING = "telling replicas which rows a window changes"


class ReplicaKeys:
    """The messages of a replicate group that opens windows. Making one is collective.

    Args:
        mesh: the replicate group.
        groups: the ranks of each replica, which are all ranks.
        common: counts messages.
    """

    def __init__(self, mesh: Mesh, groups: Sequence[range], common: CommonCounters) -> None:
        size = mesh.world_size
        self._channel = Channel(mesh, mesh.subgroup([range(size)], "keys"), mesh.rank, size)
        self._order = np.argsort([rank for ranks in groups for rank in ranks])
        self._replica, self._common = mesh.rank, common

    def __call__(
        self, states: Sequence[int], slots: Sequence[np.ndarray]
    ) -> tuple[list[int], list[list[np.ndarray]] | None]:
        """Sends the others what this replica asks for. Collective and blocking.

        Args:
            states: of the ranks of this replica, see `Windows.open`.
            slots: uint32 `[n]`, distinct, of each group of tables: what they ask this rank for; none where
                there is no such window.

        Returns:
            The states of all ranks; and, where all have the window, the slots of the other replicas, by group.
        """
        counts = [len(each) for each in slots]
        numbers = torch.tensor([*states, sum(counts)], dtype=torch.int64, device="cpu")
        told = self._gather(numbers)
        everyone = told[:, :-1].reshape(-1)[self._order].tolist()
        if not slots or any(state != everyone[0] for state in everyone):
            return everyone, None
        bounds = [0, *accumulate(counts)]
        own = np.zeros(len(counts) + int(told[:, -1].max()), np.uint32)
        own[: len(counts)] = counts
        for begin, end, each in zip(bounds, bounds[1:], slots, strict=False):
            own[len(counts) + begin : len(counts) + end] = each
        theirs = self._gather(torch.from_numpy(own.view(np.int32))).view(np.uint32)
        others: list[list[np.ndarray]] = [[] for _ in counts]
        for replica, message in enumerate(theirs):
            if replica == self._replica:
                continue
            ends = len(counts) + np.cumsum(message[: len(counts)], dtype=np.int64)
            for of_group, count, end in zip(others, message[: len(counts)], ends, strict=True):
                of_group.append(message[end - int(count) : end])
        return everyone, others

    def _gather(self, numbers: torch.Tensor) -> np.ndarray:
        """What each replica sends, `[M, …]`; all send equally much."""
        message = self._channel.post_gather(numbers, self._common, _DOING)
        return message.wait().view(self._channel.size, -1).numpy()
