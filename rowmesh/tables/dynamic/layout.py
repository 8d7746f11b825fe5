"""How many frames a rank has of a dynamic table, and which logical shards.

Rank r of the N of a replica group has the logical shards ⌊P·r/N⌋ … ⌊P·(r + 1)/N⌋ − 1, and frames for all they hold,
then spare ones.
"""

from __future__ import annotations

import numpy as np

from rowmesh.tables import TableSpec
from rowmesh.tables.dynamic.spec import Dynamic

LEAST_SPARE = 65_536


def rules_of(table: TableSpec) -> Dynamic:
    """The rules of a dynamic table."""
    assert table.dynamic is not None
    return table.dynamic


def shards_of(rules: Dynamic, member: int, num_members: int) -> range:
    """The logical shards of one of the ranks of a replica group; none where there are more ranks than shards.

    Example:
        >>> [shards_of(Dynamic(capacity=9, shards=5), rank, 2) for rank in range(2)]
        [range(0, 2), range(2, 5)]
    """
    first, stop = (rules.num_shards * each // num_members for each in (member, member + 1))
    return range(first, stop)


def owner_of_shard(rules: Dynamic, num_members: int) -> np.ndarray:
    """int64 `[P]`: which of the ranks of a replica group has each shard."""
    sizes = [len(shards_of(rules, member, num_members)) for member in range(num_members)]
    return np.repeat(np.arange(num_members), sizes)


def num_kept(rules: Dynamic, shards: range) -> int:
    """Ids that some shards hold at most."""
    return sum(rules.shard_capacity(shard) for shard in shards)


def num_spare(rules: Dynamic, shards: range) -> int:
    """Frames beside these."""
    return rules.spare_frames or max(LEAST_SPARE, num_kept(rules, shards))


def num_used(rules: Dynamic, shards: range) -> int:
    """Frames that ids of some shards and batches under way share."""
    return num_kept(rules, shards) + num_spare(rules, shards)


def num_frames(rules: Dynamic, member: int, num_members: int) -> int:
    """Frames of one of the ranks of a replica group: for its shards, spare ones, as many for unknown ids in
    evaluation, and one whose row is always zero.
    """
    shards = shards_of(rules, member, num_members)
    return num_used(rules, shards) + num_spare(rules, shards) + 1 if shards else 0
