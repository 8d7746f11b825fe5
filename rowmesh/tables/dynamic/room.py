"""The room of shards: what does not fit into them, and which ids leave where too many are known.

A step, in which few ids leave, finds them by `rowmesh.ops.dynamic_index.victims`; `smallest` finds them all at once,
where replica groups know them together.
"""

from __future__ import annotations

import numpy as np

from rowmesh.errors import NoRoomError
from rowmesh.ops.dynamic_index import victims
from rowmesh.tables.dynamic.spec import Dynamic


class Room:
    """That of some shards of a table.

    Args:
        table: its name.
        rules: of the whole table.
        shards: those that are here.

    Attributes:
        capacities: int64 by shard, the ids that it holds at most.
    """

    def __init__(self, table: str, rules: Dynamic, shards: range) -> None:
        self._table, self._rules, self._first = table, rules, shards.start
        self.capacities = np.array([rules.shard_capacity(shard) for shard in shards], np.int64)

    def check_batch(self, wanted: np.ndarray) -> None:
        """Raises NoRoomError where a batch has more distinct ids of a shard than it holds."""
        over = np.flatnonzero(wanted > self.capacities)
        if len(over):
            shard = int(over[np.argmax(wanted[over])])
            raise NoRoomError(
                f"a batch has {wanted[shard]} distinct ids of shard {shard + self._first} of dynamic table "
                f"{self._table!r}, which holds {self.capacities[shard]}; raise capacity from {self._rules.capacity} to "
                f"{int(wanted[shard]) * self._rules.num_shards} or more, or take smaller batches"
            )

    def check_leaving(self, missing: np.ndarray) -> None:
        """Raises NoRoomError where ids would have to leave before their time, so many of each shard."""
        if self._rules.eviction == "ttl" and missing.any():
            shard, rules = int(missing.argmax()), self._rules
            wanted = int(self.capacities[shard] + missing[shard])
            lives = {"steps": rules.ttl_steps, "seconds": rules.ttl_seconds}
            time_to_live = " or ".join(f"{number} {unit}" for unit, number in lives.items() if number)
            raise NoRoomError(
                f"shard {shard + self._first} of dynamic table {self._table!r} is full, and too few ids are past "
                f"their time to live, {time_to_live}; raise capacity from {rules.capacity} to "
                f"{wanted * rules.num_shards} or more, or shorten it"
            )


def smallest(
    ids: np.ndarray,
    facts: np.ndarray,
    shards: np.ndarray,
    counts: np.ndarray,
    kind: int,
    decay_steps: int,
    step: int,
) -> np.ndarray:
    """The places of the ids of the smallest (score, id), so many of each shard.

    Args:
        ids: int64 `[N]`, distinct.
        facts: int64 `[N, 3]`: last steps + 1, counts and scores.
        shards: int64 `[N]`, counted from the first one here.
        counts: int64 by shard, how many are wanted.
        kind: of the scores, as victims have it.
        decay_steps: in which a frequency halves; 0: never.
        step: as of which scores are compared.

    Example:
        >>> facts = np.array([[5, 1, 0], [4, 1, 0], [4, 1, 0]])
        >>> smallest(np.array([7, 9, 8]), facts, np.zeros(3, np.int64), np.array([1]), victims.RECENCY, 0, 5)
        array([2])
    """
    order = np.lexsort((ids, *_keys(facts, kind, decay_steps, step), shards))
    places = np.arange(len(order)) - np.searchsorted(shards[order], shards[order])  # in their shards
    return order[places < counts[shards[order]]]


def _keys(facts: np.ndarray, kind: int, decay_steps: int, step: int) -> list[np.ndarray]:
    """The keys by which ids leave: where the last key is equal, the first decides."""
    seen, score = facts[:, 0], facts[:, 2]
    if kind == victims.RECENCY:
        return [seen]
    if decay_steps:
        halvings = max(step, 0) // decay_steps - (seen - 1) // decay_steps
        score = score >> np.minimum(halvings, 63)
    return [seen, score] if kind == victims.BOTH else [score]
