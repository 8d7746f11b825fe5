"""rank_targets: where the item that came stands among all items, exactly, also where ranks have parts of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rowmesh.errors import RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.run.sequence.exchange import RowShares, total

USERS = 256
"""Users that are scored at a time."""
OVERFLOW = (
    "products of the vectors of users and items are past the range of their dtype, so items cannot be ranked; lower "
    "optimizer.lr or tables.optimizer.lr"
)


@dataclass(frozen=True, eq=False)
class Standings:
    """The standing of each user's target.

    Attributes:
        higher: int64 `[B]`, items that score higher.
        tied: int64 `[B]`, other items that score the same, to the bit.
    """

    higher: Tensor
    tied: Tensor


@dataclass(frozen=True, eq=False)
class Seen:
    """Items that are not ranked, by user; a target is ranked even where it is among them.

    Attributes:
        offsets: int64 `[B + 1]`.
        items: int64.
    """

    offsets: Tensor
    items: Tensor

    def pairs(self) -> tuple[Tensor, Tensor]:
        """The user's position in the batch, and the item, of each."""
        users = torch.arange(len(self.offsets) - 1)
        return users.repeat_interleave(self.offsets.diff()), self.items


def rank_targets(
    mesh: Mesh, queries: Tensor, targets: Tensor, items: Tensor, first_item: int = 0, seen: Seen | None = None
) -> Standings:
    """Counts the items that score higher than each user's target, and those that score the same.

    Collective and blocking: ranks gather all queries, and each ranks them against its own items.

    Args:
        mesh: the ranks.
        queries: `[B, D]`, this rank's users.
        targets: int64 `[B]`, any items.
        items: `[M_r, D]`, this rank's part of the items.
        first_item: which item its first row is.
        seen: what is not ranked, of this rank's users; None: all items are.

    Raises:
        RowmeshError: a query or an item is not finite, or the product of one with the other, on any rank.
        PeerError: a rank died, or did not come within the mesh's timeout.
    """
    wrong = torch.tensor([int(not (queries.isfinite().all() and items.isfinite().all()))])
    if int(total(mesh, wrong)):
        raise RowmeshError("vectors of users or items are not finite, so items cannot be ranked; lower optimizer.lr")
    rows = RowShares.of(mesh, len(queries))
    users, seen_items = _all_seen(mesh, seen, rows)
    queries, targets = rows.gather(queries), rows.gather(targets) - first_item
    here = (targets >= 0) & (targets < len(items))
    seen_items = seen_items - first_item
    is_here = (seen_items >= 0) & (seen_items < len(items)) & (seen_items != targets[users])
    users, seen_items = users[is_here], seen_items[is_here]
    own, counts = queries.new_zeros(len(queries)), torch.zeros(2, len(queries), dtype=torch.int64)
    if mesh.group is not None:  # the target may be another rank's: its score is needed before anything is counted
        for chunk in _chunks(len(queries)):
            _note_targets(own[chunk], queries[chunk] @ items.T, targets[chunk], here[chunk])
        own = total(mesh, own)
    for chunk in _chunks(len(queries)):
        scores = queries[chunk] @ items.T  # the product that gave the target's score, so that rounding is the same
        if mesh.group is None:
            _note_targets(own[chunk], scores, targets[chunk], here[chunk])
        wrong += int(overflows(scores))
        low, high = torch.searchsorted(users, torch.tensor([chunk.start, chunk.stop])).tolist()
        scores[users[low:high] - chunk.start, seen_items[low:high]] = -torch.inf
        counts[0, chunk] = (scores > own[chunk, None]).sum(1)
        counts[1, chunk] = (scores == own[chunk, None]).sum(1)
    if int(total(mesh, wrong)):
        raise RowmeshError(OVERFLOW)
    counts[1] -= here.long()  # the target itself
    higher, tied = total(mesh, counts)[:, rows.mine].unbind()
    return Standings(higher, tied)


def overflows(scores: Tensor) -> bool:
    """Whether a product of finite vectors is not finite.

    >>> overflows(torch.tensor([3e38, 3e38])), overflows(torch.tensor([1.0, -torch.inf]))
    (False, True)
    """
    return not bool(scores.sum().isfinite()) and not bool(scores.isfinite().all())  # the sum alone is one pass


def _note_targets(own: Tensor, scores: Tensor, targets: Tensor, here: Tensor) -> None:
    """Writes the scores of targets that are among this rank's items."""
    at = here.nonzero()[:, 0]
    own[at] = scores[at, targets[at]]


def _chunks(count: int) -> list[slice]:
    return [slice(start, min(start + USERS, count)) for start in range(0, count, USERS)]


def _all_seen(mesh: Mesh, seen: Seen | None, rows: RowShares) -> tuple[Tensor, Tensor]:
    """Users, in rising order by their position among all ranks', and what each of them has seen."""
    if seen is None:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    users, items = seen.pairs()
    pairs = RowShares.of(mesh, len(users))
    return pairs.gather(users + rows.mine.start), pairs.gather(items)
