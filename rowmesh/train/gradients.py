"""Gradients of the dense network, averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rowmesh.mesh import Mesh
from rowmesh.mesh.device_group import device_group
from rowmesh.mesh.waiting import complete


class SharedGradients:
    """Keeps all gradients of a network in one buffer and averages them in one all-reduce.

    Does what DistributedDataParallel does for a network of this size, whose gradients fit one of its
    buckets. Differs: nothing here outlives the process group. DDP's reducer does, and joins gloo's thread
    while it holds Python's lock, which that thread may be waiting for.

    Args:
        network: the same on every rank; rank 0's parameters are copied to the others, so construction is
            collective. Its gradients become views of the buffer, so clear them with `zero`.
        mesh: the ranks.
        num_flags: how many numbers travel behind the gradients.

    Attributes:
        flags: `[num_flags]`, 0 after `zero`; above 0 after `average` where some rank had set them above 0.
    """

    def __init__(self, network: nn.Module, mesh: Mesh, num_flags: int = 0) -> None:
        self._mesh = mesh
        parameters = list(network.parameters())
        gradients = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self._buffer = torch.cat([gradients, gradients.new_zeros(num_flags)])
        self.flags = self._buffer[len(gradients) :]
        self._group: Any = None
        self._waits = True
        if mesh.group is not None:
            self._group, backend, _ = device_group(mesh, self._buffer.device, "network")
            self._waits = backend != "nccl"
            self._run(
                lambda: dist.broadcast(self._buffer, group=self._group, group_src=0, async_op=True),
                "sharing the network's parameters",
            )
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
        """Averages the gradients over ranks. Collective; moves twice their bytes. Under NCCL the host does not wait.

        Raises:
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        if self._group is not None:
            self._run(
                lambda: dist.all_reduce(self._buffer, group=self._group, async_op=True),
                "averaging the network's gradients",
            )
            self._buffer /= self._mesh.world_size

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
        parts = self._buffer.split([*(parameter.numel() for parameter in parameters), len(self.flags)])
        return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=False)]


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
