"""Clusters of samples: which samples of a batch share a micro-batch, so that those that share rows meet.

*Greedy.* Samples are visited once, in order. Each joins the micro-batch that already has most of its rows, out of those
that are at most `slack` samples ahead of their share of the samples so far; of equal ones, the emptiest. Without that
bound the first micro-batch would fill up before the others are begun, and nothing would be clustered.

*Light ends.* A row that c ids of the batch ask for weighs 1 / c in each of them. The lightest samples, whose rows many
others have too, go to the first and the last micro-batch, and the others are clustered. In a window in which
every row travels once (*delta* in `rowmesh.exchange.window`), what the first micro-batch fetches and the last one
pushes is what computation cannot hide.

Source: NestPipe §V-C "Sample Clustering", which leaves the method open.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rowmesh.ops.cluster import cpu

MAX_MICRO_BATCHES = 64
SHARE = 1 << 20
"""The weight of a row that a single sample has. Weights are whole numbers: their sum does not depend on its order."""

__all__ = ["MAX_MICRO_BATCHES", "SHARE", "cluster"]


def cluster(
    keys: Tensor, bags: Tensor | int, counts: Tensor, sizes: Sequence[int], *, slack: int = 4, light_ends: bool = False
) -> Tensor:
    """An order of the samples, to be cut into micro-batches of the given sizes.

    Args:
        keys: int32 `[N]`: of each id of the batch, feature by feature, which of its U distinct rows it is.
        bags: int64 offsets `[F·B + 1]` of the bags in `keys`; or how many ids each holds, where all hold as many.
        counts: int32 `[U]`: how many ids ask for each row.
        sizes: samples of each micro-batch, at most 64 of them; B together.
        slack: how many samples a micro-batch may be ahead of its share of the samples so far, 1 or more.
        light_ends: see the module; for two micro-batches or more.

    Returns:
        int64 `[B]`, the samples of the first micro-batch, then those of the second, and so on; each in the order of the
        batch. It depends on nothing but the arguments.

    Example:
        >>> keys = torch.tensor([0, 1, 0, 1], dtype=torch.int32)  # one feature; samples 0 and 2 share a row
        >>> cluster(keys, 1, torch.tensor([2, 2], dtype=torch.int32), [2, 2]).tolist()
        [0, 2, 1, 3]
    """
    batch_size, num_features = _check(keys, bags, counts, sizes, slack)
    starts, by_sample = np.empty(batch_size + 1, np.int64), np.empty(keys.numel(), np.uint32)
    offsets, bag_size = (np.zeros(0, np.int64), bags) if isinstance(bags, int) else (bags.contiguous().numpy(), -1)
    cpu.by_sample(keys.contiguous().numpy().view(np.uint32), offsets, bag_size, num_features, starts, by_sample)
    sizes_left, parts = np.array(sizes, np.int64), np.full(batch_size, 255, np.uint8)
    if light_ends and len(sizes) > 1:
        weights = np.empty(batch_size, np.int64)
        cpu.weigh(starts, by_sample, SHARE // np.maximum(counts.numpy(), 1).astype(np.int64), weights)
        parts = _assign_ends(weights, sizes)
        sizes_left[[0, -1]] = 0
    cpu.assign(starts, by_sample, sizes_left, slack, np.zeros(counts.numel(), np.uint64), parts)
    return torch.from_numpy(np.argsort(parts, kind="stable"))


def _assign_ends(weights: NDArray[np.int64], sizes: Sequence[int]) -> NDArray[np.uint8]:
    """Gives the lightest samples to the first and the last micro-batch in turns; 255 for the others.

    >>> _assign_ends(np.array([3, 1, 9, 2]), [1, 2, 1]).tolist()
    [255, 2, 255, 0]
    """
    first, ends = sizes[0], sizes[0] + sizes[-1]
    parts = np.full(len(weights), 255, np.uint8)
    if ends:
        to_first = np.arange(ends + 1) * first // ends
        lightest = np.argsort(weights, kind="stable")[:ends]
        parts[lightest] = np.where(np.diff(to_first), 0, len(sizes) - 1)
    return parts


def _check(keys: Tensor, bags: Tensor | int, counts: Tensor, sizes: Sequence[int], slack: int) -> tuple[int, int]:
    """B and F; NumPy looks at values, since torch would wake other threads for it."""
    if keys.dtype != torch.int32 or counts.dtype != torch.int32:
        raise TypeError(f"keys and counts must be int32, got {keys.dtype} and {counts.dtype}")
    if not 1 <= len(sizes) <= MAX_MICRO_BATCHES or min(sizes) < 0:
        raise ValueError(f"there must be 1 to {MAX_MICRO_BATCHES} sizes, 0 or more each, got {list(sizes)}")
    if slack < 1:
        raise ValueError(f"slack must be 1 or more, got {slack}: every micro-batch could be closed to a sample")
    num_bags, batch_size = _num_bags(keys.numel(), bags), sum(sizes)
    if num_bags % max(batch_size, 1) or (num_bags and not batch_size):
        raise ValueError(f"{num_bags} bags are not as many for each of the {batch_size} samples of sizes {list(sizes)}")
    if keys.numel():
        low, high = int(keys.numpy().min()), int(keys.numpy().max())
        if low < 0 or high >= counts.numel():
            raise IndexError(f"keys must be in [0, {counts.numel()}), the number of counts; got {low} to {high}")
    return batch_size, num_bags // max(batch_size, 1)


def _num_bags(num_keys: int, bags: Tensor | int) -> int:
    if isinstance(bags, int):
        if bags < 0 or num_keys % max(bags, 1) or (num_keys and not bags):
            raise ValueError(f"{num_keys} keys do not make bags of {bags}")
        return num_keys // max(bags, 1)
    if bags.dtype != torch.int64 or bags.numel() < 1 or int(bags[0]) != 0 or int(bags[-1]) != num_keys:
        raise ValueError(f"offsets must be int64 and run from 0 to the number of keys, {num_keys}")
    offsets = bags.numpy()
    if np.any(offsets[1:] < offsets[:-1]):
        raise ValueError("offsets must not decrease")
    return len(offsets) - 1
