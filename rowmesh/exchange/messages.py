"""Messages: bytes that go to and from the ranks of a process group, part by part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.exchange.counters import CommonCounters, GroupCounters
from rowmesh.exchange.direct import Waiter
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import Waiting

_counting = threading.Lock()  # several threads may exchange rows of one group


_TAGS = 1 << 20  # messages that may be under way between two ranks are told apart by them


def bounds_of(sizes: np.ndarray) -> np.ndarray:
    """Where each part begins, int64, and where the last one ends.

    >>> bounds_of(np.array([3, 0, 4])).tolist()
    [0, 3, 3, 7]
    """
    return np.concatenate([[0], np.cumsum(sizes)])


class Parts:
    """A buffer cut into one part a member."""

    __slots__ = ("_begin", "_bounds", "_bytes", "_item")

    def __init__(self, buffer: np.ndarray, begin: int, bounds: Sequence[int], item_bytes: int) -> None:
        self._bytes, self._begin, self._bounds, self._item = buffer, begin, bounds, item_bytes

    def num_bytes(self, member: int) -> int:
        """Bytes of the parts of the members other than this one."""
        return self._item * (self._bounds[-1] - self._bounds[0] - self._bounds[member + 1] + self._bounds[member])

    def part(self, member: int) -> Tensor:
        """The bytes of one member."""
        first, last = self._item * self._bounds[member], self._item * self._bounds[member + 1]
        if first == last:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._bytes, dtype=torch.uint8, offset=self._begin + first, count=last - first)

    def trimmed(self, member: int) -> tuple[Tensor, list[int]]:
        """The bytes and the size of each part; this member's own is left out where it is the first or the last.

        In the middle it stays, since an all-to-all wants one piece of memory; it is then copied within the rank, and
        nobody reads the copy.
        """
        sizes = [self._item * (end - begin) for begin, end in pairwise(self._bounds)]
        first, last = self._bounds[0], self._bounds[-1]
        if member == 0:
            first, sizes[0] = self._bounds[1], 0
        elif member == len(sizes) - 1:
            last, sizes[-1] = self._bounds[-2], 0
        count = self._item * (last - first)
        if count == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu"), sizes
        offset = self._begin + self._item * first
        return torch.frombuffer(self._bytes, dtype=torch.uint8, offset=offset, count=count), sizes


class Alone:
    """The channel of a rank without others."""

    def post(self, out: Parts, into: Parts, counters: GroupCounters | CommonCounters, doing: str) -> Any:
        """Nothing is sent."""
        return None

    def exchange_equal(self, out: Tensor, counters: CommonCounters, doing: str) -> Tensor:
        """What this rank has for itself."""
        return out.clone()

    def wait(self, work: dist.Work, doing: str) -> None:
        """Nothing is awaited."""


class Channel:
    """Collectives among some ranks, counted, whose errors name who is missing.

    Args:
        mesh: the ranks.
        group: a process group of some of them.
        member: the number of this rank in it.
        size: its members.
        is_direct: whether an all-to-all is a message to each member, all receives posted before the first is sent.
            Gloo's own sends first: over a cable the bulk of one direction then waits for that of the other. Between
            ranks of one host it has half the median.
    """

    def __init__(self, mesh: Mesh, group: Any, member: int, size: int, *, is_direct: bool = False) -> None:
        self.member, self.size = member, size
        self._mesh, self._group = mesh, group
        self._waiter = Waiter(group, mesh.group_timeout) if is_direct else None
        self._num_posted = 0
        self._is_done = Waiting(mesh)

    def post(self, out: Parts, into: Parts, counters: GroupCounters | CommonCounters, doing: str) -> dist.Work:
        """One all-to-all."""
        with _counting:
            counters.bytes_sent += out.num_bytes(self.member)
            counters.bytes_received += into.num_bytes(self.member)
            counters.all_to_all_rounds += 1
        if (waiter := self._waiter) is not None:
            return self._started(lambda: waiter.take(self._post_direct(out, into)), doing)
        (to_send, sizes_out), (to_fill, sizes_in) = out.trimmed(self.member), into.trimmed(self.member)
        return self._started(
            lambda: dist.all_to_all_single(to_fill, to_send, sizes_in, sizes_out, group=self._group, async_op=True),
            doing,
        )

    def _post_direct(self, out: Parts, into: Parts) -> list[Any]:
        self._num_posted += 1
        tag, works = self._num_posted % _TAGS, []
        others = [member for member in range(self.size) if member != self.member]
        for member in others:
            if (buffer := into.part(member)).numel():
                works.append(dist.irecv(buffer, group=self._group, group_src=member, tag=tag))
        for member in others:
            if (buffer := out.part(member)).numel():
                works.append(dist.isend(buffer, group=self._group, group_dst=member, tag=tag))
        return works

    def exchange(self, out: Parts, into: Parts, counters: GroupCounters, doing: str) -> None:
        """One all-to-all, waited for."""
        self.wait(self.post(out, into, counters, doing), doing)

    def exchange_equal(self, out: Tensor, counters: CommonCounters, doing: str) -> Tensor:
        """One row of `out` to each member; returns one row from each."""
        into = torch.empty_like(out)
        num_bytes = out.nbytes - out[0].nbytes
        with _counting:
            counters.all_to_all_rounds += 1
            counters.bytes_sent += num_bytes
            counters.bytes_received += num_bytes
        self._complete(lambda: dist.all_to_all_single(into, out, group=self._group, async_op=True), doing)
        return into

    def gather(
        self, mine: Tensor, everyone: Sequence[Tensor] | Tensor, counters: GroupCounters | CommonCounters, doing: str
    ) -> None:  # fmt: skip
        """Fills `everyone` with what each member has, in their order; tensors of one shape, or one of their rows."""
        self.wait(self.post_gather(mine, list(everyone), counters, doing), doing)

    def post_gather(
        self, mine: Tensor, everyone: list[Tensor], counters: GroupCounters | CommonCounters, doing: str
    ) -> dist.Work:  # fmt: skip
        """As `gather`, without waiting."""
        counters.all_gathers += 1
        counters.bytes_sent += mine.nbytes * (self.size - 1)
        counters.bytes_received += mine.nbytes * (self.size - 1)
        return self._started(lambda: dist.all_gather(everyone, mine, group=self._group, async_op=True), doing)

    def wait(self, work: dist.Work, doing: str) -> None:
        """Until a posted collective is done."""
        self._is_done(work, doing)

    def _complete(self, post: Callable[[], dist.Work | None], doing: str) -> None:
        self.wait(self._started(post, doing), doing)

    def _started(self, post: Callable[[], Any], doing: str) -> Any:
        try:
            work = post()
        except RuntimeError as error:
            raise self._mesh.peer_error(doing, error) from error
        assert work is not None
        return work
