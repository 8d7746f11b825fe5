"""Losses of models that predict an item after each event: one number a position, unsummed.

Shapes: P positions at which something is predicted, M items, S negatives, D the dimension. Scores are inner products;
for cosines pass what `cosine` returns.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh.ops.linear import Passes, Shape, chosen, gradients, linear

CHUNK = 256
"""Items that a CPU scores at a time: memory is P · CHUNK numbers, however many items there are, and stays in caches."""
DEVICE_CHUNK = 4096
"""The same on a device, which is busy for as long as a launch takes only with many."""


def cosine(queries: Tensor, items: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Both sides divided by their L2 norms, and the queries by the temperature: their products are scores.

    Example:
        >>> queries, items = cosine(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]]), 0.1)
        >>> round(float(queries @ items.T), 4)
        8.0
    """
    return F.normalize(queries, dim=-1) / temperature, F.normalize(items, dim=-1)


def full_softmax(queries: Tensor, targets: Tensor, items: Tensor, chunk_size: int | None = None) -> Tensor:
    """Cross entropy over all items: `log Σ_j exp(q · w_j) − q · w_target`, without `[P, M]` scores in memory.

    Scores are computed again in the backward pass. In a block of `rowmesh.fast_linear`, called with
    `score_shapes=[score_shape(D)]`, products are by oneDNN where that is faster.

    Args:
        queries: `[P, D]`.
        targets: int64 `[P]`, rows of `items`.
        items: `[M, D]`.
        chunk_size: items that are scored at a time; None: as many as suit the device.

    Returns:
        `[P]`.

    Example:
        >>> float(full_softmax(torch.zeros(1, 2), torch.tensor([1]), torch.zeros(4, 2)).exp())
        4.0
    """
    return _FullSoftmax.apply(queries, targets, items, chunk_size)  # pyright: ignore[reportReturnType]


class _FullSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, targets: Tensor, items: Tensor, chunk_size: int | None) -> Tensor:
        ctx.scoring = scoring = Scoring.of(queries, items, chunk_size)
        log_sums = scoring.log_sum_exp(queries, items)
        ctx.save_for_backward(queries, targets, items, log_sums)
        return log_sums - (queries * items[targets]).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = grads
        queries, targets, items, log_sums = ctx.saved_tensors
        to_queries, to_items = ctx.scoring.gradients(queries, items, log_sums, gradient)
        to_queries.addcmul_(gradient[:, None], items[targets], value=-1)
        to_items.index_add_(0, targets, gradient[:, None] * queries, alpha=-1)
        return to_queries, None, to_items, None


def score_shape(dim: int) -> Shape:
    """The shape of the layer that a chunk of items is to a CPU: what `fast_linear` measures for a full softmax."""
    return CHUNK, dim


class Scoring(NamedTuple):
    """How all items are scored: each chunk is a linear layer without bias, whose weight the items are.

    Attributes:
        chunk_size: items at a time.
        passes: which products are by oneDNN.
    """

    chunk_size: int
    passes: Passes

    @staticmethod
    def of(queries: Tensor, items: Tensor, chunk_size: int | None = None) -> Scoring:
        """Of `[P, D]` and `[M, D]`, in chunks that suit the device if not given."""
        size = chunk_size or (CHUNK if items.is_cpu else DEVICE_CHUNK)
        return Scoring(size, chosen(score_shape(items.shape[1]), queries, items))

    def log_sum_exp(self, queries: Tensor, items: Tensor) -> Tensor:
        """`log Σ_j exp(q · w_j)` of each query, `[P]`; −∞ where there are no items. Has no gradient of its own."""
        sums = queries.new_full((len(queries),), -torch.inf)
        for chunk in items.split(self.chunk_size):
            sums = torch.logaddexp(sums, linear(queries, chunk, passes=self.passes).logsumexp(1))
        return sums

    def gradients(self, queries: Tensor, items: Tensor, log_sums: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of `Σ gradient · log_sums` for queries and items.

        Args:
            queries: `[P, D]`.
            items: `[M, D]`, all of those that `log_sums` is over, or a part of them.
            log_sums: `[P]`.
            gradient: `[P]`.
        """
        to_queries, to_items = torch.zeros_like(queries), torch.empty_like(items)
        for chunk, out in zip(items.split(self.chunk_size), to_items.split(self.chunk_size), strict=True):
            scores = linear(queries, chunk, passes=self.passes)
            shares = scores.sub_(log_sums[:, None]).exp_().mul_(gradient[:, None])
            of_queries, of_items = gradients(shares, queries, chunk, self.passes)
            to_queries += of_queries
            out.copy_(of_items)
        return to_queries, to_items


def sampled_softmax(
    queries: Tensor,
    positives: Tensor,
    negatives: Tensor,
    target_ids: Tensor,
    negative_ids: Tensor,
    log_q: Tensor | None = None,
) -> Tensor:
    """Cross entropy over the target and sampled items; negatives that are the target are left out.

    With `log_q` a negative stands for `1 / (S q)` items: its score is lowered by `log(S q)`, so that the sum over
    negatives has the mean that the sum over all items but the target has.

    Args:
        queries: `[P, D]`.
        positives: `[P, D]`, vectors of the targets.
        negatives: `[S, D]`, shared by all positions, which takes one matrix product; or `[P, S, D]`.
        target_ids: int64 `[P]`.
        negative_ids: int64 `[S]` or `[P, S]`.
        log_q: log of the probability with which each negative is drawn, shaped like `negative_ids`.

    Returns:
        `[P]`; 0 where every negative is the target.
    """
    scores = _scores(queries, negatives)
    if log_q is not None:
        scores = scores - log_q - math.log(negative_ids.shape[-1])
    scores = scores.masked_fill(_collisions(target_ids, negative_ids), -torch.inf)
    target = (queries * positives).sum(-1, keepdim=True)
    return torch.cat([target, scores], 1).logsumexp(1) - target[:, 0]


def binary_cross_entropy(
    queries: Tensor, positives: Tensor, negatives: Tensor, target_ids: Tensor, negative_ids: Tensor
) -> Tensor:
    """`−log σ(q · w_target) − Σ log(1 − σ(q · w_negative))`; negatives that are the target are left out.

    Arguments and result as of `sampled_softmax`. SASRec has one negative a position.
    """
    of_negatives = F.softplus(_scores(queries, negatives)).masked_fill(_collisions(target_ids, negative_ids), 0.0)
    return F.softplus(-(queries * positives).sum(-1)) + of_negatives.sum(1)


def _scores(queries: Tensor, negatives: Tensor) -> Tensor:
    """`[P, S]`."""
    if negatives.dim() == 2:
        return queries @ negatives.T
    return torch.bmm(negatives, queries[:, :, None])[:, :, 0]


def _collisions(target_ids: Tensor, negative_ids: Tensor) -> Tensor:
    """Where a negative is the target: bool, broadcast to `[P, S]`."""
    return negative_ids == target_ids[:, None]
