"""Table shards: what a rank holds of the tables of an engine, for programs, checkpoints and publications."""

from __future__ import annotations

from collections.abc import Sequence

from rowmesh.collection.engine import Engine
from rowmesh.errors import ConfigurationError
from rowmesh.exchange.cores import CoreShardGroup
from rowmesh.exchange.group import GroupExchange
from rowmesh.exchange.resolve.known import KnownRows, known_rows
from rowmesh.exchange.shard_group import ShardGroup
from rowmesh.tables import DenseArena, TableSpec
from rowmesh.tables.cores import Cores
from rowmesh.tables.dynamic.table_shard import DynamicShard
from rowmesh.tables.shard import CoreShard, StoredShard, TableShard, Which


def shards(engine: Engine, tables: Sequence[TableSpec], which: Which) -> list[TableShard]:
    """The shards of tables on this rank, up to date; those of "group" as they are, without waiting."""
    return [_shard(engine, table, which) for table in tables]


def _shard(engine: Engine, table: TableSpec, which: Which) -> TableShard:
    find = engine.shard_groups.place_of if which == "group" else engine.find
    shard_group, exchange, number = find(table.name)
    if isinstance(shard_group, CoreShardGroup):
        return CoreShard(table, shard_group.cores(table.name))
    if not exchange.is_dynamic:
        return _stored_shard(table, shard_group, exchange, number, which)
    resolver = engine.resolver
    assert resolver is not None
    assert isinstance(exchange.arena, DenseArena)
    if which != "group":
        engine.pause()
        resolver.check_idle("save and load")
    found = resolver.tables[table.name]
    owned = None if which == "owned" and found.replica else found.owned  # the first replica has it for all
    how = {"step": resolver.step, "replica": found.replica, "set_step": resolver.set_dynamic_step}
    return DynamicShard(table, owned, exchange.arena, **how)


def stored_shard(engine: Engine, table: str, which: Which) -> StoredShard:
    """The rows of a table that has them by number, up to date on this rank."""
    shard_group, exchange, number = engine.find(table)
    if exchange.is_dynamic:
        raise ConfigurationError(
            f"table {table!r} is dynamic: its rows have ids and no numbers; known_rows({table!r}) gives them"
        )
    if isinstance(shard_group, CoreShardGroup):
        raise ConfigurationError(
            f"table {table!r} is a tensor-train table: its rows are computed where they are looked up, and stored "
            f"nowhere; cores({table!r}) gives what they are computed from"
        )
    return _stored_shard(exchange.group.tables[number], shard_group, exchange, number, which)


def _stored_shard(
    table: TableSpec, shard_group: ShardGroup, exchange: GroupExchange, number: int, which: Which
) -> StoredShard:
    pieces = exchange.address_map.held(number) if which == "held" else exchange.address_map.owned(number)
    if which == "owned":
        pieces = map(shard_group.share, pieces)
    return StoredShard(table, exchange.arena, list(pieces))


def known_ids(engine: Engine, table: str) -> KnownRows:
    """The ids of a dynamic table that this rank knows, and their rows."""
    resolver = engine.resolver
    if resolver is None or table not in resolver.tables:
        raise ConfigurationError(f"{table!r} is no dynamic table, see local_rows")
    _, exchange, _ = engine.find(table)
    resolver.check_idle("read known rows")
    found = resolver.tables[table]
    return known_rows(found.spec, found.owned, exchange.arena)


def cores(engine: Engine, table: str) -> Cores:
    """The cores of a tensor-train table."""
    shard_group, _, _ = engine.find(table)
    if not isinstance(shard_group, CoreShardGroup):
        raise ConfigurationError(f"table {table!r} is dense and has no cores; held_rows({table!r}) gives its rows")
    return shard_group.cores(table)
