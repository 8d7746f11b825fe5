"""Who leaves where replica groups together know more ids than a shard holds."""

from __future__ import annotations

import numpy as np

from rowmesh.dynamic.candidates import Located
from rowmesh.ops.dynamic_index import victims
from rowmesh.ops.dynamic_index.scored import ScoredIndex


def find_surplus(
    index: ScoredIndex, capacities: np.ndarray, batch: Located, is_new: np.ndarray, facts: np.ndarray, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """The ids of the smallest (score, id) beyond what shards hold.

    Args:
        index: of the ids that are there.
        capacities: int64 by shard.
        batch: ids of which some are to enter.
        is_new: bool `[N]`: which.
        facts: int64 `[N, 3]`: last steps + 1, counts and frequencies.
        step: the last one.

    Returns:
        Frames of ids that leave, and a mask of those of the batch that cannot enter.
    """
    is_late = np.zeros(len(is_new), bool)
    surplus = index.used + np.bincount(batch.shards[is_new], minlength=len(capacities)) - capacities
    full = np.flatnonzero(surplus > 0)
    if not len(full):
        return np.empty(0, np.int64), is_late
    held = [index.slots_in(shard) for shard in full.tolist()]
    frames = np.concatenate(held)
    waiting = np.flatnonzero(is_new & np.isin(batch.shards, full))
    ids = np.concatenate([index.ids_of(frames), batch.ids[waiting]])
    shards = np.concatenate([np.repeat(full, [len(each) for each in held]), batch.shards[waiting]])
    keys = _keys(index, np.concatenate([index.facts(frames), facts[waiting]]), step)
    order = np.lexsort((ids, *keys, shards))
    places = np.arange(len(order)) - np.searchsorted(shards[order], shards[order])  # in their shards
    leaving = order[places < surplus[shards[order]]]
    is_late[waiting[leaving[leaving >= len(frames)] - len(frames)]] = True
    return frames[leaving[leaving < len(frames)]], is_late


def _keys(index: ScoredIndex, facts: np.ndarray, step: int) -> list[np.ndarray]:
    """What ids leave by: of equal ones of the last key, the first decides."""
    seen, score = facts[:, 0], facts[:, 2]
    if index.kind == victims.RECENCY:
        return [seen]
    if index.decay_steps:
        halvings = max(step, 0) // index.decay_steps - (seen - 1) // index.decay_steps
        score = score >> np.minimum(halvings, 63)
    return [seen, score] if index.kind == victims.BOTH else [score]
