"""Gradients of the dense network, averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rowmesh._support.counters import CommonCounters
from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.bucketed_sums import BucketedSums
from rowmesh.mesh.channel import Channel
from rowmesh.mesh.device_group import device_group
from rowmesh.mesh.ordered_sums import SharedSums
from rowmesh.mesh.waiting import complete

USE = "network"
BUCKET_BYTES = 1 << 19


class SharedGradients:
    """Keeps all gradients of a network in one buffer and averages them at once.

    Does what DistributedDataParallel does for a network of this size, whose gradients fit one of its
    buckets. Differs: nothing here outlives the process group. DDP's reducer does, and joins gloo's thread
    while it holds Python's lock, which that thread may be waiting for. And in the host's memory gradients are
    added in the order of the ranks, so that both transports give the same bits; between GPUs the library
    adds them in its own.

    Between hosts the gradients of the last layers, which come first, are sent while those of the first are computed,
    where `sends_early` is called before the backward.

    Args:
        network: the same on every rank; rank 0's parameters are copied to the others, so construction is
            collective. Its gradients become views of the buffer, so clear them with `zero`.
        mesh: the ranks.
        transport: of the rows; where that is one-sided, ranks read each other's gradients in shared memory.
        num_flags: how many numbers travel before the gradients.

    Attributes:
        flags: `[num_flags]`, 0 after `zero`; above 0 after `average` where some rank had set them above 0.
    """

    def __init__(self, network: nn.Module, mesh: Mesh, transport: str = "collective", num_flags: int = 0) -> None:
        self._mesh = mesh
        parameters = list(network.parameters())
        gradients = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self._buffer = torch.cat([gradients.new_zeros(num_flags), gradients])
        self.flags = self._buffer[:num_flags]
        self._group: Any = None
        self._waits = True
        self._shared: SharedSums | None = None
        self._buckets: Buckets | None = None
        if mesh.group is not None:
            self._group, backend, _ = device_group(mesh, self._buffer.device, "network")
            self._waits = backend != "nccl"
            self._run(
                lambda: dist.broadcast(self._buffer, group=self._group, group_src=0, async_op=True),
                "sharing the network's parameters",
            )
            if self._waits and self._buffer.is_cpu:
                self._make_sums(transport, parameters)
        with torch.no_grad():
            for parameter, part in zip(parameters, self._views(parameters), strict=True):
                parameter.copy_(part)
                if parameter.requires_grad:  # optimizers leave alone what has none
                    parameter.grad = part
        self.zero()

    def zero(self) -> None:
        """Clears the gradients."""
        self._buffer.zero_()

    def sends_early(self) -> None:
        """The next backward is the only one before `average`: gradients may be sent as soon as they are there."""
        if self._buckets is not None:
            self._buckets.open()

    def average(self) -> None:
        """Averages the gradients over ranks. Collective; moves at most twice their bytes. NCCL is not waited for.

        Raises:
            PeerError: a rank died, or did not come within the mesh's timeout; names it.
        """
        if self._shared is not None:
            self._shared.begin()[: len(self._buffer)] = self._buffer
            torch.div(self._shared.finish()[: len(self._buffer)], self._mesh.world_size, out=self._buffer)
        elif self._buckets is not None:
            self._buckets.finish()
            self._buffer /= self._mesh.world_size
        elif self._group is not None:
            self._run(
                lambda: dist.all_reduce(self._buffer, group=self._group, async_op=True),
                "averaging the network's gradients",
            )
            self._buffer /= self._mesh.world_size

    def _make_sums(self, transport: str, parameters: list[nn.Parameter]) -> None:
        if transport == "one_sided":
            self._shared = SharedSums(self._mesh, len(self._buffer), self._buffer.dtype)
            self._shared.close()  # every rank has mapped them
        else:
            self._buckets = Buckets(self._mesh, parameters, self._buffer, len(self.flags))

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
        _, *parts = self._buffer.split([len(self.flags), *(parameter.numel() for parameter in parameters)])
        return [part.view_as(parameter) for part, parameter in zip(parts, parameters, strict=True)]


class Buckets:
    """Gradients of a network, sent bucket by bucket, from the last parameters to the first.

    A bucket is sent when it has all its gradients and those behind it were sent: all ranks send in the same order,
    whichever of their layers get gradients. Buckets that lack gradients are sent at the end.

    Args:
        mesh: the ranks, several of them.
        parameters: of the network.
        gradients: of all of them, one after the other, where autograd adds them up; before them the flags.
        num_flags: which are known after the backward, so that the first bucket waits for them.
    """

    def __init__(self, mesh: Mesh, parameters: Sequence[nn.Parameter], gradients: torch.Tensor, num_flags: int) -> None:
        self._gradients = gradients
        bounds, bucket_of = cut(parameters, BUCKET_BYTES)
        bounds = [0, *(bound + num_flags for bound in bounds[1:])]
        self._sizes = [0] * (len(bounds) - 1)
        for parameter, bucket in zip(parameters, bucket_of, strict=True):
            self._sizes[bucket] += parameter.requires_grad
        self._sizes[0] += num_flags > 0
        # A group of its own: at the end ranks send at another place of the step than in the backward.
        channel = Channel(mesh, mesh.subgroup([range(mesh.world_size)], USE), mesh.rank, mesh.world_size)
        self._sums = BucketedSums(channel, bounds, gradients.dtype, CommonCounters(), "the network's gradients")
        self._missing, self._next, self._is_open = list(self._sizes), len(self._sizes) - 1, False
        for parameter, bucket in zip(parameters, bucket_of, strict=True):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(self._came, bucket))

    def open(self) -> None:
        """Sends what the next backward completes."""
        self._missing, self._is_open = list(self._sizes), True

    def finish(self) -> None:
        """Sends the rest, and puts the sums of all ranks into the place of the gradients."""
        self._is_open = False
        self._send(until=-1)
        self._sums.finish(self._gradients)
        self._next = len(self._sizes) - 1

    def _came(self, bucket: int, parameter: torch.Tensor) -> None:
        if not self._is_open:
            return
        if bucket > self._next:
            raise RowmeshError(
                "a parameter of the network got a gradient twice in one backward, and the first was sent; compute each "
                "layer's gradient once, without reentrant checkpoints, or set parallel.transport=one_sided"
            )
        self._missing[bucket] -= 1
        complete_from = self._next + 1
        while complete_from > 0 and self._missing[complete_from - 1] <= 0:
            complete_from -= 1
        self._send(until=complete_from - 1)

    def _send(self, until: int) -> None:
        while self._next > until:
            self._sums.post(self._next, self._gradients)
            self._next -= 1


def cut(parameters: Sequence[torch.Tensor], least_bytes: int) -> tuple[list[int], list[int]]:
    """Where buckets of at least so many bytes begin, and the last one ends; and the bucket of each parameter.

    >>> cut([torch.zeros(3), torch.zeros(1), torch.zeros(5), torch.zeros(2)], 16)
    ([0, 4, 9, 11], [0, 0, 1, 2])
    """
    bounds, buckets, end = [0], [], 0
    for parameter in parameters:
        if (end - bounds[-1]) * parameter.itemsize >= least_bytes:
            bounds.append(end)
        buckets.append(len(bounds) - 1)
        end += parameter.numel()
    return [*bounds, end], buckets


def saved_buffers(network: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that a network saves beside its parameters, by name, such as running means."""
    parameters = {name for name, _ in network.named_parameters(remove_duplicate=False)}
    saved = network.state_dict()
    return {
        name: tensor for name, tensor in saved.items() if name not in parameters and isinstance(tensor, torch.Tensor)
    }


def share_buffers(network: nn.Module, mesh: Mesh, doing: str) -> None:
    """Gives all ranks the saved buffers of rank 0, such as running means, which each rank updates by its own samples.

    Collective: every rank calls it; moves nothing where there are none.

    Args:
        network: the same on every rank.
        mesh: the ranks.
        doing: what this is for, for the message of a PeerError.
    """
    buffers = saved_buffers(network)
    if mesh.group is None or not buffers:
        return
    for buffer in buffers.values():
        sent = buffer.detach().cpu().contiguous()
        complete(mesh, lambda sent=sent: dist.broadcast(sent, group=mesh.group, group_src=0, async_op=True), doing)
        buffer.copy_(sent)
