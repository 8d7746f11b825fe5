"""Agreement: what all ranks must have alike, compared before it matters, so that whoever differs is named."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rowmesh.errors import ConfigurationError, RowmeshError
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.mesh.waiting import gather_objects
from rowmesh.placement import Plan
from rowmesh.tables import TableSpec


def agree_on_tables(
    mesh: Mesh, tables: Sequence[TableSpec], seed: int, transport: str, synchronization: Synchronization, plan: Plan
) -> None:
    """Raises ConfigurationError where ranks describe different tables: they would misread each other's memory."""
    mine = [repr(table) for table in tables]
    mine += [f"seed {seed}", f"transport {transport!r}", repr(synchronization)]
    mine += [f"replicas {plan.replicas}", *plan.to_json().splitlines()]
    everyone = gather_objects(mesh, mine, "comparing the tables of all ranks")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            pairs = zip_longest(everyone[0], theirs, fillvalue="nothing")
            first, other = next((a, b) for a, b in pairs if a != b)
            raise ConfigurationError(
                f"ranks disagree about an EmbeddingCollection: rank 0 has {first}, rank {rank} has {other}"
            )


def agree_to_migrate(mesh: Mesh, plan: Plan, num_under_way: int) -> None:
    """Raises on all ranks alike where one cannot migrate, or has another plan.

    Args:
        mesh: the ranks.
        plan: to go over to.
        num_under_way: batches of this rank that were routed, and not pushed.

    Raises:
        RowmeshError: a rank has such; names it.
        ConfigurationError: a rank has another plan than rank 0; names it.
    """
    everyone = gather_objects(mesh, (plan.to_json(), num_under_way), "agreeing on a migration")
    for rank, (theirs, waiting) in enumerate(everyone):
        if waiting:
            raise RowmeshError(
                f"rank {rank} cannot migrate while {waiting} batch(es) are under way: rows were routed or looked "
                "up, and not pushed; step first, or drop what forward returned"
            )
        if theirs != everyone[0][0]:
            raise ConfigurationError(
                f"rank {rank} would migrate to another plan than rank 0; broadcast one plan to all ranks"
            )
