"""Peers: ranks that do something together that takes as long as it takes, such as writing a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rowmesh.errors import PeerError
from rowmesh.mesh.groups import abort, gather_bytes
from rowmesh.mesh.plain import decode, encode

Wait = Callable[[Callable[[], Any], str], Any]


class Peers:
    """The ranks of a process group, which wait for each other as long as the group does; `Mesh.peers` gives a mesh's.

    Args:
        group: of gloo; None: this process alone.
        wait: returns what a call gives that waits for the others, or raises where that is in vain; it is told what
            the ranks are doing, for the message.
        name: the number of a rank in messages.

    Attributes:
        rank: of this process.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        wait: Wait = lambda call, _: call(),
        name: Callable[[int], int] = lambda rank: rank,
    ) -> None:
        self._group, self._wait, self.name, self._is_aborted = group, wait, name, False
        self.rank = 0 if group is None else dist.get_rank(group)

    def gather(self, value: Any, doing: str) -> list[Any]:
        """The values of all ranks, in their order. Collective and blocking; for a few kilobytes, seldom.

        Args:
            value: this rank's; plain, as in `rowmesh.mesh.plain`. Between several ranks tuples become lists.
            doing: what this is for, for the message.

        Raises:
            PeerError: a rank sent what this one cannot read, or `abort` was called.
            RuntimeError: the collective failed, or took longer than the group waits; or what `wait` raises.
        """
        if self._group is None:
            return [value]
        texts = gather_bytes(encode(value), lambda own: self._wait(lambda: self._gather(own, doing), doing))
        return [decode(text, self.name(rank), doing) for rank, text in enumerate(texts)]

    def abort(self) -> None:
        """Ends the waiting of all ranks, also in another thread."""
        self._is_aborted = True
        if self._group is not None:
            abort(self._group)

    def _gather(self, own: Tensor, doing: str) -> list[Tensor]:
        assert self._group is not None
        parts = [torch.empty_like(own) for _ in range(self._group.size())]
        try:
            dist.all_gather(parts, own, group=self._group)
        except RuntimeError as error:
            if self._is_aborted:
                raise PeerError(f"stopped {doing}: something else failed") from error
            raise
        return parts
