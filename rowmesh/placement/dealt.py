"""Dealt placement: the rows of every table go round the ranks by arithmetic.

The owner of row r of table t is (r + t) mod W and its place among that owner's rows is r div W. After preparation
rows are in order of frequency, so dealing gives every rank the same share of each table's head; the shift by t keeps
the most frequent rows of all tables from meeting on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from rowmesh.errors import ConfigurationError

MAX_SLOTS = 2**32 - 1


@dataclass(frozen=True)
class DealtPlacement:
    """Where the rows of a group's tables are.

    Attributes:
        num_rows: of each table.
        world_size: W.

    Example:
        >>> placement = DealtPlacement((5, 3), world_size=2)
        >>> [placement.locate(1, row) for row in range(3)]
        [(1, 3), (0, 3), (1, 4)]
        >>> placement.rows_of(table=1, rank=1)
        range(0, 3, 2)
    """

    num_rows: tuple[int, ...]
    world_size: int

    def __post_init__(self) -> None:
        if self.num_slots > MAX_SLOTS:
            raise ConfigurationError(
                f"a rank would hold {self.num_slots:,} rows of one group, more than {MAX_SLOTS:,}; use more ranks"
            )

    @property
    def bases(self) -> tuple[int, ...]:
        """The first slot of each table, the same on every rank."""
        bases, total = [], 0
        for n in self.num_rows:
            bases.append(total)
            total += -(-n // self.world_size)
        return tuple(bases)

    @property
    def shifts(self) -> tuple[int, ...]:
        """What each table's deal is shifted by."""
        return tuple(table % self.world_size for table in range(len(self.num_rows)))

    @property
    def num_slots(self) -> int:
        """Slots a rank needs; at most one a table stays unused."""
        return sum(-(-n // self.world_size) for n in self.num_rows)

    def locate(self, table: int, row: int) -> tuple[int, int]:
        """(owner, slot) of a row. `rowmesh.ops.route` does this for all ids of a batch."""
        owner = (row + self.shifts[table]) % self.world_size
        return owner, self.bases[table] + row // self.world_size

    def rows_of(self, table: int, rank: int) -> range:
        """The rows of a table that a rank owns, in the order of their slots."""
        first = (rank - self.shifts[table]) % self.world_size
        return range(first, self.num_rows[table], self.world_size)
