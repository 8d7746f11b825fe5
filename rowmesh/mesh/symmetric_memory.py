"""Symmetric memory: torch's way to let the GPUs of a host read each other, and what stands against it.

None of this has run on GPUs. The functions called here have the same signatures in torch 2.9 and 2.13, and by
their sources do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Self

import torch
from torch import Tensor

from rowmesh.errors import ConfigurationError
from rowmesh.mesh.device_group import gpu_identity
from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.peer_memory import HostPeerMemory, PeerMemory
from rowmesh.mesh.shared_memory import is_supported
from rowmesh.mesh.waiting import gather_objects

_LEAST_TIMEOUT_S = 120  # a rank may have kernels to compile before its device comes to a barrier


class SymmetricBuffer:
    """A buffer that torch can map on other GPUs.

    It is asked for past the pool that `symmetric_memory.empty` takes from: there a rank whose garbage is collected
    later than that of others would be given another block than they, and wait for them for ever.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory

        try:
            self.own: Tensor = _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        except RuntimeError as error:  # of the driver: no torch.OutOfMemoryError
            raise MemoryError(f"no {num_bytes / 2**20:.0f} MiB of symmetric memory on {device}: {error}") from error
        self.parts: list[Tensor] = []
        self.handle: Any = None  # keeps the memory of other GPUs mapped; `parts` do not


class SymmetricPeerMemory:
    """For GPUs of one host that can read each other.

    Freeing a buffer waits for this rank's GPU; other ranks keep the memory alive for as long as they have it mapped.

    Args:
        mesh: the ranks.
        device: of this one.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self._device = mesh, device
        self._signals = self.allocate(16)  # torch keeps those of a barrier beside every buffer; these serve no other
        self._timeout_ms = int(1000 * max(mesh.timeout_s, _LEAST_TIMEOUT_S))

    def allocate(self, num_bytes: int) -> SymmetricBuffer:
        """As `PeerMemory`."""
        return SymmetricBuffer(max(num_bytes, 16), self._device)

    def share(self, buffers: Sequence[SymmetricBuffer]) -> None:
        """As `PeerMemory`.

        Raises:
            ConfigurationError: a rank cannot map the memory of another one; on all ranks, so that all go on alike.
        """
        obstacle = None
        try:
            for buffer in (self._signals, *buffers):
                self._map(buffer)
        except RuntimeError as error:
            obstacle = str(error)
        for rank, theirs in enumerate(gather_objects(self._mesh, obstacle, "mapping the memory of GPUs")):
            if theirs is not None:
                raise ConfigurationError(
                    f"rank {self._mesh.name(rank)}: GPUs cannot map each other's memory, use transport 'collective': "
                    f"{theirs}"
                )

    def _map(self, buffer: SymmetricBuffer) -> None:
        """Maps the memory of all ranks, once."""
        from torch.distributed import _symmetric_memory as symmetric

        if buffer.handle is None:
            buffer.handle = symmetric.rendezvous(buffer.own, self._mesh.group.group_name)
            ranks = range(self._mesh.world_size)
            buffer.parts = [buffer.handle.get_buffer(rank, buffer.own.shape, torch.uint8) for rank in ranks]

    def barrier(self) -> None:
        """As `PeerMemory`: a kernel on the current stream that signals to all GPUs and waits for their signals.

        Writes before it, on this stream, are seen by what other GPUs read after theirs. A rank that died is not named
        here: after the timeout the kernel fails, and with it everything that this process does on its GPU.
        """
        self._signals.handle.barrier(channel=0, timeout_ms=self._timeout_ms)


@dataclass(frozen=True)
class Link:
    """The links of a rank's GPU.

    Attributes:
        identity: of the GPU, equal for all ranks of a host that use it.
        number: of the GPU in this process.
        readable: identities of the GPUs that it can read.
        missing: what this torch lacks, or None.
    """

    identity: str
    number: int
    readable: frozenset[str]
    missing: str | None

    def to_plain(self) -> list[Any]:
        """Plain values, to be sent."""
        return [self.identity, self.number, sorted(self.readable), self.missing]

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """From plain values."""
        identity, number, readable, missing = values
        return cls(identity, number, frozenset(readable), missing)


def find_obstacle(mesh: Mesh, device: torch.device) -> str | None:
    """Why the devices of all ranks cannot read each other, or None where they can. Collective.

    Args:
        mesh: the ranks, or a part of them; all ranks of the run then name the same parts, and learn what stands against
            any of them.
        device: of this rank.
    """
    doing = "exchanging how devices are linked"
    own = None if device.type == "cpu" else _link(device).to_plain()
    links = [theirs and Link.from_plain(theirs) for theirs in gather_objects(mesh, own, doing)]
    obstacle = _obstacle_of(mesh, links)
    of_parts = [obstacle] if mesh.whole is None else gather_objects(mesh.run, obstacle, doing)
    return next(filter(None, of_parts), None)


def _obstacle_of(mesh: Mesh, links: Sequence[Any]) -> str | None:
    """The reason why the devices of one part cannot use symmetric memory."""
    if not mesh.is_one_host:
        other = next(rank for rank, host in enumerate(mesh.hosts) if host != mesh.hosts[0])
        return f"ranks {mesh.name(0)} and {mesh.name(other)} are on different hosts (or in separate containers)"
    if None in links:
        return None if is_supported() else "this system has no memfd_create (Linux has)"
    return obstacle_between(links, [mesh.name(rank) for rank in range(mesh.world_size)])


def obstacle_between(links: Sequence[Link], names: Sequence[int]) -> str | None:
    """Why the GPUs of one host cannot read each other, or None where they can.

    >>> one, other = (Link(name, number, frozenset("ab"), None) for number, name in enumerate("ab"))
    >>> obstacle_between([one, other], [0, 1])
    >>> obstacle_between([one, one], [0, 1])
    'ranks 0 and 1 share a GPU'
    """
    for link, name in zip(links, names, strict=True):
        if link.missing:
            return f"on rank {name} {link.missing}"
    for (a, one), (b, other) in permutations(zip(names, links, strict=True), 2):
        if one.identity == other.identity:
            return f"ranks {a} and {b} share a GPU"
        if other.identity not in one.readable:
            return f"the GPU of rank {a} cannot read that of rank {b}: no peer access, or CUDA_VISIBLE_DEVICES hides it"
        if one.number == other.number:
            return (
                f"ranks {a} and {b} both call their GPU cuda:{one.number}; give all ranks the same CUDA_VISIBLE_DEVICES"
            )
    return None


def peer_memory(mesh: Mesh, device: torch.device) -> PeerMemory:
    """Memory of the ranks' devices, between which there is no obstacle."""
    return HostPeerMemory(mesh) if device.type == "cpu" else SymmetricPeerMemory(mesh, device)


def _link(device: torch.device) -> Link:
    own = torch.cuda.current_device() if device.index is None else device.index
    others = [other for other in range(torch.cuda.device_count()) if other != own]
    readable = [gpu_identity(other) for other in others if torch.cuda.can_device_access_peer(own, other)]
    return Link(gpu_identity(own), own, frozenset(readable), _missing(device))


def _missing(device: torch.device) -> str | None:
    """The reason why this torch has no symmetric memory."""
    try:
        from torch.distributed import _symmetric_memory as symmetric
    except ImportError as error:
        return f"this torch has no symmetric memory ({error})"
    backend = symmetric.get_backend(device)
    return None if backend == "CUDA" else f"symmetric memory is that of {backend}, not of CUDA: unset TORCH_SYMMMEM"
