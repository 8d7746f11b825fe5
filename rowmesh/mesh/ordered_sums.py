"""Ordered sums: equally long vectors of all ranks are added up in the order of the ranks.

Every rank gets the same bits, so that what is updated by them stays equal without ever being compared, and transports
differ in speed alone. A library's all-reduce would promise neither the order nor equal bits. Two ways, by size:

    gathered    every rank gets the vectors of all others, and adds: one round, (W − 1) · n received
    scattered   every rank adds its share of all vectors, and gathers the shares: two rounds, 2 · (W − 1) / W · n
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rowmesh.mesh import Mesh, SharedBuffer
from rowmesh.mesh.barrier import Barrier
from rowmesh.mesh.channel import Channel, MessageCounters
from rowmesh.mesh.shared_memory import share
from rowmesh.mesh.together import on_all_ranks
from rowmesh.mesh.waiting import barrier
from rowmesh.ops.memory import round_up

SCATTERED_BYTES = 256 << 10  # from here on, with three ranks or more, a second round costs less than what it saves
_ALIGNMENT = 64  # elements; also makes parts of equal size of any number of ranks that divides it
_FLAG_BYTES = 64


def is_scattered(num_bytes: int, world_size: int) -> bool:
    """Whether every rank adds a part of the sum for all.

    >>> is_scattered(1 << 20, 2), is_scattered(1 << 20, 4), is_scattered(1 << 10, 4)
    (False, True, False)
    """
    return world_size > 2 and num_bytes >= SCATTERED_BYTES


class CollectiveSums:
    """By torch.distributed, in the host's memory or in that of the ranks' devices.

    On a device all is launched on the current stream, and messages are waited for there, not by the host. The vectors
    are kept from step to step: what writes them in one step comes, on that stream, after what read them in the one
    before, messages included.

    Args:
        mesh: the ranks.
        channel: between them.
        count: elements of a vector.
        dtype: of the elements.
        common: counts the messages.
        device: where vectors are; None: the host's memory.
        what: vectors are, for messages of errors.
    """

    def __init__(
        self,
        mesh: Mesh,
        channel: Channel,
        count: int,
        dtype: torch.dtype,
        common: MessageCounters,
        device: torch.device | None = None,
        what: str = "vectors",
    ) -> None:
        self._mesh, self._channel, self._common, self._what = mesh, channel, common, what
        size, where = round_up(count, _ALIGNMENT * mesh.world_size), device or torch.device("cpu")
        self._own, self._total = (torch.zeros(size, dtype=dtype, device=where) for _ in range(2))
        self._is_scattered = is_scattered(self._own.nbytes, mesh.world_size)
        columns = size // mesh.world_size if self._is_scattered else size
        self._everyone = torch.zeros(mesh.world_size, columns, dtype=dtype, device=where)

    def begin(self) -> Tensor:
        """Zeros, for this rank's vector."""
        return self._own.zero_()

    def finish(self) -> Tensor:
        """The sum of all vectors; one round of messages, or two."""
        if not self._is_scattered:
            self._channel.gather(self._own, self._everyone, self._common, f"summing {self._what}")
            return add_in_order(self._everyone, self._total)
        parts = self._own.view(self._mesh.world_size, -1)
        received = self._channel.exchange_equal(parts, self._common, f"scattering {self._what}")
        sums = add_in_order(received, self._everyone[0])
        totals = self._total.view(self._mesh.world_size, -1)
        self._channel.gather(sums, totals, self._common, f"gathering sums of {self._what}")
        return self._total

    @property
    def num_bytes(self) -> int:
        """Bytes of all vectors."""
        return self._own.nbytes + self._total.nbytes + self._everyone.nbytes

    def barrier(self) -> None:
        """Waits for all ranks."""
        barrier(self._mesh, "waiting at a barrier")

    def fail(self, step: int) -> None:
        """No-op: ranks that wait for messages learn it elsewhere."""

    def close(self) -> None:
        """Nothing is held that does not go with this."""


class SharedSums:
    """In the shared memory of a host: ranks read each other's vectors where they are.

    There are two vectors a rank, used in turns: a rank writes one only after a barrier that follows all reads of it.

    Args:
        mesh: the ranks.
        count: elements of a vector.
        dtype: of the elements.
    """

    def __init__(self, mesh: Mesh, count: int, dtype: torch.dtype) -> None:
        self._mesh, self._turn = mesh, 0
        size = round_up(count, _ALIGNMENT * mesh.world_size)
        self._is_scattered = is_scattered(size * dtype.itemsize, mesh.world_size)
        part = size // mesh.world_size if self._is_scattered else 0
        self._total = torch.zeros(size, dtype=dtype, device="cpu")
        num_bytes = _FLAG_BYTES + 2 * (size + part) * dtype.itemsize
        own = on_all_ranks(mesh, "making room for vectors", lambda: SharedBuffer.create(num_bytes))
        own.use_huge_pages()
        self._buffers = [buffer for (buffer,) in share(mesh, [own])]
        self._vectors, self._sums = (
            [[self._view(b, turn * n + begin, n, dtype) for b in self._buffers] for turn in range(2)]
            for begin, n in ((0, size), (2 * size, part))
        )
        self._flags = np.array([buffer.address for buffer in self._buffers], np.int64)
        self._barrier = Barrier(mesh, self._flags.ctypes.data)

    @staticmethod
    def _view(buffer: SharedBuffer, begin: int, count: int, dtype: torch.dtype) -> Tensor:
        return buffer.tensor(dtype, count, offset=_FLAG_BYTES + begin * dtype.itemsize)

    def begin(self) -> Tensor:
        """Zeros, for this rank's vector."""
        return self._vectors[1 - self._turn][self._mesh.rank].zero_()

    def finish(self) -> Tensor:
        """The sum of all vectors; one barrier, or two."""
        self._turn = 1 - self._turn
        self._barrier.wait()
        vectors, sums, rank = self._vectors[self._turn], self._sums[self._turn], self._mesh.rank
        if not self._is_scattered:
            return add_in_order(vectors, self._total)
        size = len(sums[rank])
        add_in_order([vector[rank * size : (rank + 1) * size] for vector in vectors], sums[rank])
        self._barrier.wait()
        return torch.cat(sums, out=self._total)

    @property
    def num_bytes(self) -> int:
        """Memory of this rank's vectors."""
        return self._total.nbytes + self._buffers[self._mesh.rank].num_bytes

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._barrier.wait()

    def fail(self, step: int) -> None:
        """Notes that this rank failed in a step: others stop waiting for it."""
        self._barrier.fail(step)

    def close(self) -> None:
        """No further rank can map the vectors; they are freed with the last view."""
        self._buffers[self._mesh.rank].close()


OrderedSums = CollectiveSums | SharedSums


def add_in_order(vectors: Sequence[Tensor] | Tensor, out: Tensor) -> Tensor:
    """The sum of vectors, the first ones first.

    >>> add_in_order([torch.tensor([1.0]), torch.tensor([2.0])], torch.zeros(1))
    tensor([3.])
    >>> add_in_order([torch.tensor([1.0])], torch.zeros(1))  # under torchrun with one rank
    tensor([1.])
    """
    if len(vectors) == 1:
        return out.copy_(vectors[0])
    torch.add(vectors[0], vectors[1], out=out)
    for vector in vectors[2:]:
        out += vector
    return out
