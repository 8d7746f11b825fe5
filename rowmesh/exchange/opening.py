"""Opening: the message that begins every fetch and push, by which ranks know that they do the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rowmesh.errors import PeerError
from rowmesh.exchange.counters import CommonCounters
from rowmesh.exchange.messages import Channel
from rowmesh.exchange.step import Step, check_rates, joined, parted
from rowmesh.mesh import Mesh


class Opening:
    """A row of numbers to every rank: which fetch (above 0) or push (below 0) this is, at which learning rates, then
    whatever else.

    Args:
        mesh: the ranks.
        channel: between them.
        width: numbers in a row.
        common: counts the messages.

    Attributes:
        numbers: int64 `[W, width]`, to be sent; the first column is filled in.
    """

    def __init__(self, mesh: Mesh, channel: Channel, width: int, common: CommonCounters) -> None:
        self._mesh, self._channel, self._common = mesh, channel, common
        self._out = torch.zeros(mesh.world_size, width, dtype=torch.int64, device="cpu")
        self.numbers = self._out.numpy()

    @property
    def num_bytes(self) -> int:
        """Of what is sent."""
        return self._out.nbytes

    def __call__(self, operation: int, step: Step | None = None) -> np.ndarray:
        """Exchanges the rows: one from every rank. Collective and blocking.

        Args:
            operation: what this rank does.
            step: of a push.

        Raises:
            ConfigurationError: ranks have different learning rates.
            PeerError: a rank does something else; all ranks learn it here, so nobody is left waiting.
        """
        self.numbers[:, 0] = joined(operation, step)
        rows = self._channel.exchange_equal(self._out, self._common, "exchanging counts").numpy()
        operations, digests = parted(rows[:, 0].tolist())
        if operations.count(operation) != len(operations):
            name = self._mesh.name
            raise PeerError(
                f"rank {name(self._mesh.rank)}: ranks are out of step: {describe(operations, name)}; every rank must "
                f"call forward and step equally often and in the same order"
            )
        check_rates(self._mesh, digests, step)
        return rows


def describe(operations: Sequence[int], name: Callable[[int], int]) -> str:
    """What each rank does.

    >>> describe([3, -2], lambda rank: rank)
    'rank 0 is in forward 3, rank 1 is in step 2'
    """
    calls = [f"forward {number}" if number > 0 else f"step {-number}" for number in operations]
    return ", ".join(f"rank {name(rank)} is in {call}" for rank, call in enumerate(calls))
