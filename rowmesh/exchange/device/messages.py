"""Messages between devices: all-to-alls of tensors, row by row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.exchange.counters import CommonCounters, GroupCounters
from rowmesh.mesh import Mesh
from rowmesh.mesh.device_group import device_group
from rowmesh.mesh.waiting import Waiting

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class DeviceChannel:
    """Collectives among the devices of all ranks, counted. Making one is collective.

    Under NCCL a message runs on a stream of its own, and `wait` makes the current stream wait for it, not the host:
    what was launched between the two runs beside it. Under gloo the host waits.

    What a rank sends itself goes through the same call, which copies it within the device: a contiguous message costs
    less than what is saved by leaving it out.

    Args:
        mesh: the ranks.
        device: of this one.

    Attributes:
        member, size: the number of this rank, and of all.
        reason: what carries the messages, and why.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh, self.member, self.size = mesh, mesh.rank, mesh.world_size
        self._group, self._backend, reason = device_group(mesh, device)
        self.reason = f"{self._backend} between devices: {reason}"
        self._is_done = Waiting(mesh)

    def post(
        self, out: Tensor, sizes_out: Sequence[int], sizes_in: Sequence[int], counters: GroupCounters, doing: str,
        into: Tensor | None = None,
    ) -> Message:  # fmt: skip
        """Sends the first rows of `out` to rank 0, the next ones to rank 1, ….

        Args:
            out: `[n, …]`, which must stay as it is until the message is waited for.
            sizes_out: rows for each rank.
            sizes_in: rows from each rank.
            counters: count them.
            doing: what it is for, for messages of errors.
            into: where what comes goes; default: new memory.
        """
        into = out.new_empty(sum(sizes_in), *out.shape[1:]) if into is None else into
        own = self.member
        row_bytes = out[:0].new_empty(1, *out.shape[1:]).nbytes
        counters.bytes_sent += row_bytes * (sum(sizes_out) - sizes_out[own])
        counters.bytes_received += row_bytes * (sum(sizes_in) - sizes_in[own])
        counters.all_to_all_rounds += 1
        raw_out, raw_in = _bytes_of(out), _bytes_of(into)  # whatever types a backend knows
        work = self._started(
            lambda: dist.all_to_all_single(
                raw_in, raw_out, list(sizes_in), list(sizes_out), group=self._group, async_op=True
            ),
            doing,
        )
        return Message(self, work, into, out, doing)

    def post_gather(
        self, out: Tensor, counters: GroupCounters | CommonCounters, doing: str, into: Tensor | None = None
    ) -> Message:  # fmt: skip
        """Sends all of `out` to every rank; what comes are as many rows of each rank, one after the other.

        Args:
            out: `[n, …]`, n the same on all ranks, which must stay as it is until the message is waited for.
            counters: count it.
            doing: what it is for, for messages of errors.
            into: where what comes goes; default: new memory.
        """
        into = out.new_empty(self.size * len(out), *out.shape[1:]) if into is None else into
        counters.all_gathers += 1
        counters.bytes_sent += out.nbytes * (self.size - 1)
        counters.bytes_received += out.nbytes * (self.size - 1)
        raw_out, raw_in = _bytes_of(out), _bytes_of(into)
        work = self._started(lambda: _all_gather(raw_in, raw_out, group=self._group, async_op=True), doing)
        return Message(self, work, into, out, doing)

    def exchange_equal(self, out: Tensor, counters: CommonCounters, doing: str) -> Tensor:
        """One row of `out` to each rank; returns one row from each."""
        into = torch.empty_like(out)
        num_bytes = out.nbytes // self.size * (self.size - 1)
        counters.all_to_all_rounds += 1
        counters.bytes_sent += num_bytes
        counters.bytes_received += num_bytes
        work = self._started(lambda: dist.all_to_all_single(into, out, group=self._group, async_op=True), doing)
        self.wait(work, doing)
        return into

    def gather(self, out: Tensor, into: Tensor, counters: CommonCounters, doing: str) -> None:
        """Fills the rows of `into`, `[W, n]`, with the `[n]` of each rank, in their order.

        What comes next on the current stream finds them there.
        """
        self.post_gather(out, counters, doing, into.view(-1)).wait()

    def wait(self, work: Any, doing: str) -> None:
        """What comes next on the current stream finds the message complete."""
        if self._backend == "nccl":
            work.wait()  # a timeout would make the host wait
        else:
            self._is_done(work, doing)

    def _started(self, post: Callable[[], Any], doing: str) -> Any:
        try:
            return post()
        except RuntimeError as error:
            raise self._mesh.peer_error(doing, error) from error


class Message:
    """What is under way to this rank; keeps what this rank sends until it is waited for."""

    def __init__(self, channel: DeviceChannel, work: Any, into: Tensor, out: Tensor, doing: str) -> None:
        self._channel, self._work, self._into, self._out, self._doing = channel, work, into, out, doing

    def wait(self) -> Tensor:
        """What came, in the order of the ranks."""
        self._channel.wait(self._work, self._doing)
        return self._into


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dim() > 1 else tensor.unsqueeze(1).view(torch.uint8)
