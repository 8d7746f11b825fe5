"""sharded_softmax: cross entropy over all items, of which each rank scores a part.

[Note: how the whole table takes part in a step] Every rank looks its part of the items up as ids of a second feature
of the table, without pooling: rank r the rows `M r / W` to `M (r + 1) / W`. Which rank owns or caches a row does not
matter, so any plan, transport or tier works. The gradients of these rows go to their owners, and through the table's
update rule, as any others do. Each rank looks up M / W rows a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rowmesh.mesh import Mesh
from rowmesh.models.sequence.losses import Scoring
from rowmesh.run.sequence.exchange import RowShares, largest, total


def item_range(num_items: int, rank: int, world_size: int) -> range:
    """The items that a rank scores: consecutive, and of one rank after those of the rank before.

    >>> [list(item_range(5, rank, 2)) for rank in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return range(num_items * rank // world_size, num_items * (rank + 1) // world_size)


def sharded_softmax(
    mesh: Mesh, queries: Tensor, targets: Tensor, items: Tensor, first_item: int, chunk_size: int | None = None
) -> Tensor:
    """As `full_softmax` over the items of all ranks: the log-sum-exp is exact, up to rounding.

    Collective and blocking, in the forward and in the backward pass. The gradient of `items` is of the losses of all
    ranks, that of `queries` of this rank's own. Every rank receives about `P (D + 4)` numbers forward and `P (D + 1)`
    backward, P of all ranks.

    Args:
        mesh: the ranks.
        queries: `[P, D]`, this rank's.
        targets: int64 `[P]`, any items.
        items: `[M_r, D]`, this rank's part.
        first_item: which item its first row is.
        chunk_size: items that are scored at a time; None: as many as suit the device.

    Returns:
        `[P]`, of this rank's queries.

    Raises:
        PeerError: a rank died, or did not come within the mesh's timeout.
    """
    return _Sharded.apply(queries, items, targets, mesh, first_item, chunk_size)  # pyright: ignore[reportReturnType]


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        items: Tensor,
        targets: Tensor,
        mesh: Mesh,
        first_item: int,
        chunk_size: int | None,
    ) -> Tensor:
        rows = RowShares.of(mesh, len(queries))
        queries, targets = rows.gather(queries), rows.gather(targets) - first_item
        scoring = Scoring.of(queries, items, chunk_size)
        log_sums = _over_ranks(mesh, scoring.log_sum_exp(queries, items))
        here = ((targets >= 0) & (targets < len(items))).nonzero()[:, 0]
        scores = queries.new_zeros(len(queries))
        scores[here] = (queries[here] * items[targets[here]]).sum(-1)
        ctx.save_for_backward(queries, items, targets, log_sums, here)
        ctx.rows, ctx.scoring = rows, scoring
        return (log_sums - total(mesh, scores))[rows.mine]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, items, targets, log_sums, here = ctx.saved_tensors
        gradient = ctx.rows.gather(grads[0].contiguous())
        to_queries, to_items = ctx.scoring.gradients(queries, items, log_sums, gradient)
        weights = gradient[here, None]
        to_queries.index_add_(0, here, weights * items[targets[here]], alpha=-1)
        to_items.index_add_(0, targets[here], weights * queries[here], alpha=-1)
        return total(ctx.rows.mesh, to_queries)[ctx.rows.mine], to_items, None, None, None, None


def _over_ranks(mesh: Mesh, log_sums: Tensor) -> Tensor:
    """The log-sum-exp over the parts of all ranks; a rank without items has −∞."""
    top = largest(mesh, log_sums.clone())
    return total(mesh, (log_sums - top).exp_()).log_().add_(top)
