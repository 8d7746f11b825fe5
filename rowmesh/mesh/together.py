"""What one rank does for all: every rank gets its result, or fails as it failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rowmesh.errors import PeerError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.plain import Failure, Plain, error_from_plain, error_to_plain
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


def first_failure(mesh: Mesh, own: Failure | None, doing: str) -> Failure | None:
    """What the first rank met that failed at something; None where none did. Collective and blocking.

    Args:
        mesh: the ranks.
        own: what this rank met.
        doing: what they do, for the message of a PeerError.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    return next((sent for sent in gather_objects(mesh, own, doing) if sent is not None), None)


def raise_first(mesh: Mesh, own: Failure | None, doing: str) -> None:
    """Raises that on every rank, as the error that it was; arguments as for `first_failure`. Collective."""
    failure = first_failure(mesh, own, doing)
    if failure is None:
        return
    try:
        error = error_from_plain(failure)
    except (ValueError, KeyError, TypeError) as unknown:
        raise PeerError(
            f"while {doing}, a rank met an error that this rank cannot read ({unknown}); start all ranks with the same "
            "version of rowmesh"
        ) from unknown
    raise error


def everywhere(mesh: Mesh, doing: str, action: Callable[[], T]) -> T:
    """What `action` returns on this rank; every rank runs it. Collective and blocking.

    Args:
        mesh: the ranks.
        doing: what the action is for, for the message of a PeerError.
        action: what to do.

    Raises:
        RowmeshError, OSError: on every rank, where `action` raised one of them on any: that of the first.
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    result, failure = None, None
    try:
        result = action()
    except (RowmeshError, OSError) as error:
        if mesh.group is None:
            raise
        failure = error_to_plain(error)
    raise_first(mesh, failure, doing)
    return result  # pyright: ignore[reportReturnType]


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
    sent = broadcast_object(mesh, outcome, doing)
    try:
        result = sent.get("result")
        if "error" not in sent:
            return result if kind is None else kind.from_plain(result)  # pyright: ignore[reportReturnType]
        failure = error_from_plain(sent["error"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PeerError(
            f"while {doing}, rank {mesh.name(0)} sent what this rank cannot read ({error}); start all ranks with the "
            "same version of rowmesh"
        ) from error
    raise failure
