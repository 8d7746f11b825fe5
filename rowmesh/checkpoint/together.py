"""What every rank does with a checkpoint: where it fails on one, it fails on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rowmesh.errors import CheckpointError, UnreadableError
from rowmesh.mesh.peers import Peers

T = TypeVar("T")


def on_every_rank(peers: Peers, action: Callable[[], T], doing: str) -> T:
    """What `action` returns on this rank. Collective: ranks wait for each other, however long one of them reads.

    Args:
        peers: the ranks.
        action: what each of them does.
        doing: what it is for, for the message of a PeerError.

    Raises:
        UnreadableError: the system let a rank not read.
        CheckpointError: `action` failed on a rank: with all reasons, each once. A rank on which it failed by another
            error raises that.
        PeerError: another rank is gone or stopped.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:  # of whatever kind: the other ranks wait
        failure = error
    reason = "" if failure is None else str(failure)
    if failure is not None and not isinstance(failure, CheckpointError):
        reason = f"rank {peers.name(peers.rank)}: {type(failure).__name__}: {reason}"
    everyone = peers.gather([reason, isinstance(failure, UnreadableError)], doing)
    if failure is not None and not isinstance(failure, CheckpointError):
        raise failure
    if reasons := list(dict.fromkeys(text for text, _ in everyone if text)):
        kind = UnreadableError if any(is_unreadable for _, is_unreadable in everyone) else CheckpointError
        raise kind("; ".join(reasons)) from failure
    return result  # pyright: ignore[reportReturnType]
