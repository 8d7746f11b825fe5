"""Demand: what one step is expected to ask for, run by run, as one flat table of numbers.

All tables are laid end to end, so that cost and strategies are a few array operations over runs of equally frequent
rows (tens of thousands), whatever the number of rows (hundreds of millions).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rowmesh.placement.plan import TableShape

if TYPE_CHECKING:
    from rowmesh.placement.profile import Profile
    from rowmesh.placement.request import Request

WORD_BYTES = 4  # of an id, or of the length of a bag
FEATURE_BYTES = 8  # of what is said of a feature's bags


@dataclass(frozen=True, eq=False)
class Demand:
    """How often each row moves in a step. K runs; all rates are of one row of a run.

    With deduplication a row moves once for everyone behind the sender, so the rates are chances: 1 − (1 − f)^b for a
    rank's batch of b samples, and the same for the batches of a node and of all ranks. Without, every access moves
    and nothing is merged, except that the gradients of all ranks make one update: `world` is a chance always.

    Attributes:
        shapes: of the tables.
        first_row: int64 [T + 1], where each table starts when all are laid end to end.
        starts: int64 [K + 1], first row of each run, in the same numbering.
        table: int64 [K], the table of each run.
        rank: float64 [K], how often one rank asks for a row.
        node: float64 [K], how often the ranks of a node do, together.
        world: float64 [K], the chance that any rank does.
        world_size: W.
        ranks_per_node: G.
        is_rounded: whether values and gradients travel as bfloat16; sums of copies do not.
        ids: float64 [T], of one rank's bags of each table of the profile.
        bags: float64 [T], one rank's bags.
        bags_bytes: float64 [T], what these are in a message to an owner: ids, lengths and weights.
    """

    shapes: tuple[TableShape, ...]
    first_row: np.ndarray
    starts: np.ndarray
    table: np.ndarray
    rank: np.ndarray
    node: np.ndarray
    world: np.ndarray
    world_size: int
    ranks_per_node: int
    is_rounded: bool
    ids: np.ndarray
    bags: np.ndarray
    bags_bytes: np.ndarray

    @staticmethod
    def of(profile: Profile, world_size: int, ranks_per_node: int, request: Request, *, share: float = 1.0) -> Demand:
        """The demand of batches of `request.batch_size` samples a rank.

        Of tables that all ranks split, these read `share`.
        """
        batch_size, deduplicated = request.batch_size, request.deduplicated
        G, tables = ranks_per_node, range(len(profile.tables))
        first_row = np.cumsum([0] + [table.shape.num_rows for table in profile.tables])
        lengths = np.concatenate([table.lengths for table in profile.tables])
        runs = [len(table.lengths) for table in profile.tables]

        def presence(ranks: int) -> np.ndarray:
            of_these = share * ranks / world_size
            return np.concatenate([profile.presence(t, batch_size * ranks, share=of_these) for t in tables])

        if deduplicated:
            rank, node = presence(1), presence(G)
        else:
            rank = np.concatenate([profile.access_rate(t) for t in tables]) * float(batch_size)
            node = rank * G
        ids = float(batch_size) * np.array([profile.ids_per_sample(t) for t in tables])
        features = np.array([table.num_features for table in profile.tables], np.float64)
        bags = batch_size * features
        jagged = batch_size * np.array([table.num_jagged for table in profile.tables], np.float64)
        id_bytes = np.array([WORD_BYTES + table.weight_bytes for table in profile.tables])
        return Demand(
            tuple(table.shape for table in profile.tables),
            first_row,
            np.concatenate([[0], np.cumsum(lengths)]),
            np.repeat(np.arange(len(runs)), runs),
            rank,
            node,
            presence(world_size),
            world_size,
            ranks_per_node,
            request.wire_dtype == "bfloat16",
            ids,
            bags,
            id_bytes * ids + WORD_BYTES * jagged + FEATURE_BYTES * features,
        )

    @cached_property
    def lengths(self) -> np.ndarray:
        """Rows of each run, [K]."""
        return np.diff(self.starts)

    @cached_property
    def value_bytes(self) -> np.ndarray:
        """Bytes of a row's value, [T]."""
        return np.array([shape.value_bytes for shape in self.shapes], np.float64)

    @cached_property
    def gradient_bytes(self) -> np.ndarray:
        """Bytes of a row's gradient, [T]."""
        return np.array([shape.gradient_bytes for shape in self.shapes], np.float64)

    @property
    def sent_gradient_bytes(self) -> np.ndarray:
        """Bytes of a row's gradient in a message to its owner, [T]."""
        return self.gradient_bytes / 2 if self.is_rounded else self.gradient_bytes

    @property
    def sent_value_bytes(self) -> np.ndarray:
        """Bytes of a row's value in a message, [T]; one that is stored as bfloat16 travels as it is."""
        return np.minimum(self.value_bytes, self.sent_gradient_bytes) if self.is_rounded else self.value_bytes

    @cached_property
    def row_bytes(self) -> np.ndarray:
        """Memory that a copy of a row takes, [T]."""
        return np.array([shape.row_bytes for shape in self.shapes], np.int64)

    @property
    def num_nodes(self) -> int:
        """H."""
        return self.world_size // self.ranks_per_node

    def with_tails(self) -> Demand:
        """The demand with the rows from the last rise of each table on, its *tail*, as a table of their own.

        Prepared data end every table with a row for all rare ids, which is often among the most read: so it is placed
        by its own demand. A tail follows its table under the same name.
        """
        rises = 1 + np.flatnonzero((self.rank[1:] > self.rank[:-1] * (1 + 1e-12)) & (self.table[1:] == self.table[:-1]))
        if not len(rises):
            return self
        tails = rises[np.append(np.diff(self.table[rises]) != 0, True)]
        first_row = np.union1d(self.first_row, self.starts[tails])
        whole = np.searchsorted(self.first_row, first_row[:-1], "right") - 1
        shapes = [replace(self.shapes[t], num_rows=n) for t, n in zip(whole, np.diff(first_row).tolist(), strict=True)]
        table = np.searchsorted(first_row, self.starts[:-1], "right") - 1
        return replace(self, shapes=tuple(shapes), first_row=first_row, table=table)

    def falling(self) -> Demand:
        """The demand with runs pooled until no row of a table is asked for more often than one before it.

        A plan gives copies to prefixes. Where rows are not in order of demand (an unsorted table, or counted batches
        that do not follow accesses), the best prefixes are those of the pooled demand.
        """
        heads = _pooled(self.rank * self.lengths, self.lengths, self.table)
        if len(heads) == len(self.table):
            return self
        lengths = np.add.reduceat(self.lengths, heads)
        rates = np.stack([self.rank, self.node, self.world]) * self.lengths
        rank, node, world = np.add.reduceat(rates, heads, axis=1) / lengths
        starts = np.append(self.starts[heads], self.starts[-1])
        return replace(self, starts=starts, table=self.table[heads], rank=rank, node=node, world=world)


def _pooled(sums: np.ndarray, lengths: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The first run of each pool, when neighbours of a table are pooled until means fall (pool adjacent violators)."""
    mean = sums / lengths
    if not np.any((mean[1:] > mean[:-1] * (1 + 1e-12)) & (table[1:] == table[:-1])):
        return np.arange(len(table))
    pools: list[tuple[int, float, int]] = []  # first run, sum, rows
    tables = table.tolist()
    for run, (total, rows) in enumerate(zip(sums.tolist(), lengths.tolist(), strict=True)):
        first = run
        while (
            pools and tables[pools[-1][0]] == tables[run] and total / rows > pools[-1][1] / pools[-1][2] * (1 + 1e-12)
        ):
            first, before, rows_before = pools.pop()
            total, rows = total + before, rows + rows_before
        pools.append((first, total, rows))
    return np.array([first for first, _, _ in pools])
