"""Asking: a rank's distinct ids of all dynamic tables, routed to the owners of their shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rowmesh.exchange.resolve.asked import DynamicTable
from rowmesh.ops import dynamic_requests
from rowmesh.tables.dynamic.hashing import seed_of
from rowmesh.tables.dynamic.layout import owner_of_shard, rules_of
from rowmesh.tables.dynamic.state import NONE


@dataclass
class Asked:
    """The distinct ids of a batch, of one group of tables.

    Attributes:
        ids: int64 `[U]`, by table; they become rows.
        offsets: int64 `[tables + 1]`: where the ids of each table begin.
        counts: uint32 `[U]`: how often each occurs.
        is_frozen: whether nothing of them is counted.
        scores: int64 `[U]`: the largest of each, where the batch has any.
        is_distinct: whether the rows are distinct too.
    """

    ids: np.ndarray
    offsets: np.ndarray
    counts: np.ndarray
    is_frozen: bool
    scores: np.ndarray | None = None
    is_distinct: bool = True

    def note_rows(self, *, are_distinct: bool) -> None:
        """Notes whether the rows of the ids are distinct."""
        self.is_distinct = are_distinct


def largest(scores: np.ndarray, inverse: np.ndarray, count: int) -> np.ndarray:
    """The largest score of each of so many distinct ids.

    Args:
        scores: int64 `[N]`.
        inverse: `[N]`, which of the ids each is of.

    Example:
        >>> largest(np.array([3, -5, 4]), np.array([1, 0, 1]), 2).tolist()
        [-5, 4]
    """
    found = np.full(count, np.iinfo(np.int64).min)
    np.maximum.at(found, inverse, scores)
    return found


class RequestRouter:
    """Routes ids to the owners of their shards, and the rows that these answer back.

    Args:
        tables: of all groups, in their order.
        rank: this one.
        world_size: W.
    """

    def __init__(self, tables: Sequence[DynamicTable], rank: int, world_size: int) -> None:
        num_tables = len(tables)
        grids = [table.grid for table in tables]
        self._seeds = np.array([seed_of(table.spec.name) for table in tables], np.uint64)
        self._num_shards = np.array([rules_of(table.spec).num_shards for table in tables], np.uint64)
        self._starts = np.concatenate([[0], np.cumsum(self._num_shards)[:-1]]).astype(np.int64)
        owners = [owner_of_shard(rules_of(table.spec), table.grid.shards) for table in tables]
        self._member_of_shard = np.concatenate(owners).astype(np.uint16)
        self._num_members = max(grid.shards for grid in grids)
        self._ranks = np.full((num_tables, max(grid.replicas for grid in grids), self._num_members), -1, np.int64)
        for number, grid in enumerate(grids):
            for replica, ranks in enumerate(grid.groups):
                self._ranks[number, replica, : len(ranks)] = ranks
        places = np.array([[grid.place(each) for grid in grids] for each in range(world_size)])  # [W, T, 2]
        self._own, self._members = np.ascontiguousarray(places[rank, :, 0]), places[:, :, 1]
        self._all = np.arange(num_tables)
        self.answers = (places[:, :, 0] == places[rank, :, 0]).any(axis=1)  # which ranks answer this one
        self._room = np.empty((2, 0), np.int64)

    def count(self, asked: Sequence[Asked]) -> np.ndarray:
        """How many ids of each table go to each rank: int64 `[W, T]`."""
        sizes = np.zeros((len(self._all), self._num_members), np.int64)
        total = sum(len(each.ids) for each in asked)
        if total > self._room.shape[1]:
            self._room = np.empty((2, total + total // 4), np.int64)
        self._owner = self._room[0].view(np.uint16)
        table = first = 0
        for each in asked:
            members = self._owner[first : first + len(each.ids)]
            given = each.ids, each.offsets, table, self._seeds, self._num_shards, self._starts
            dynamic_requests.count(*given, self._member_of_shard, members, sizes)
            table, first = table + len(each.offsets) - 1, first + len(each.ids)
        return sizes[self._all, self._members]

    def fill(self, asked: Sequence[Asked], sizes: np.ndarray, *columns_at: np.ndarray) -> None:
        """Writes ids, counts and, if asked to, scores to the addresses of each rank's request."""
        ids_at, counts_at, *scored = columns_at
        cursors = sizes.cumsum(axis=1) - sizes
        table = first = 0
        for each in asked:
            part = slice(first, first + len(each.ids))
            given = each.ids, each.offsets, each.counts, table, self._owner[part], self._ranks, self._own
            scores = each.scores if scored and each.scores is not None else NONE
            scores_at = scored[0] if scored else ids_at
            dynamic_requests.fill(*given, scores, cursors, ids_at, counts_at, scores_at, self._room[1][part])
            table, first = table + len(each.offsets) - 1, part.stop

    def take(self, asked: Sequence[Asked], rows_at: np.ndarray) -> None:
        """Puts rows, which each rank's answer has, in the place of ids."""
        first = 0
        for each in asked:
            dynamic_requests.take_rows(self._room[1][first : first + len(each.ids)], rows_at, each.ids)
            first += len(each.ids)
