"""What one rank does for all: every rank gets its result, or fails as it failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import broadcast_object

T = TypeVar("T")


def on_rank_0(mesh: Mesh, doing: str, action: Callable[[], T]) -> T:
    """The result of `action`, which only rank 0 runs.

    Collective and blocking: every rank calls it; moves the pickled result from rank 0.

    Args:
        mesh: the ranks.
        doing: what the action is for, for the message of a PeerError.
        action: what to do; what it returns must pickle.

    Raises:
        RowmeshError, OSError, MemoryError: on every rank, where `action` raised one of them.
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    outcome: list[Any] = [None, None]
    if mesh.rank == 0:
        try:
            outcome[0] = action()
        except (RowmeshError, OSError, MemoryError) as error:
            outcome[1] = error
    result, error = broadcast_object(mesh, outcome, doing)
    if error is not None:
        raise error
    return result
