"""Agreement: a few numbers of every rank, known to all before they go on with a batch of a pipeline, or a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rowmesh._support.counters import CommonCounters
from rowmesh.mesh import Mesh, SharedBuffer
from rowmesh.mesh.barrier import Barrier
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.shared_memory import share

_FLAG_BYTES = 128


class Agreement:
    """Has every rank know some whole numbers of every rank. Making one is collective.

    An exchange moves 8 bytes a number to every rank: between hosts .12 ms over gloo, in shared memory some 10 µs.

    Args:
        mesh: the ranks.
        use: names the process group that messages go through: one thread at a time sends in it.
        width: numbers of a rank.
        shares_memory: whether numbers stand in memory that the ranks share, which must be of one host.
        counters: of messages.

    Attributes:
        mesh: the ranks.
    """

    def __init__(self, mesh: Mesh, use: str, width: int, counters: CommonCounters, *, shares_memory: bool) -> None:
        self.mesh = mesh
        self._ask: Callable[[Sequence[int]], np.ndarray]
        if mesh.world_size == 1:
            self._ask = lambda numbers: np.array([numbers])
        elif shares_memory:
            self._ask = _Board(mesh, width)
        else:
            self._ask = _Messages(mesh, use, counters)

    def __call__(self, *numbers: int) -> np.ndarray:
        """The numbers of all ranks, int64 `[W, width]`. Collective and blocking.

        Raises:
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        return self._ask(numbers)


class _Board:
    """Numbers in shared memory. Two rows a rank, in turn: who reads one has passed the barrier of the one before."""

    def __init__(self, mesh: Mesh, width: int) -> None:
        self._rank, self._num_asked = mesh.rank, 0
        boards = [board for (board,) in share(mesh, [SharedBuffer.create(_FLAG_BYTES + 16 * width)])]
        self._boards = boards  # keeps them mapped
        self._flags = np.array([board.address for board in boards], np.int64)
        self._barrier = Barrier(mesh, self._flags.ctypes.data)
        self._rows = [board.array(np.int64, 2, width, offset=_FLAG_BYTES) for board in boards]

    def __call__(self, numbers: Sequence[int]) -> np.ndarray:
        self._num_asked += 1
        place = self._num_asked % 2
        self._rows[self._rank][place] = numbers
        self._barrier.wait()
        return np.stack([rows[place] for rows in self._rows])


class _Messages:
    """Numbers in a message to every rank."""

    def __init__(self, mesh: Mesh, use: str, counters: CommonCounters) -> None:
        group = mesh.subgroup([range(mesh.world_size)], use)
        self._channel, self._counters = Channel(mesh, group, mesh.rank, mesh.world_size), counters

    def __call__(self, numbers: Sequence[int]) -> np.ndarray:
        out = torch.tensor([numbers], dtype=torch.int64, device="cpu")
        return self._channel.post_gather(out, self._counters, "agreeing on a batch").wait().numpy()
