"""Split: samples of a SparseBatch in any order, and batches cut into micro-batches.

Bags are stored feature by feature, so that samples which follow each other in a batch do not in memory: a micro-batch
is a batch of its own, and ids (and weights, where there are any) are copied once, without a table of places where all
bags are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rowmesh.errors import DataError
from rowmesh.sparse.batch import SparseBatch
from rowmesh.sparse.convert import KeyedJagged, as_batch


def take(batch: SparseBatch | KeyedJagged, samples: Tensor) -> SparseBatch:
    """The given samples of a batch, in the order given; a sample may be taken more than once. Its time is the batch's.

    Args:
        batch: B samples, as a SparseBatch or a KeyedJaggedTensor.
        samples: int64 `[n]`, each in [0, B).

    Raises:
        DataError: a sample is not in the batch.

    Example:
        >>> batch = SparseBatch.from_bags({"user": [[7], [], [7, 9]], "item": [[3], [4], [5]]})
        >>> part = take(batch, torch.tensor([2, 0]))
        >>> part.ids.tolist(), part.offsets.tolist()
        ([7, 9, 7, 5, 3], [0, 2, 3, 4, 5])
    """
    batch = as_batch(batch)
    _check(batch, samples)
    shape = (batch.num_features, batch.batch_size)
    if batch.bag_size is not None:
        bags = (*shape, batch.bag_size)

        def taken(values: Tensor) -> Tensor:
            return values.view(bags).index_select(1, samples).flatten()

        return SparseBatch(
            features=batch.features,
            ids=taken(batch.ids),
            batch_size=samples.numel(),
            bag_size=batch.bag_size,
            weights=None if batch.weights is None else taken(batch.weights),
            time=batch.time,
            scores=None if batch.scores is None else taken(batch.scores),
        )
    begins = batch.offsets[:-1].view(shape).index_select(1, samples).flatten()
    lengths = batch.offsets.diff().view(shape).index_select(1, samples).flatten()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    places = torch.arange(int(offsets[-1]), device="cpu") + (begins - offsets[:-1]).repeat_interleave(lengths)
    return SparseBatch(
        features=batch.features,
        ids=batch.ids[places],
        batch_size=samples.numel(),
        jagged_offsets=offsets,
        weights=None if batch.weights is None else batch.weights[places],
        time=batch.time,
        scores=None if batch.scores is None else batch.scores[places],
    )


def concatenated(batches: Sequence[SparseBatch]) -> SparseBatch:
    """The samples of several batches of the same features, one batch after the other. Its time is the latest.

    Ids of batches without weights weigh 1 where others have some.

    Raises:
        DataError: they have other features, or only some have scores.

    Example:
        >>> batch = SparseBatch.from_bags({"user": [[7], []], "item": [[3], [4]]})
        >>> both = concatenated([batch, SparseBatch.from_bags({"user": [[9, 8]], "item": [[5]]})])
        >>> both.ids.tolist(), both.offsets.tolist()
        ([7, 9, 8, 3, 4, 5], [0, 1, 1, 3, 4, 5, 6])
    """
    first = batches[0]
    if len(batches) == 1:
        return first
    for each in batches:
        if each.features != first.features or (each.scores is None) != (first.scores is None):
            raise DataError(
                f"batches that are concatenated have the same features, and scores all or none; got "
                f"{list(first.features)} and {list(each.features)}"
            )
    joined = partial(joined_ids, batches)
    weights = None
    if given := [each.weights for each in batches if each.weights is not None]:
        ones = [torch.ones(len(each.ids), dtype=given[0].dtype, device="cpu") for each in batches]
        pairs = zip(batches, ones, strict=True)
        weights = joined([one if each.weights is None else each.weights for each, one in pairs])
    lengths = [each.offsets.diff().view(each.num_features, each.batch_size) for each in batches]
    offsets = torch.cat(lengths, dim=1).flatten().cumsum(0)
    times = [each.time for each in batches if each.time is not None]
    return SparseBatch(
        features=first.features,
        ids=joined([each.ids for each in batches]),
        batch_size=sum(each.batch_size for each in batches),
        bag_size=first.bag_size if {each.bag_size for each in batches} == {first.bag_size} else None,
        jagged_offsets=torch.cat([offsets.new_zeros(1), offsets]),
        weights=weights,
        time=max(times, default=None),
        scores=None if first.scores is None else joined([each.scores for each in batches if each.scores is not None]),
    )


def joined_ids(batches: Sequence[SparseBatch], values: Sequence[Tensor]) -> Tensor:
    """What ids of several batches of the same features have, in the order of `concatenated`.

    Args:
        batches: one or more.
        values: of each `[N]`, on any device.
    """
    places = range(batches[0].num_features)
    parts = [each[slice(*batch.feature_range(p))] for p in places for batch, each in zip(batches, values, strict=True)]
    return torch.cat([values[0][:0], *parts])


def micro_batches(batch: SparseBatch, sizes: Sequence[int], order: Tensor | None = None) -> list[SparseBatch]:
    """Cuts a batch into micro-batches.

    Args:
        batch: B samples.
        sizes: samples of each micro-batch, B together.
        order: int64 `[B]`, the samples in the order in which they are cut, as `rowmesh.ops.cluster` returns it; None
            for their own.

    Raises:
        DataError: the sizes do not add up to B, or the order has a sample twice.

    Example:
        >>> batch = SparseBatch.from_bags({"user": [[7], [8], [7]]})
        >>> [part.ids.tolist() for part in micro_batches(batch, [2, 1], torch.tensor([0, 2, 1]))]
        [[7, 7], [8]]
    """
    if sum(sizes) != batch.batch_size or min(sizes, default=0) < 0:
        raise DataError(f"sizes {list(sizes)} add up to {sum(sizes)}; the batch has {batch.batch_size} samples")
    if order is None:
        order = torch.arange(batch.batch_size, device="cpu")
    elif order.shape != (batch.batch_size,) or _has_repeats(batch, order):
        raise DataError(f"the order must have each of the {batch.batch_size} samples once, got {order.numel()} samples")
    return [take(batch, samples) for samples in order.split(list(sizes))]


def _check(batch: SparseBatch, samples: Tensor) -> None:
    if samples.dtype != torch.int64 or samples.dim() != 1:
        raise DataError(f"samples must be int64 with one dimension, got {samples.dtype} {tuple(samples.shape)}")
    if samples.numel():
        low, high = (int(value) for value in samples.aminmax())
        if low < 0 or high >= batch.batch_size:
            raise DataError(f"samples must be in [0, {batch.batch_size}), the batch's; got {low} to {high}")


def _has_repeats(batch: SparseBatch, order: Tensor) -> bool:
    _check(batch, order)
    seen = torch.zeros(batch.batch_size, dtype=torch.bool, device="cpu")
    seen[order] = True
    return not bool(seen.all())
