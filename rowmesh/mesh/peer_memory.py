"""Peer memory: buffers of every rank's device that all ranks of a host read as if they were their own.

Between GPUs it is torch's symmetric memory (`rowmesh.mesh.symmetric_memory`). Where kernels are interpreted on the CPU
it is shared memory of the host, so that everything above it is the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.shared_memory import SharedBuffer, share
from rowmesh.mesh.waiting import barrier


class PeerBuffer(Protocol):
    """A buffer of every rank, all of one size. Tensors of it are valid for as long as it lives.

    Attributes:
        own: uint8, this rank's.
        parts: uint8, every rank's, this one's included; there once it is shared.
    """

    own: Tensor
    parts: list[Tensor]


class PeerMemory(Protocol):
    """Where such buffers come from."""

    def allocate(self, num_bytes: int) -> PeerBuffer:
        """A buffer, its contents undefined. Every rank makes those of the same sizes in the same order.

        Raises:
            MemoryError: there is no room.
        """
        ...

    def share(self, buffers: Sequence[Any]) -> None:
        """Makes buffers known to all ranks. Collective and blocking.

        Args:
            buffers: that `allocate` made, on all ranks in the same order.

        Raises:
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
            ConfigurationError: a device cannot read another.
        """
        ...

    def barrier(self) -> None:
        """A barrier of devices: later work of this one sees the effects of all earlier work of the others. Collective.

        The host waits for no GPU. Every rank calls it in the same turn, which hosts have to make sure of.
        """
        ...


class HostBuffer:
    """Shared memory of the host."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = SharedBuffer.create(num_bytes)
        self.own = self.memory.tensor(torch.uint8, num_bytes)
        self.parts: list[Tensor] = []


class HostPeerMemory:
    """For devices that are CPUs, whose work is done when a call returns.

    Args:
        mesh: ranks of one host.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def allocate(self, num_bytes: int) -> HostBuffer:
        """As `PeerMemory`."""
        return HostBuffer(num_bytes)

    def share(self, buffers: Sequence[HostBuffer]) -> None:
        """As `PeerMemory`."""
        mapped = zip(*share(self._mesh, [buffer.memory for buffer in buffers]), strict=True)
        for buffer, of_ranks in zip(buffers, mapped, strict=True):
            buffer.parts = [memory.tensor(torch.uint8, len(buffer.own)) for memory in of_ranks]

    def barrier(self) -> None:
        """As `PeerMemory`."""
        barrier(self._mesh, "waiting for the devices of all ranks")
