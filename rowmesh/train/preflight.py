"""Preflight: whether the hosts of a run have the memory that its plan asks for, before any of it is taken."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace

from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects
from rowmesh.observe import memory
from rowmesh.placement import Plan
from rowmesh.placement.strategies.problem import ranks_that_fit
from rowmesh.placement.text import bytes_text
from rowmesh.train.checks import SETTING_UP


def check_memory(plan: Plan, mesh: Mesh, elsewhere: Sequence[str] = (), *, averages: bool) -> None:
    """Compares what the ranks of each host will hold with what the host has available. Collective and blocking.

    Buffers and the network come on top and are not counted: a plan that passes may still not fit.

    Args:
        plan: for all ranks.
        mesh: them.
        elsewhere: tables whose rows are not in the host's memory, or a share of them only; not counted.
        averages: whether replicas are averaged, which takes a mark for every row.

    Raises:
        ConfigurationError: on all ranks alike, where a host has less than the rows and optimizer state of its ranks.
    """
    if not (kept := tuple(table for table in plan.tables if table.shape.name not in elsewhere)):
        return
    plan = replace(plan, tables=kept)
    marks = plan.mark_bytes if averages else (0,) * plan.world_size
    needs = [sum(both) for both in zip(plan.memory_bytes, marks, strict=True)]
    found = gather_objects(mesh, (platform.node(), memory.available_bytes()), SETTING_UP)
    for host in sorted(set(mesh.hosts)):
        ranks = [rank for rank in range(mesh.world_size) if mesh.hosts[rank] == host]
        needed = sum(needs[rank] for rank in ranks)
        available = min(found[rank][1] for rank in ranks)
        if needed > available:
            raise ConfigurationError(
                f"host {found[ranks[0]][0]} (rank {', '.join(map(str, ranks))}) has {bytes_text(available)} of memory "
                f"available, and the plan gives its ranks {bytes_text(needed)} of rows and optimizer state; "
                + _way_out(plan, available // len(ranks))
            )


def _way_out(plan: Plan, limit: int) -> str:
    shards = ranks_that_fit([table.shape for table in plan.tables], limit)
    if shards is None:
        return f"no number of ranks with {bytes_text(limit)} each holds one row of every table; free memory"
    takes = f"a replica of all tables takes at least {shards} rank{'s'[: shards != 1]} with {bytes_text(limit)} each"
    fewer = "form fewer replica groups (parallel.replicas, tables.….replicas), " if plan.is_replicated else ""
    return f"{takes}: start more, on more hosts, {fewer}free memory, or make tables.dim or tables.dtype smaller"
