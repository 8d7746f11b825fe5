"""The dynamic tables of a collection: what of them may not be, and their resolver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from rowmesh.errors import ConfigurationError
from rowmesh.exchange.resolve.asked import DynamicTable
from rowmesh.exchange.resolve.averages import Averages
from rowmesh.exchange.resolve.device_tables import make_indexes
from rowmesh.exchange.resolve.resolver import Resolver
from rowmesh.mesh import Mesh
from rowmesh.mesh.grid import Grid
from rowmesh.mesh.synchronization import Synchronization
from rowmesh.mesh.together import on_all_ranks
from rowmesh.ops.dynamic_index.device import DeviceIndex
from rowmesh.placement import AddressMap, Plan
from rowmesh.tables import DenseArena, RowStore, TableGroup, TableSpec
from rowmesh.tables.dynamic.layout import rules_of, shards_of
from rowmesh.tables.dynamic.owned import OwnedTable
from rowmesh.tables.dynamic.record_layout import RecordLayout
from rowmesh.tables.dynamic.stores import RecordStore, Retry, open_records


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
    transport: str,
) -> None:
    """Raises ConfigurationError for what dynamic tables cannot be yet."""
    dynamic = [table for table in tables if table.takes_any_id]
    if synchronization.mode == "average":
        _check_average([table for table in dynamic if replicas[table.name] > 1], dynamic, replicas, synchronization)
    for table in dynamic:
        name = table.name
        if device is not None and transport == "one_sided":
            raise ConfigurationError(
                f"table {name!r} is dynamic, with rows on {device}: whoever reads them there by himself may come when "
                "they are another id's; take transport='collective' or 'auto'"
            )


def _check_average(
    averaged: Sequence[TableSpec],
    dynamic: Sequence[TableSpec],
    replicas: Mapping[str, int],
    synchronization: Synchronization,
) -> None:
    """Raises ConfigurationError where replicas of dynamic tables cannot be averaged."""
    if not averaged:
        return
    name = averaged[0].name
    counts = {table.name: replicas[table.name] for table in dynamic}
    if len(set(counts.values())) > 1:
        raise ConfigurationError(
            f"dynamic tables whose replicas are averaged must have equally many, got {counts}; give them one number, "
            "or take exact synchronization"
        )
    if synchronization.dense:
        raise ConfigurationError(
            f"table {name!r} is dynamic, and its rows have no numbers by which whole tables could be averaged; leave "
            "dense out, so that the rows of changed ids are averaged"
        )


def make_resolver(
    exchanges: Sequence[Exchange],
    plan: Plan,
    mesh: Mesh,
    seed: int,
    synchronization: Synchronization,
    *,
    shares_memory: bool,
) -> Resolver | None:
    """The resolver of all dynamic tables; None where there are none. Collective where there are some.

    Args:
        exchanges: of all groups.
        plan: where frames are.
        mesh: all ranks.
        seed: of initial values.
        synchronization: of replicas.
        shares_memory: whether ranks of one host may exchange ids in memory that they share.
    """
    tables = []
    averages = synchronization.mode == "average"
    grid = Grid(mesh.world_size)
    stores = _open_stores(exchanges, plan, mesh)
    exchanges = [exchange for exchange in exchanges if exchange.group.takes_any_id]
    indexes = _make_indexes(exchanges, plan, mesh)
    for exchange in exchanges:
        for number, spec in enumerate(exchange.group.tables):
            grid = plan.grid(plan.table(spec.name).replicas)
            replica, member = grid.place(mesh.rank)
            shards = shards_of(rules_of(spec), member, grid.shards)
            owned = None
            if shards:
                (piece,) = exchange.address_map.held(number)
                assert isinstance(exchange.arena, DenseArena)
                owned = OwnedTable(
                    spec, shards, exchange.arena, piece, seed, stores.get(spec.name), indexes.get(spec.name)
                )
            tables.append(DynamicTable(spec, Grid(grid.shards) if averages else grid, owned, replica))
    if not tables:
        return None
    if not averages or grid.replicas == 1:
        return Resolver(tables, mesh, shares_memory=shares_memory and mesh.is_one_host)
    owned_tables = {table.spec.name: table.owned for table in tables if table.owned is not None}
    # A mesh of its own: batches may be opened while rows of replicas are under way.
    replicate_mesh = mesh.part(grid.replicate_groups).with_process_group("averages of dynamic tables")
    group, averaging = mesh.part(grid.groups), Averages(owned_tables, replicate_mesh)
    return Resolver(tables, group, averaging, shares_memory=shares_memory and group.is_one_host)


def _make_indexes(exchanges: Sequence[Exchange], plan: Plan, mesh: Mesh) -> dict[str, DeviceIndex]:
    """Indexes that are on the device of the rows, by table."""
    tables, device = [], None
    for exchange in exchanges:
        device = device if exchange.arena.has_views else exchange.arena.device
        for spec in exchange.group.tables:
            grid = plan.grid(plan.table(spec.name).replicas)
            tables.append((spec, shards_of(rules_of(spec), grid.place(mesh.rank)[1], grid.shards)))
    return {} if device is None else make_indexes(tables, device, mesh.world_size)


def _open_stores(exchanges: Sequence[Exchange], plan: Plan, mesh: Mesh) -> dict[str, RecordStore]:
    """Stores for the records that this rank demotes, empty, by table. Collective where some table demotes any."""
    groups = [exchange.group for exchange in exchanges if exchange.group.takes_any_id]
    tables = [table for group in groups for table in group.tables if rules_of(table).mode == "demote"]
    stores: dict[str, RecordStore] = {}

    def open_own() -> None:
        for table in tables:
            grid, rules = plan.grid(plan.table(table.name).replicas), rules_of(table)
            if shards := shards_of(rules, grid.place(mesh.rank)[1], grid.shards):
                stores[table.name] = _open_store(table, shards, mesh.rank)

    try:
        if tables:
            on_all_ranks(mesh, "opening stores", open_own)
    except BaseException:
        for store in stores.values():
            store.close()
        raise
    return stores


def _open_store(table: TableSpec, shards: range, rank: int) -> RecordStore:
    rules = rules_of(table)
    assert rules.store is not None
    room = None if rules.store_capacity is None else sum(rules.stored_in(shard) or 0 for shard in shards)
    width, retry = RecordLayout(table).width, Retry(for_s=rules.store_retry_s)
    store = open_records(rules.store, table.name, width, max_records=room, rank=rank, retry=retry)
    try:
        store.clear(shards)
    except BaseException:
        store.close()
        raise
    return store
