"""Actions that one rank does for all, or all do together: every rank gets a result, or fails as one failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.plain import Plain, PlainError, error_from_plain, error_to_plain
from rowmesh.mesh.waiting import broadcast_object, complete, gather_objects

T = TypeVar("T")


def summed(mesh: Mesh, value: float, doing: str) -> float:
    """Σ of a number over ranks, in 64 bits. Collective and blocking: every rank calls it; moves 8 bytes.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    if mesh.group is None:
        return value
    total = torch.tensor([value], dtype=torch.float64)
    complete(mesh, lambda: dist.all_reduce(total, group=mesh.group, async_op=True), doing)
    return float(total)


def on_rank_0(mesh: Mesh, doing: str, action: Callable[[], T], kind: type[Plain] | None = None) -> T:
    """The result of `action`, which only rank 0 runs.

    Collective and blocking: every rank calls it; moves the result from rank 0, as JSON.

    Args:
        mesh: the ranks.
        doing: what the action is for, for the message of a PeerError.
        action: what to do.
        kind: the class of what it returns, which knows how it is sent; None where that is plain values.

    Raises:
        RowmeshError, OSError, MemoryError: on every rank, where `action` raised one of them.
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    if mesh.group is None:
        return action()
    outcome: dict[str, Any] = {}
    if mesh.rank == 0:
        try:
            result: Any = action()
            outcome["result"] = result if kind is None else result.to_plain()
        except (RowmeshError, OSError, MemoryError) as error:
            outcome["error"] = error_to_plain(error)

    def read(sent: Any) -> tuple[BaseException | None, Any]:
        if "error" in sent:
            return error_from_plain(sent["error"]), None
        return None, sent["result"] if kind is None else kind.from_plain(sent["result"])

    failure, result = broadcast_object(mesh, outcome, doing, read)
    if failure is not None:
        raise failure
    return result


def on_all_ranks(mesh: Mesh, doing: str, action: Callable[[], T]) -> T:
    """What `action` returns on this rank.

    Collective and blocking: every rank calls it, and runs its own action.

    Args:
        mesh: the ranks.
        doing: what the actions are for, for the message of a PeerError.
        action: what to do.

    Raises:
        RowmeshError, OSError, MemoryError: on every rank, what the first of those met whose `action` raised one of
            them.
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    if mesh.group is None:
        return action()
    result, failure = None, None
    try:
        result = action()
    except (RowmeshError, OSError, MemoryError) as error:
        failure = error_to_plain(error)
    if (first := first_failure(mesh, failure, doing)) is not None:
        raise error_from_plain(first)
    return result  # pyright: ignore[reportReturnType]


def first_failure(mesh: Mesh, failure: PlainError | None, doing: str) -> PlainError | None:
    """The error of the first of the ranks that failed, the same on every rank; None where none did.

    Collective and blocking: every rank calls it; moves the errors to every rank, as JSON.

    Args:
        mesh: the ranks.
        failure: the error of this rank; None: it has not failed.
        doing: what the ranks do, for the message of a PeerError.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    return next((each for each in gather_objects(mesh, failure, doing) if each is not None), None)
