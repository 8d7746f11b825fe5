"""What one rank does for all: every rank gets its result, or fails as it failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from rowmesh.errors import RowmeshError

T = TypeVar("T")


def on_rank_0(group: dist.ProcessGroup | None, action: Callable[[], T]) -> T:
    """The result of `action`, which only rank 0 runs.

    Collective and blocking: every rank of the group calls it; moves the pickled result from rank 0.

    Args:
        group: the process group; None for a single process.
        action: what to do; what it returns must pickle.

    Raises:
        RowmeshError, OSError, MemoryError: on every rank, where `action` raised one of them.
    """
    if group is None:
        return action()
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = action()
        except (RowmeshError, OSError, MemoryError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
