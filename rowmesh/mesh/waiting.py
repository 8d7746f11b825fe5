"""Waiting for collectives, with errors that name the ranks that did not come.

A rank that has waited for a while answers a liveness check. When time is up, the ranks that gave no answer are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh._support.faults import reach
from rowmesh.errors import PeerError
from rowmesh.mesh.groups import gather_bytes
from rowmesh.mesh.interruptible import Stopwatch
from rowmesh.mesh.mesh import Mesh
from rowmesh.mesh.plain import decode, encode


class Waiting:
    """Waits for collectives of a mesh; they must have been posted with `async_op=True`."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._soon = timedelta(seconds=min(1.0, mesh.timeout_s / 4))

    def __call__(self, work: dist.Work | None, doing: str) -> None:
        """Blocks until the collective is done.

        Args:
            work: the collective.
            doing: what it is for, for the message.

        Raises:
            PeerError: a rank died, or did not come within the mesh's timeout; names it. Or the mesh's cancellation was
                set.
        """
        assert work is not None
        began_s = time.monotonic()
        try:
            work.wait(self._soon)
        except RuntimeError:
            self._wait_long(work, doing, Stopwatch(self._soon.total_seconds(), began_s))

    def _wait_long(self, work: dist.Work, doing: str, watch: Stopwatch) -> None:
        mesh = self._mesh
        calls = mesh.liveness
        calls.answer()
        reach("mesh.wait_long")
        while True:
            watch.read()
            reach("mesh.look")
            is_over = work.is_completed()  # asked first: an error that follows is then the collective's own
            try:
                work.wait(self._soon)
            except RuntimeError as error:
                if mesh.cancellation.is_set:
                    self._give_up(work)
                    raise PeerError(f"stopped {doing}: something else failed") from error
                if not is_over and (failure := mesh.failures.find()):
                    self._give_up(work)
                    raise PeerError(f"rank {mesh.name(mesh.rank)}: stopped {doing}: {failure}") from error
                if watch.read() >= mesh.timeout_s or is_over:
                    raise mesh.peer_error(doing, error, watch) from error
            else:
                calls.withdraw()
                return

    def _give_up(self, work: dist.Work) -> None:
        """The collective is not waited for any more."""
        self._mesh.liveness.withdraw()
        self._mesh.abandon_collective()
        if (abort := getattr(work, "abort", None)) is not None:
            abort()  # or a thread that waits for it would stay


def complete(mesh: Mesh, post: Callable[[], dist.Work | None], doing: str) -> None:
    """Posts a collective and waits for it.

    Args:
        mesh: the ranks, several of them.
        post: starts the collective with `async_op=True`.
        doing: what it is for, for the message.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    try:
        work = post()
    except RuntimeError as error:
        raise mesh.peer_error(doing, error) from error
    Waiting(mesh)(work, doing)


def gather_objects(mesh: Mesh, value: Any, doing: str) -> list[Any]:
    """The values of all ranks, in their order. Collective and blocking; for a few kilobytes, seldom.

    Args:
        mesh: the ranks.
        value: of this rank; plain, as in `rowmesh.mesh.plain`. Tuples arrive as lists.
        doing: what this is for, for the message.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    if mesh.group is None:
        return [value]
    texts = gather_bytes(encode(value), lambda own: _gather(mesh, own, doing))
    return [decode(text, mesh.name(rank), doing) for rank, text in enumerate(texts)]


def broadcast_object(mesh: Mesh, value: Any, doing: str, read: Callable[[Any], Any] | None = None) -> Any:
    """Rank 0's value, on every rank. Collective and blocking.

    Args:
        mesh: the ranks.
        value: of rank 0; plain, as in `rowmesh.mesh.plain`. Tuples arrive as lists, on rank 0 too.
        doing: what this is for, for the message.
        read: converts the plain values, where there are several ranks.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    if mesh.group is None:
        return value
    text = bytearray(encode(value)) if mesh.rank == 0 else bytearray()
    size = torch.full((1,), len(text), dtype=torch.int64, device="cpu")
    _broadcast(mesh, size, doing)
    content = torch.frombuffer(text or bytearray(int(size)), dtype=torch.uint8)
    _broadcast(mesh, content, doing)
    return decode(content.numpy().tobytes(), mesh.name(0), doing, read)


def barrier(mesh: Mesh, doing: str) -> None:
    """Waits for all ranks. Collective and blocking.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    gather_objects(mesh, None, doing)


def _gather(mesh: Mesh, own: Tensor, doing: str) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(mesh.world_size)]
    complete(mesh, lambda: dist.all_gather(parts, own, group=mesh.group, async_op=True), doing)
    return parts


def _broadcast(mesh: Mesh, content: Tensor, doing: str) -> None:
    complete(mesh, lambda: dist.broadcast(content, group=mesh.group, group_src=0, async_op=True), doing)
