"""Counters of a dynamic table on one rank, cumulative since the start."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class DynamicCounters:
    """Numbers of distinct ids, added up over batches, of the shards of this rank.

    Attributes:
        table: its name.
        steps: batches opened for training.
        hits: ids that it knew.
        admitted: ids that entered.
        evicted: ids that left.
        promoted: ids that came back from the store to which they had been demoted.
        forgotten: ids for which the store had no room any more.
        guests: ids that were not admitted: they read their initial row, and their gradients are dropped.
        dropped: occurrences of these.
        found: in evaluation, ids that it knew.
        missing: in evaluation, ids that it did not know.
    """

    table: str
    steps: int = 0
    hits: int = 0
    admitted: int = 0
    evicted: int = 0
    guests: int = 0
    dropped: int = 0
    found: int = 0
    missing: int = 0
    promoted: int = 0
    forgotten: int = 0

    def add_found(self, count: int) -> None:
        """Adds ids that it knew, in evaluation."""
        self.found += count

    def set_found(self, found: int, missing: int) -> None:
        """Says how many ids it knew and did not know in evaluation, as before an evaluation that does not count."""
        self.found, self.missing = found, missing

    def add(self, others: DynamicCounters) -> None:
        """Counts what others have counted."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(others, name))

    def subtract(self, others: DynamicCounters) -> None:
        """Takes `add` back."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) - getattr(others, name))

    @property
    def hit_rate(self) -> float:
        """The share of hits among the ids of training."""
        total = self.hits + self.admitted + self.guests + self.promoted
        return self.hits / total if total else 0.0


_NUMBERS = tuple(each.name for each in fields(DynamicCounters) if each.name != "table")
