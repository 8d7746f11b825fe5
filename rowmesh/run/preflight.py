"""Preflight: whether the hosts of a run have the memory that its plan asks for, before any of it is taken."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rowmesh._support import memory
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects
from rowmesh.placement import Plan
from rowmesh.placement.strategies.problem import ranks_that_fit
from rowmesh.placement.text import bytes_text
from rowmesh.run.checks import SETTING_UP


def check_memory(
    plan: Plan, mesh: Mesh, elsewhere: Sequence[str] = (), *, averages: bool, network_bytes: int = 0
) -> None:
    """Compares what the ranks of each host will hold with what the host has available. Collective and blocking.

    Where control groups limit ranks, those of each group are compared with what it has left. Buffers come on top and
    are not counted: a plan that passes may still not fit.

    Args:
        plan: for all ranks.
        mesh: them.
        elsewhere: tables whose rows are not in the host's memory, or a share of them only; not counted.
        averages: whether replicas are averaged, which takes a mark for every row.
        network_bytes: what the dense network takes on every rank.

    Raises:
        ConfigurationError: on all ranks alike, where a host has less than its ranks take.
    """
    kept = replace(plan, tables=tuple(table for table in plan.tables if table.shape.name not in elsewhere))
    rows = _row_bytes(kept, averages)
    if not (any(rows) or network_bytes):
        return
    found = gather_objects(mesh, (platform.node(), memory.rooms()), SETTING_UP)
    for ranks, room in _shared_rooms(mesh, [rooms for _, rooms in found]):
        own = sum(rows[rank] for rank in ranks)
        if own + network_bytes * len(ranks) > room:
            raise ConfigurationError(
                f"host {found[ranks[0]][0]} (rank {', '.join(map(str, ranks))}) has {bytes_text(room)} of memory "
                f"available, and the plan gives its ranks {bytes_text(own)} of rows and optimizer state"
                f"{_network_text(network_bytes * len(ranks))}; "
                + _way_out(kept, room // len(ranks), network_bytes, is_network=own <= room)
            )


def _row_bytes(plan: Plan, averages: bool) -> list[int]:
    if not plan.tables:
        return [0] * plan.world_size
    marks = plan.mark_bytes if averages else (0,) * plan.world_size
    return [sum(both) for both in zip(plan.memory_bytes, marks, strict=True)]


def _shared_rooms(mesh: Mesh, found: Sequence[dict[str, int]]) -> Iterator[tuple[list[int], int]]:
    """Groups of ranks that share memory, and the least that a rank of the group measured there."""
    for host in sorted(set(mesh.hosts)):
        here = [rank for rank in range(mesh.world_size) if mesh.hosts[rank] == host]
        for name in dict.fromkeys(name for rank in here for name in found[rank]):
            ranks = [rank for rank in here if name in found[rank]]
            yield ranks, min(found[rank][name] for rank in ranks)


def _network_text(num_bytes: int) -> str:
    parts = "parameters, gradients, optimizer state, and what a batch leaves in it"
    return f" and the dense network {bytes_text(num_bytes)} ({parts})" if num_bytes else ""


def _way_out(plan: Plan, limit: int, network_bytes: int, *, is_network: bool) -> str:
    if is_network:
        return (
            "make model.bottom, model.top (model.options of a model of your own) or data.batch_size smaller, start "
            "fewer ranks a host, or free memory"
        )
    limit = max(limit - network_bytes, 0)
    shards = ranks_that_fit([table.shape for table in plan.tables], limit)
    if shards is None:
        return f"no number of ranks with {bytes_text(limit)} each holds one row of every table; free memory"
    takes = f"a replica of all tables takes at least {shards} rank{'s'[: shards != 1]} with {bytes_text(limit)} each"
    fewer = "form fewer replica groups (parallel.replicas, tables.….replicas), " if plan.is_replicated else ""
    return f"{takes}: start more, on more hosts, {fewer}free memory, or make tables.dim or tables.dtype smaller"
