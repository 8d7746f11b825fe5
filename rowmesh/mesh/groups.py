"""Process groups of gloo: bytes of all members, how long they wait, and how they are ended while they do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

_LAST_TAG = (1 << 21) - 1  # of a message that never comes
_LEAST = timedelta(minutes=30)  # as torch itself


def backend_name(group: Any, device: str = "cpu") -> str:
    """The backend that sends memory of a kind of device in a group: "gloo", say, or "nothing"."""
    try:
        return group._get_backend(torch.device(device)).name()
    except RuntimeError:
        return "nothing"


def backend_timeout(timeout_s: float) -> timedelta:
    """How long groups wait of whose collectives others wait no longer than `timeout_s`.

    Gloo counts the time in which its process is stopped, and ends all connections when it is over. It must not be the
    one that ends the waiting.
    """
    return max(timedelta(seconds=10 * timeout_s), _LEAST)


def extend_timeout(group: Any, timeout_s: float) -> None:
    """Has a new group wait as long as `backend_timeout` says; only gloo's, for others end their waiting themselves."""
    if _is_member(group) and backend_name(group) == "gloo":
        _set_pg_timeout(backend_timeout(timeout_s), group)


def abort(group: Any) -> None:
    """Ends all collectives of a group, here and, by broken connections, at its other members.

    Without it, to leave a group takes as long as a collective waits for a rank that does not come.
    """
    if not _is_member(group) or group.size() == 1 or backend_name(group) != "gloo":
        return
    never = torch.empty(1, dtype=torch.uint8, device="cpu")
    with contextlib.suppress(RuntimeError, ValueError):
        # A receive that is waited for too long ends the connections of its group.
        work = dist.irecv(never, group=group, group_src=(group.rank() + 1) % group.size(), tag=_LAST_TAG)
        assert work is not None
        work.wait(timedelta(milliseconds=1))


def gather_bytes(mine: bytes, gather: Callable[[Tensor], list[Tensor]]) -> list[bytes]:
    """Gathers the bytes of all ranks, of any length, by a `gather` of tensors of one size."""
    sizes = [int(size) for size in gather(torch.full((1,), len(mine), dtype=torch.int64, device="cpu"))]
    padded = np.zeros(max(sizes), np.uint8)
    padded[: len(mine)] = np.frombuffer(mine, np.uint8)
    everyone = gather(torch.from_numpy(padded))
    return [part[:size].numpy().tobytes() for part, size in zip(everyone, sizes, strict=True)]


def _is_member(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup)
