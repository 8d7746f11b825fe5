"""Freezing: tables that are looked up and not trained, group by group: fused tables travel and are updated together."""

from __future__ import annotations

from collections.abc import Sequence

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.exchange.group import GroupExchange
from rowmesh.mesh import Mesh
from rowmesh.mesh.waiting import gather_objects


def freeze(
    mesh: Mesh, exchanges: Sequence[GroupExchange], tables: Sequence[str], num_pending: int, *, is_frozen: bool
) -> None:
    """Freezes tables, or lets them train again. Collective.

    Args:
        mesh: the ranks.
        exchanges: of all groups.
        tables: which tables.
        num_pending: batches of this rank that had their backward and no step: gradients of some rows would be missing.
        is_frozen: whether they are to be.

    Raises:
        RowmeshError: a rank has such batches; names it. All ranks raise alike.
        ConfigurationError: there is no such table, others are fused with it, or ranks name different ones.
        PeerError: a rank died, or did not come within the mesh's timeout; names it.
    """
    verb = "freeze" if is_frozen else "unfreeze"
    everyone = gather_objects(mesh, (verb, sorted(tables), num_pending), "freezing tables")
    for rank, (what, theirs, waiting) in enumerate(everyone):
        if [what, theirs] != [*everyone[0][:2]]:
            raise ConfigurationError(
                f"rank {mesh.name(0)} would {everyone[0][0]} {everyone[0][1]}, rank {mesh.name(rank)} would {what} "
                f"{theirs}; every rank must freeze and unfreeze the same tables"
            )
        if waiting:
            raise RowmeshError(
                f"rank {mesh.name(rank)} has {waiting} batch(es) that had their backward and no step; step or "
                f"zero_grad() before tables {verb}"
            )
    groups = [{table.name for table in exchange.group.tables} for exchange in exchanges]
    if unknown := sorted(set(tables).difference(*groups)):
        raise ConfigurationError(f"there is no table {unknown[0]!r} to {verb}; known: {sorted(set().union(*groups))}")
    chosen = [exchange for exchange, names in zip(exchanges, groups, strict=True) if not names.isdisjoint(tables)]
    for exchange in chosen:
        left = [table.name for table in exchange.group.tables if table.name not in tables]
        if left and exchange.is_frozen != is_frozen:
            raise ConfigurationError(
                f"tables {left} are fused with tables to {verb}: they travel and are updated together. Name them too; "
                "or make the tables that are to freeze apart with TableSpec(frozen=True), and unfreeze them until then"
            )
    for exchange in chosen:
        exchange.freeze(is_frozen=is_frozen)
