"""Frames in the place of the ids of dynamic tables, in a batch for a device: found by the host, which has the index."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rowmesh.dynamic.asking import Asked, largest
from rowmesh.dynamic.leases import Lease
from rowmesh.ops.distinct_ids import DistinctIds

Resolve = Callable[[Sequence[Asked]], Lease]
"""Puts frames in the place of the ids of dynamic tables; returns what keeps these. Collective."""


class DynamicIds(NamedTuple):
    """Where the ids of a dynamic group are in a batch.

    Attributes:
        bounds: where those of each table begin, and where the last one's end.
        is_frozen: whether nothing of them is counted.
    """

    bounds: Sequence[int]
    is_frozen: bool


def put_frames(
    ids: Tensor, groups: Sequence[DynamicIds], resolve: Resolve, scores: Tensor | None = None
) -> tuple[Tensor, Lease]:
    """Replaces the ids of dynamic tables by frames. Collective.

    Args:
        ids: int64 `[N]`, those of tables next to each other; the host waits for them if they are on a device already.
        groups: of all dynamic tables, in their order.
        resolve: finds the frames of distinct ids.
        scores: int64 `[N]` of the ids, on the host, where the batch has any.

    Returns:
        int64 `[N]` on the host, a copy; and what keeps the frames.

    Raises:
        NoRoomError, DataError, PeerError: see `rowmesh.dynamic.resolver.Resolver`.
    """
    ids = ids.to("cpu", copy=True)
    numbers = ids.numpy()
    found = [_ask(numbers, group) for group in groups]
    if scores is not None:
        for group, (asked, inverse) in zip(groups, found, strict=True):
            given = scores.numpy()[group.bounds[0] : group.bounds[-1]]
            asked.scores = largest(given, inverse, len(asked.ids))
    lease = resolve([asked for asked, _ in found])
    for group, (asked, inverse) in zip(groups, found, strict=True):
        np.take(asked.ids, inverse, out=numbers[group.bounds[0] : group.bounds[-1]])
    return ids, lease


def _ask(ids: np.ndarray, group: DynamicIds) -> tuple[Asked, np.ndarray]:
    """The distinct ids of a group, and which of them each of its ids is."""
    distinct = DistinctIds()
    found = [distinct(ids[begin:end]) for begin, end in pairwise(group.bounds)]
    offsets = np.array([0, *accumulate(len(each.ids) for each in found)])
    counts = np.concatenate([each.counts for each in found]).astype(np.uint32)
    asked = Asked(np.concatenate([each.ids for each in found]), offsets, counts, group.is_frozen)
    return asked, np.concatenate([each.inverse + begin for each, begin in zip(found, offsets[:-1], strict=True)])
