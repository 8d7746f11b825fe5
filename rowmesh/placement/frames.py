"""Where the frames of dynamic tables are: rows of memory, in one contiguous range a rank, under a fixed plan.

To the exchange a frame is a row of a dense table, whose memory is committed where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from rowmesh.mesh.grid import Grid
from rowmesh.placement.plan import Plan, RowRange, TablePlan, TableShape
from rowmesh.tables import TableSpec
from rowmesh.tables.dynamic.layout import num_frames, rules_of
from rowmesh.tables.spec import names_of


def framed(tables: Sequence[TableSpec], replicas: Mapping[str, int], world_size: int) -> tuple[TableSpec, ...]:
    """The tables as the exchange sees them: rows of dynamic ones are the frames of all ranks of a replica group."""
    seen = []
    for table in tables:
        if table.takes_any_id:
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
        table.name: _frames_plan(table, plan.world_size, replicas[table.name]) for table in tables if table.takes_any_id
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
