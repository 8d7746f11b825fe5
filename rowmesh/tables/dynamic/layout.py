"""Where the frames of a dynamic table are: rows of memory, in one contiguous range a rank, under a fixed plan.

Rank r of the N of a replica group has the logical shards ⌊P·r/N⌋ … ⌊P·(r + 1)/N⌋ − 1, and frames for all they hold,
then spare ones. To the exchange a frame is a row of a dense table, whose memory is committed where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from rowmesh.mesh.grid import Grid
from rowmesh.placement import Plan, RowRange, TablePlan, TableShape
from rowmesh.tables import TableSpec
from rowmesh.tables.dynamic.spec import Dynamic
from rowmesh.tables.spec import names_of

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


def framed(tables: Sequence[TableSpec], replicas: Mapping[str, int], world_size: int) -> tuple[TableSpec, ...]:
    """The tables as the exchange sees them: rows of dynamic ones are the frames of all ranks of a replica group."""
    seen = []
    for table in tables:
        if table.storage == "dynamic":
            size = Grid(world_size, replicas[table.name]).shards
            count = sum(num_frames(rules_of(table), member, size) for member in range(size))
            table = table.with_num_frames(count)
        seen.append(table)
    return tuple(seen)


def with_frames(plan: Plan, tables: Sequence[TableSpec], replicas: Mapping[str, int]) -> Plan:
    """The plan with the frames of dynamic tables where they must be, whatever it says of them; they may be missing.

    Args:
        plan: of the other tables.
        tables: as `framed` gives them.
        replicas: of the dynamic ones.
    """
    if not replicas:
        return plan
    frames = {
        table.name: _frames_plan(table, plan.world_size, replicas[table.name])
        for table in tables
        if table.storage == "dynamic"
    }
    known = tuple(frames.pop(table.name, table) for table in plan.tables)
    return replace(plan, tables=(*known, *frames.values()))


def replicas_of_dynamic(tables: Sequence[TableSpec], replicas: int | Mapping[str, int]) -> dict[str, int]:
    """M of each dynamic table, by name."""
    names = names_of(tables, "dynamic")
    return {name: replicas if isinstance(replicas, int) else replicas.get(name, 1) for name in names}


def _frames_plan(table: TableSpec, world_size: int, replicas: int) -> TablePlan:
    size = Grid(world_size, replicas).shards
    counts = [num_frames(rules_of(table), member, size) for member in range(size)]
    ends = list(accumulate(counts, initial=0))
    ranges = [
        RowRange(ends[member], ends[member + 1], "fixed", rank=member) for member in range(size) if counts[member]
    ]
    return TablePlan(TableShape.of(table), tuple(ranges), replicas)
