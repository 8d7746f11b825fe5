"""The dynamic tables of a collection: what of them may not be, and their resolver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from rowmesh.dynamic.asked import DynamicTable
from rowmesh.dynamic.layout import rules_of, shards_of
from rowmesh.dynamic.owned import OwnedTable
from rowmesh.dynamic.resolver import Resolver
from rowmesh.errors import ConfigurationError
from rowmesh.mesh import Mesh
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.placement import AddressMap, Plan
from rowmesh.tables import DenseArena, RowStore, TableGroup, TableSpec


class Exchange(Protocol):
    """A group of tables on a rank."""

    @property
    def group(self) -> TableGroup: ...
    @property
    def address_map(self) -> AddressMap: ...
    @property
    def arena(self) -> RowStore: ...


def check_dynamic(
    tables: Sequence[TableSpec],
    replicas: Mapping[str, int],
    synchronization: Synchronization,
    device: torch.device | None,
) -> None:
    """Raises ConfigurationError for what dynamic tables cannot be yet."""
    for table in (table for table in tables if table.storage == "dynamic"):
        name, rules = table.name, rules_of(table)
        if device is not None:
            raise ConfigurationError(
                f"table {name!r} is dynamic, and such tables are in the host's memory so far; take device='cpu', or "
                "storage='dense'"
            )
        if replicas[name] > 1 and synchronization.mode == "average":
            raise ConfigurationError(
                f"table {name!r} is dynamic, and its replicas cannot be averaged so far: their groups would know "
                "different ids; take exact synchronization, or one replica"
            )
        if rules.mode == "demote":
            raise ConfigurationError(f"table {name!r}: mode = 'demote' needs a slower tier, which is not there yet")
        if rules.eviction == "score":
            raise ConfigurationError(
                f"table {name!r}: eviction = 'score' takes scores of the caller, which batches cannot carry yet; take "
                "'lru', 'lfu', 'lru_lfu' or 'ttl'"
            )


def make_resolver(
    exchanges: Sequence[Exchange], plan: Plan, mesh: Mesh, seed: int, *, shares_memory: bool
) -> Resolver | None:
    """The resolver of all dynamic tables; None where there are none. Collective where there are some.

    Args:
        exchanges: of all groups.
        plan: where frames are.
        mesh: all ranks.
        seed: of initial values.
        shares_memory: whether ranks of one host may exchange ids in memory that they share.
    """
    tables = []
    for exchange in exchanges:
        if exchange.group.storage != "dynamic":
            continue
        for number, spec in enumerate(exchange.group.tables):
            grid = plan.grid(plan.table(spec.name).replicas)
            shards = shards_of(rules_of(spec), grid.place(mesh.rank)[1], grid.shards)
            owned = None
            if shards:
                (piece,) = exchange.address_map.held(number)
                assert isinstance(exchange.arena, DenseArena)
                owned = OwnedTable(spec, shards, exchange.arena, piece, seed)
            tables.append(DynamicTable(spec, grid, owned))
    return Resolver(tables, mesh, shares_memory=shares_memory and mesh.is_one_host) if tables else None
