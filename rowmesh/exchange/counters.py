"""Counters: what the exchange of a group moved, cumulative since the start."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


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
        tables: the group's tables.
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
    tables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._accesses = np.zeros(len(self.tables), np.int64)
        self._distinct = np.zeros(len(self.tables), np.int64)

    @property
    def table_accesses(self) -> dict[str, int]:
        """Table → ids of all ranks that fell on rows this rank owns."""
        return dict(zip(self.tables, self._accesses.tolist(), strict=True))

    @property
    def table_distinct(self) -> dict[str, int]:
        """Table → distinct rows among them, batch by batch."""
        return dict(zip(self.tables, self._distinct.tolist(), strict=True))

    def count_tables(self, accesses: np.ndarray, offsets: np.ndarray) -> None:
        """Adds what the owner saw in one update: ids by table `[S]`, offsets of the distinct rows `[S + 1]`."""
        self._accesses += accesses
        self._distinct += offsets[1:]
        self._distinct -= offsets[:-1]
