"""Fused groups: tables of one specification travel, are looked up and are updated together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from rowmesh.tables.initializer import Initializer
from rowmesh.tables.spec import Storage, TableSpec, check_tables
from rowmesh.tables.update_rules import UpdateRule


@dataclass(frozen=True)
class TableGroup:
    """Tables with the same (dim, optimizer, initializer, dtype, storage); a table is a segment of the group.

    Source: FusedRec §3 "Embedding Fusion", equation (1). Differs: the storage and its dtype belong to the
    specification, and tables that return one vector an id (pooling "none") do not mix with pooled ones.
    """

    name: str
    tables: tuple[TableSpec, ...]

    @property
    def dim(self) -> int:
        """D."""
        return self.tables[0].dim

    @property
    def dtype(self) -> torch.dtype:
        """How rows are stored."""
        return self.tables[0].dtype

    @cached_property
    def optimizer(self) -> UpdateRule:
        """The update rule."""
        return self.tables[0].optimizer

    @property
    def initializer(self) -> Initializer:
        """The distribution that rows start from."""
        return self.tables[0].initializer

    @property
    def storage(self) -> Storage:
        """The kind of storage of the tables."""
        return self.tables[0].storage

    @cached_property
    def stores_rows(self) -> bool:
        """Whether rows are stored, as a plan says; otherwise they are computed from cores."""
        return self.tables[0].stores_rows

    @cached_property
    def takes_any_id(self) -> bool:
        """Whether any int64 is an id; otherwise ids are rows."""
        return self.tables[0].takes_any_id

    @cached_property
    def caches_rows(self) -> bool:
        """Whether the rows in use are in fast memory, and all rows in a backing store."""
        return self.tables[0].caches_rows

    @property
    def num_rows(self) -> int:
        """Rows of all tables together."""
        return sum(table.num_rows for table in self.tables)

    @property
    def is_sequence(self) -> bool:
        """Whether the group returns one vector an id instead of one a bag."""
        return self.tables[0].pooling == "none"

    @property
    def features(self) -> tuple[str, ...]:
        """The features of all tables, table by table."""
        return tuple(feature for table in self.tables for feature in table.features)

    @cached_property
    def feature_bounds(self) -> tuple[int, ...]:
        """Where the features of each table begin among those of the group, and where the last one's end."""
        return tuple(accumulate((len(table.features) for table in self.tables), initial=0))


def fuse(tables: Sequence[TableSpec], replicas: Mapping[str, int] | None = None) -> tuple[TableGroup, ...]:
    """Groups tables by specification, in the order in which specifications appear.

    Args:
        tables: to group.
        replicas: of each table, where some have several; they count as part of the specification.

    Raises:
        ConfigurationError: names or features clash, or there is no table.

    Example:
        >>> user, item = TableSpec(name="user", num_rows=9, dim=8), TableSpec(name="item", num_rows=5, dim=8)
        >>> [group.name for group in fuse([user, item, TableSpec(name="tag", num_rows=3, dim=4)])]
        ['dim8_row_wise_adagrad', 'dim4_row_wise_adagrad']
    """
    check_tables(tables)
    groups: dict[tuple[object, ...], list[TableSpec]] = {}
    for table in tables:
        count = replicas.get(table.name, 1) if replicas else 1
        is_sequence = table.pooling == "none"
        key = (table.dim, table.optimizer, table.initializer, table.dtype, is_sequence, table.storage, count)
        key += (table.frozen,)
        groups.setdefault(key, []).append(table)
    names: set[str] = set()
    fused = []
    for members in groups.values():
        name = _unused(_describe(members[0]), names)
        names.add(name)
        fused.append(TableGroup(name, tuple(members)))
    return tuple(fused)


def _describe(table: TableSpec) -> str:
    parts = [f"dim{table.dim}", table.optimizer.name]
    if table.dtype != torch.float32:
        parts.append(str(table.dtype).removeprefix("torch."))
    if table.storage != "dense":
        parts.append(table.storage)
    if table.pooling == "none":
        parts.append("sequence")
    if table.frozen:
        parts.append("frozen")
    return "_".join(parts)


def _unused(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate
