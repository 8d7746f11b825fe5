"""Gradients of the dense network, averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rowmesh.counters import CommonCounters
from rowmesh.mesh import Mesh
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.device_group import device_group
from rowmesh.mesh.ordered_sums import CollectiveSums, OrderedSums, SharedSums
from rowmesh.mesh.waiting import complete


class SharedGradients:
    """Keeps all gradients of a network in one buffer and averages them at once.

    Does what DistributedDataParallel does for a network of this size, whose gradients fit one of its
    buckets. Differs: nothing here outlives the process group. DDP's reducer does, and joins gloo's thread
    while it holds Python's lock, which that thread may be waiting for. And in the host's memory gradients are
    added in the order of the ranks, so that both transports give the same bits; between GPUs the library
    adds them in its own.

    Args:
        network: the same on every rank; rank 0's parameters are copied to the others, so construction is
            collective. Its gradients become views of the buffer, so clear them with `zero`.
        mesh: the ranks.
        transport: of the rows; where that is one-sided, ranks read each other's gradients in shared memory.
    """

    def __init__(self, network: nn.Module, mesh: Mesh, transport: str = "collective") -> None:
        self._mesh = mesh
        parameters = list(network.parameters())
        self._buffer = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self._group: Any = None
        self._waits = True
        self._sums: OrderedSums | None = None
        if mesh.group is not None:
            self._group, backend, _ = device_group(mesh, self._buffer.device, "network")
            self._waits = backend != "nccl"
            self._run(
                lambda: dist.broadcast(self._buffer, group=self._group, group_src=0, async_op=True),
                "sharing the network's parameters",
            )
            if self._waits and self._buffer.is_cpu:
                self._sums = self._make_sums(transport)
        with torch.no_grad():
            for parameter, part in zip(parameters, self._views(parameters), strict=True):
                parameter.copy_(part)
                if parameter.requires_grad:  # optimizers leave alone what has none
                    parameter.grad = part
        self.zero()

    def zero(self) -> None:
        """Clears the gradients."""
        self._buffer.zero_()

    def average(self) -> None:
        """Averages the gradients over ranks. Collective; moves at most twice their bytes. NCCL is not waited for.

        Raises:
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        if self._sums is not None:
            self._sums.begin()[: len(self._buffer)] = self._buffer
            torch.div(self._sums.finish()[: len(self._buffer)], self._mesh.world_size, out=self._buffer)
        elif self._group is not None:
            self._run(
                lambda: dist.all_reduce(self._buffer, group=self._group, async_op=True),
                "averaging the network's gradients",
            )
            self._buffer /= self._mesh.world_size

    def _make_sums(self, transport: str) -> OrderedSums:
        count, dtype = len(self._buffer), self._buffer.dtype
        if transport == "one_sided":
            sums = SharedSums(self._mesh, count, dtype)
            sums.close()  # every rank has mapped them
            return sums
        channel = Channel.between_hosts(self._mesh)
        return CollectiveSums(self._mesh, channel, count, dtype, CommonCounters(), what="the network's gradients")

    def _run(self, post: Callable[[], Any], doing: str) -> None:
        """Has what follows on this stream come after a collective."""
        if self._waits:
            complete(self._mesh, post, doing)
            return
        try:
            # Without a timeout: NCCL would make the host wait, and end its connections when that time is over.
            post().wait()
        except RuntimeError as error:
            raise self._mesh.peer_error(doing, error) from error

    def _views(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


def share_buffers(network: nn.Module, mesh: Mesh, doing: str) -> None:
    """Gives all ranks the saved buffers of rank 0, such as running means, which each rank updates by its own samples.

    Collective: every rank calls it; moves nothing where there are none.

    Args:
        network: the same on every rank.
        mesh: the ranks.
        doing: what this is for, for the message of a PeerError.
    """
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    saved = network.state_dict()
    buffers = [tensor for name, tensor in saved.items() if name not in parameters and isinstance(tensor, torch.Tensor)]
    if mesh.group is None or not buffers:
        return
    for buffer in buffers:
        sent = buffer.detach().cpu().contiguous()
        complete(mesh, lambda sent=sent: dist.broadcast(sent, group=mesh.group, group_src=0, async_op=True), doing)
        buffer.copy_(sent)
