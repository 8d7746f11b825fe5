"""Clusters of samples in plain Python: sets instead of masks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rowmesh.ops.cluster import SHARE

MOST_COUNTED = 255


def cluster(
    keys: Tensor, bags: Tensor | int, counts: Tensor, sizes: Sequence[int], *, slack: int = 4, light_ends: bool = False
) -> Tensor:
    """As `rowmesh.ops.cluster.cluster`."""
    samples = _by_sample(keys.tolist(), bags, sum(sizes))
    parts = [255] * len(samples)
    sizes_left = list(sizes)
    if light_ends and len(sizes) > 1:
        shares = [SHARE // max(count, 1) for count in counts.tolist()]
        weights = [sum(shares[key] for key in sample) for sample in samples]
        parts = _assign_ends(weights, sizes)
        sizes_left[0] = sizes_left[-1] = 0
    _assign(samples, sizes_left, slack, parts)
    return torch.tensor(sorted(range(len(parts)), key=lambda sample: parts[sample]), dtype=torch.int64)


def _assign_ends(weights: list[int], sizes: Sequence[int]) -> list[int]:
    """The lightest samples in turns to the first and the last micro-batch; 255 for the others."""
    parts, first, ends = [255] * len(weights), sizes[0], sizes[0] + sizes[-1]
    for turn, sample in enumerate(sorted(range(len(weights)), key=lambda s: weights[s])[:ends]):
        is_first = (turn + 1) * first // ends > turn * first // ends
        parts[sample] = 0 if is_first else len(sizes) - 1
    return parts


def _by_sample(keys: list[int], bags: Tensor | int, batch_size: int) -> list[list[int]]:
    if isinstance(bags, int):
        offsets = list(range(0, len(keys) + 1, bags)) if bags else [0]
    else:
        offsets = bags.tolist()
    return [
        [key for bag in range(s, len(offsets) - 1, batch_size) for key in keys[offsets[bag] : offsets[bag + 1]]]
        for s in range(batch_size)
    ]


def _assign(samples: list[list[int]], sizes: Sequence[int], slack: int, parts: list[int]) -> None:
    """Assigns the samples whose part is 255, in place."""
    rows: list[set[int]] = [set() for _ in sizes]
    loads = [0] * len(sizes)
    total = sum(sizes)
    for s, sample in enumerate(samples):
        if parts[s] != 255:
            continue
        done = sum(loads)
        may = [m for m, size in enumerate(sizes) if loads[m] < min(size, done * size // total + slack)]
        shared = {m: min(sum(key in rows[m] for key in sample), MOST_COUNTED) for m in may}
        parts[s] = min(may, key=lambda m: (-shared[m], loads[m] / sizes[m], m))
        loads[parts[s]] += 1
        rows[parts[s]].update(sample)
