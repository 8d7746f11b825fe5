"""Counters: what the exchange moved, cumulative since the start."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass
class CommonCounters:
    """Totals of the messages that are no keys, rows or gradients, on one rank: counts of those, and what ranks compare
    before an update. All 0 where no messages are sent (one-sided on CPUs, or one rank).

    Attributes:
        all_to_all_rounds: collective rounds.
        all_gathers: collective calls that say how many sums of copied rows will come.
        bytes_sent, bytes_received: to and from other ranks.
    """

    all_to_all_rounds: int = 0
    all_gathers: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    def add_received(self, num_bytes: int) -> None:
        """Adds what this rank read of others."""
        self.bytes_received += num_bytes


@dataclass
class SyncCounters(CommonCounters):
    """Totals of synchronizing the replicas of one group, on one rank; those of the first group include the counts of
    all groups.

    Attributes:
        rows: rows sent to other replicas.
    """

    rows: int = 0

    def add_rows(self, count: int) -> None:
        """Adds rows that were sent."""
        self.rows += count


@dataclass
class GroupCounters:
    """Totals of one group on one rank.

    Training counts the same under every transport, but for `all_to_all_rounds` and `bytes_sent`: under one-sided
    nothing is sent, since peers read. A look-up that no update follows is counted as far as it goes: its rows are
    received, and under the collective transport its slots too, which one-sided owners never see.

    Attributes:
        group: the group's name.
        routes: batches routed.
        pushes: updates in which the group took part, with or without gradients for rows of this rank.
        ids: ids looked up.
        unique_ids: of these, distinct within their batch and table.
        all_to_all_rounds: collective rounds for this group alone (`CommonCounters` has those for all groups).
        bytes_sent, bytes_received: to and from other ranks: slots, rows and gradients, whether they are sent or read.
        all_gathers: collective calls that keep copies of rows equal, among all ranks, a node, or the ranks with the
            same place in their nodes.
        synchronization: the same of synchronizing replicas, where tables have replicas.
        out_of_range: feature → ids outside its table.
        tables: the group's tables.
        device: where distinct rows are counted; None: by the host.
        distinct: int64 `[S]` on the device: distinct rows of each table that were counted there, on the stream that
            updates rows; waited for when they are read.
    """

    group: str
    routes: int = 0
    pushes: int = 0
    ids: int = 0
    unique_ids: int = 0
    all_to_all_rounds: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    all_gathers: int = 0
    synchronization: SyncCounters = field(default_factory=SyncCounters)
    out_of_range: dict[str, int] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    device: torch.device | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._accesses = np.zeros(len(self.tables), np.int64)
        self._distinct = np.zeros(len(self.tables), np.int64)
        self.distinct = torch.zeros(len(self.tables), dtype=torch.int64, device=self.device or "cpu")

    @property
    def table_accesses(self) -> dict[str, int]:
        """Table → ids of all ranks that were requested from this rank; counted at updates."""
        return dict(zip(self.tables, self._accesses.tolist(), strict=True))

    @property
    def table_distinct(self) -> dict[str, int]:
        """Table → distinct rows among them, update by update; waits for the device."""
        numbers = self._distinct + self.distinct.cpu().numpy()
        return dict(zip(self.tables, numbers.tolist(), strict=True))

    def add_route(self, ids: int, unique_ids: int = 0) -> None:
        """Adds a batch that was routed; a device's unique ids are known later."""
        self.routes += 1
        self.ids += ids
        self.unique_ids += unique_ids

    def add_ids(self, count: int) -> None:
        """Adds ids of a batch that was routed before: those in bags whose sums travel."""
        self.ids += count

    def add_unique(self, count: int) -> None:
        """Adds unique ids of a batch that was routed before."""
        self.unique_ids += count

    def add_received(self, num_bytes: int) -> None:
        """Adds what this rank read of others."""
        self.bytes_received += num_bytes

    def add_push(self) -> None:
        """Adds an update in which the group took part."""
        self.pushes += 1

    def count_outside(self, feature: str, count: int) -> None:
        """Adds ids of a feature that are no rows of its table."""
        self.out_of_range[feature] = self.out_of_range.get(feature, 0) + count

    def count_tables(
        self, accesses: np.ndarray, offsets: np.ndarray, num_segments: int | None = None, received_bytes: int = 0
    ) -> None:
        """Adds the requests to this rank in one update; segments are tables, once for each kind of rows.

        Args:
            accesses: ids by segment, `[S′]`.
            offsets: of distinct rows, `[S′ + 1]`.
            num_segments: the first ones, where rows of these alone are counted.
            received_bytes: what this rank read of others for it.
        """
        self.bytes_received += received_bytes
        if num_segments is not None:
            offsets = np.minimum(offsets, offsets[num_segments])
        num_tables, distinct = len(self.tables), offsets[1:] - offsets[:-1]
        if len(accesses) != num_tables:  # else as they are: a sum costs more than what follows
            accesses = accesses.reshape(-1, num_tables).sum(0)
            distinct = distinct.reshape(-1, num_tables).sum(0)
        self._accesses += accesses
        self._distinct += distinct

    def add_accesses(self, accesses: np.ndarray) -> None:
        """Adds ids that were requested from this rank, by segment."""
        self._accesses += accesses.reshape(-1, len(self.tables)).sum(0)

    def add_distinct(self, distinct: np.ndarray) -> None:
        """Adds distinct rows among them, by segment."""
        self._distinct += distinct.reshape(-1, len(self.tables)).sum(0)
