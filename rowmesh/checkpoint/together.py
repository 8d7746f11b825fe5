"""Actions of every rank on a checkpoint: an action that fails on one rank fails on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rowmesh.errors import CheckpointError, DamagedCheckpointError, UnreadableError
from rowmesh.mesh.peers import Peers

T = TypeVar("T")


def on_every_rank(peers: Peers, action: Callable[[], T], doing: str) -> T:
    """Returns what `action` returns on this rank. Collective: ranks wait for each other, however long one reads.

    Args:
        peers: the ranks.
        action: what each of them does.
        doing: what it is for, for the message of a PeerError.

    Raises:
        UnreadableError: the system let a rank not read.
        DamagedCheckpointError: every rank on which `action` failed found damage.
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
    own = None if failure is None else next((each.__name__ for each in _KINDS if isinstance(failure, each)), "")
    everyone = peers.gather([own, reason], doing)
    if failure is not None and not isinstance(failure, CheckpointError):
        raise failure
    if failed := [(kind, text) for kind, text in everyone if kind is not None]:
        raise _kind_of([kind for kind, _ in failed])("; ".join(dict.fromkeys(text for _, text in failed))) from failure
    return result  # pyright: ignore[reportReturnType]


_KINDS = (UnreadableError, DamagedCheckpointError)


def _kind_of(kinds: Sequence[str]) -> type[CheckpointError]:
    """The error for all ranks: damage is proven only where no rank failed for another reason."""
    if UnreadableError.__name__ in kinds:
        return UnreadableError
    return DamagedCheckpointError if set(kinds) == {DamagedCheckpointError.__name__} else CheckpointError
