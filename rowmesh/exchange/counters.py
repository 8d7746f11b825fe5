"""Counters: what the exchange of a group moved, cumulative since the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class GroupCounters:
    """Totals of one group on one rank.

    Attributes:
        group: the group's name.
        routes: batches routed.
        pushes: updates applied.
        ids: ids looked up.
        unique_ids: of these, distinct within their batch and table.
        all_to_all_rounds: collective rounds for this group (the round of the counts is the collection's).
        bytes_sent, bytes_received: to and from other ranks; one-sided reads count as received.
        out_of_range: feature → ids outside its table.
        table_accesses: table → ids of all ranks that fell on rows this rank owns.
        table_distinct: table → distinct rows among them, batch by batch.
    """

    group: str
    routes: int = 0
    pushes: int = 0
    ids: int = 0
    unique_ids: int = 0
    all_to_all_rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    out_of_range: dict[str, int] = field(default_factory=dict)
    table_accesses: dict[str, int] = field(default_factory=dict)
    table_distinct: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, group: str, tables: Sequence[str]) -> GroupCounters:
        """All zero."""
        return cls(group, table_accesses=dict.fromkeys(tables, 0), table_distinct=dict.fromkeys(tables, 0))

    def count_tables(self, accesses: Sequence[int], distinct: Sequence[int]) -> None:
        """Adds what the owner saw of each table in one update."""
        for name, seen, rows in zip(self.table_accesses, accesses, distinct, strict=True):
            self.table_accesses[name] += seen
            self.table_distinct[name] += rows
