"""Channel: messages between the ranks of a process group, counted; an error names the ranks that are missing.

Tensors are cut along their first dimension, one part a rank. They are in the host's memory, or in a device's: under
NCCL a message runs on a stream of its own and `Message.wait` makes the current stream wait for it, not the host; under
gloo the host waits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.mesh.device_group import device_group
from rowmesh.mesh.direct import Waiter
from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.waiting import Waiting

_counting = threading.Lock()  # several threads may send messages of one group of tables
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_TAGS = 1 << 20  # distinguish direct messages that are under way between two ranks at a time


class MessageCounters(Protocol):
    """Counters of messages: the rounds of each kind, and bytes to and from other ranks."""

    all_to_all_rounds: int
    all_gathers: int
    bytes_sent: int
    bytes_received: int


class Message:
    """A message under way to this rank. It keeps what this rank sends until it is waited for."""

    __slots__ = ("_channel", "_doing", "_into", "_out", "_work")

    def __init__(self, channel: Channel, work: Any, into: Tensor, out: Tensor, doing: str) -> None:
        self._channel, self._work, self._into, self._out, self._doing = channel, work, into, out, doing

    def wait(self) -> Tensor:
        """The messages received, in the order of the ranks."""
        if self._work is not None:
            self._channel.wait(self._work, self._doing)
            self._work = None
        return self._into


@dataclass(frozen=True)
class Wire:
    """Which elements of a message are sent in another dtype than they have in memory, rounded to the nearest.

    Attributes:
        dtype: of the elements.
        narrow: what they are sent as.
    """

    dtype: torch.dtype
    narrow: torch.dtype


class Widening(Message):
    """A message under way in a narrower dtype. Elements that this rank sends to itself keep their bits.

    Args:
        message: the narrow message.
        into: receives its elements.
        others: pairs of bounds of the elements that come from other ranks.
    """

    __slots__ = ("_others", "_target", "_travels")

    def __init__(self, message: Message, into: Tensor, target: Tensor, others: Sequence[tuple[int, int]]) -> None:
        self._travels, self._into, self._target, self._others = message, into, target, others

    def wait(self) -> Tensor:
        """The messages received, in the order of the ranks."""
        received, others, self._others = self._travels.wait(), self._others, ()
        for begin, end in others:
            self._target[begin:end].copy_(received[begin:end])
        return self._into


class Channel:
    """Collectives among some ranks. A rank alone has one too, which sends nothing.

    Args:
        mesh: the ranks.
        group: a process group of some of them; None where this rank is alone.
        member: the number of this rank in it.
        size: its members.
        is_direct: whether an all-to-all is a message to each member, all receives posted before the first is sent.
            Gloo's own sends first: over a cable the bulk of one direction then waits for that of the other. Between
            ranks of one host it has half the median.
        is_nccl: whether the group moves tensors on a stream of its own.

    Attributes:
        member, size: as given.
        reason: what carries messages between devices, and why; empty between hosts.
    """

    def __init__(
        self, mesh: Mesh, group: Any, member: int, size: int, *, is_direct: bool = False, is_nccl: bool = False
    ) -> None:
        self.member, self.size, self.reason = member, size, ""
        self._mesh, self._group, self._is_nccl = mesh, group, is_nccl
        self._waiter = Waiter(group, mesh.group_timeout) if is_direct and size > 1 else None
        self._num_posted = 0
        self._is_done = Waiting(mesh)

    @classmethod
    def between_hosts(cls, mesh: Mesh) -> Channel:
        """Between all ranks of a mesh, by their own process group."""
        return cls(mesh, mesh.group, mesh.rank, mesh.world_size)

    @classmethod
    def between_devices(cls, mesh: Mesh, device: torch.device) -> Channel:
        """Between the devices of all ranks of a mesh: NCCL where each has a GPU of its own, else gloo. Collective."""
        group, backend, reason = device_group(mesh, device)
        channel = cls(mesh, group, mesh.rank, mesh.world_size, is_nccl=backend == "nccl")
        channel.reason = f"{backend} between devices: {reason}"
        return channel

    def post(
        self,
        out: Tensor,
        sizes_out: Sequence[int],
        sizes_in: Sequence[int],
        counters: MessageCounters,
        doing: str,
        into: Tensor | None = None,
        *,
        copies_own: bool = True,
        wire: Wire | None = None,
    ) -> Message:
        """An all-to-all: sends the first rows of `out` to member 0, the next ones to member 1, ….

        Args:
            out: `[n, …]`, contiguous; must stay as it is until the message is waited for.
            sizes_out: rows for each member.
            sizes_in: rows from each member.
            counters: count it.
            doing: what it is for, for messages of errors.
            into: where what comes goes, contiguous; default: new memory.
            copies_own: whether what this rank sends itself must come to `into`. Where it need not, it is copied only
                where it stands in the middle: an all-to-all takes one piece of memory.
            wire: how elements travel; by default as they are.
        """
        if wire is not None and self.size > 1:
            return self._post_narrow(wire, out, sizes_out, sizes_in, counters, doing, into, copies_own=copies_own)
        into = out.new_empty(sum(sizes_in), *out.shape[1:]) if into is None else into
        own = self.member
        if self.size == 1:
            if copies_own:
                into[: sizes_in[0]] = out[: sizes_out[0]]
            return Message(self, None, into, out, doing)
        row_bytes = math.prod(out.shape[1:]) * out.itemsize
        with _counting:
            counters.bytes_sent += row_bytes * (sum(sizes_out) - sizes_out[own])
            counters.bytes_received += row_bytes * (sum(sizes_in) - sizes_in[own])
            counters.all_to_all_rounds += 1
        raw_out, raw_in = _bytes_of(out), _bytes_of(into)  # whatever types a backend knows
        if (waiter := self._waiter) is not None:
            if copies_own:
                _part(into, sizes_in, own).copy_(_part(out, sizes_out, own))
            work = self._started(lambda: waiter.take(self._post_direct(raw_out, sizes_out, raw_in, sizes_in)), doing)
            return Message(self, work, into, out, doing)
        sizes_out, sizes_in = list(sizes_out), list(sizes_in)
        if not copies_own:
            raw_out, raw_in = _without(raw_out, sizes_out, own), _without(raw_in, sizes_in, own)
        work = self._started(
            lambda: dist.all_to_all_single(raw_in, raw_out, sizes_in, sizes_out, group=self._group, async_op=True),
            doing,
        )
        return Message(self, work, into, out, doing)

    def _post_narrow(
        self,
        wire: Wire,
        out: Tensor,
        sizes_out: Sequence[int],
        sizes_in: Sequence[int],
        counters: MessageCounters,
        doing: str,
        into: Tensor | None,
        *,
        copies_own: bool,
    ) -> Message:
        into = out.new_empty(sum(sizes_in), *out.shape[1:]) if into is None else into
        source, target, own = out.view(wire.dtype), into.view(wire.dtype), self.member
        first, end = sum(sizes_in[:own]), sum(sizes_in[: own + 1])
        if copies_own:
            target[first:end] = _part(source, sizes_out, own)
        received = target.new_empty(target.shape, dtype=wire.narrow)
        sent = source.to(wire.narrow)
        message = self.post(sent, sizes_out, sizes_in, counters, doing, received, copies_own=False)
        return Widening(message, into, target, [(0, first), (end, len(target))])

    def _post_direct(
        self, out: Tensor, sizes_out: Sequence[int], into: Tensor, sizes_in: Sequence[int]
    ) -> list[dist.Work]:
        self._num_posted += 1
        tag, works = self._num_posted % _TAGS, []
        others = [member for member in range(self.size) if member != self.member]
        for member in others:
            if sizes_in[member]:
                works.append(dist.irecv(_part(into, sizes_in, member), group=self._group, group_src=member, tag=tag))
        for member in others:
            if sizes_out[member]:
                works.append(dist.isend(_part(out, sizes_out, member), group=self._group, group_dst=member, tag=tag))
        return works

    def post_gather(self, out: Tensor, counters: MessageCounters, doing: str, into: Tensor | None = None) -> Message:
        """Sends all of `out` to every member; what comes are as many rows of each, one after the other.

        Args:
            out: `[n, …]`, n the same on all members; must stay as it is until the message is waited for.
            counters: count it.
            doing: what it is for, for messages of errors.
            into: `[size · n, …]` or `[size, n, …]`, contiguous; default: new memory.
        """
        into = out.new_empty(self.size * len(out), *out.shape[1:]) if into is None else into
        if self.size == 1:
            into.view(-1)[:] = out.reshape(-1)
            return Message(self, None, into, out, doing)
        with _counting:
            counters.all_gathers += 1
            counters.bytes_sent += out.nbytes * (self.size - 1)
            counters.bytes_received += out.nbytes * (self.size - 1)
        raw_out, raw_in = out.reshape(-1).view(torch.uint8), into.view(-1).view(torch.uint8)
        work = self._started(lambda: _all_gather(raw_in, raw_out, group=self._group, async_op=True), doing)
        return Message(self, work, into, out, doing)

    def gather(self, out: Tensor, into: Tensor, counters: MessageCounters, doing: str) -> None:
        """Fills `into`, `[size, …]`, with the `out` of each member, in their order; see `post_gather`."""
        self.post_gather(out, counters, doing, into).wait()

    def exchange_equal(self, out: Tensor, counters: MessageCounters, doing: str) -> Tensor:
        """Sends row k of `out`, `[size, …]`, to member k; returns one row from each."""
        return self.post_equal(out, counters, doing).wait()

    def post_equal(self, out: Tensor, counters: MessageCounters, doing: str) -> Message:
        """As `exchange_equal`, without waiting; `out` must stay as it is until the message is waited for."""
        into = torch.empty_like(out)
        if self.size == 1:
            return Message(self, None, into.copy_(out), out, doing)
        num_bytes = out.nbytes // self.size * (self.size - 1)
        with _counting:
            counters.all_to_all_rounds += 1
            counters.bytes_sent += num_bytes
            counters.bytes_received += num_bytes
        work = self._started(lambda: dist.all_to_all_single(into, out, group=self._group, async_op=True), doing)
        return Message(self, work, into, out, doing)

    def wait(self, work: Any, doing: str) -> None:
        """Until a posted collective is done; under NCCL what comes next on the current stream finds it done."""
        if self._is_nccl:
            work.wait()  # a timeout would make the host wait
        else:
            self._is_done(work, doing)

    def _started(self, post: Callable[[], Any], doing: str) -> Any:
        try:
            work = post()
        except RuntimeError as error:
            raise self._mesh.peer_error(doing, error) from error
        assert work is not None
        return work


def _bytes_of(tensor: Tensor) -> Tensor:
    """uint8, cut along the same first dimension."""
    if tensor.dtype == torch.uint8:
        return tensor
    return tensor.view(torch.uint8) if tensor.dim() > 1 else tensor.unsqueeze(1).view(torch.uint8)


def _part(tensor: Tensor, sizes: Sequence[int], member: int) -> Tensor:
    begin = sum(sizes[:member])
    return tensor[begin : begin + sizes[member]]


def _without(tensor: Tensor, sizes: list[int], member: int) -> Tensor:
    """A tensor without the rows of one member where they are the first or the last, whose size becomes 0."""
    if member == 0:
        tensor, sizes[0] = tensor[sizes[0] :], 0
    elif member == len(sizes) - 1:
        tensor, sizes[-1] = tensor[: len(tensor) - sizes[-1]], 0
    return tensor
