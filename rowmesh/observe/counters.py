"""Counters of every step and group, summed over ranks now and then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rowmesh.observe.json_lines import JsonLines

FIELDS = ("ids", "unique_ids", "all_to_all_rounds", "bytes_sent", "bytes_received")


class Counts(Protocol):
    """Counters on this rank, growing from step to step: of a group of tables, or of messages that serve all groups.

    Those of a group have `ids` and `unique_ids` too.
    """

    all_to_all_rounds: int
    bytes_sent: int
    bytes_received: int


class CounterLog:
    """Writes what every step added to the counters, one line for each step and group.

    A step costs no communication: each rank keeps its numbers until `flush` sums them over ranks.
    Rounds are the same on every rank and are not summed.

    Args:
        names: what each of the counters is written as: the groups' names.
        counters: the groups' counters, read after every step. A field that one does not have is written as 0.
        lines: where to write; only the writer of rank 0 writes.
        group: the process group; None for a single process.
    """

    def __init__(
        self,
        names: Sequence[str],
        counters: Sequence[Counts],
        lines: JsonLines,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._names, self._counters, self._lines, self._group = tuple(names), counters, lines, group
        self._steps: list[int] = []
        self._rows: list[list[int]] = []
        self._last = self._read()

    def skip(self) -> None:
        """Leaves out what happened since the last step (an evaluation)."""
        self._last = self._read()

    def record(self, step: int) -> None:
        """Notes what `step` added on this rank."""
        now = self._read()
        self._steps.append(step)
        self._rows.append([after - before for before, after in zip(self._last, now, strict=True)])
        self._last = now

    def flush(self) -> None:
        """Sums the noted steps over ranks and writes them. Collective: every rank calls it."""
        if not self._rows:
            return
        counts = torch.tensor(self._rows, dtype=torch.int64, device="cpu").view(len(self._rows), len(self._names), -1)
        rounds = FIELDS.index("all_to_all_rounds")
        own_rounds = counts[:, :, rounds].clone()
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        counts[:, :, rounds] = own_rounds
        for step, groups in zip(self._steps, counts.tolist(), strict=True):
            for name, values in zip(self._names, groups, strict=True):
                record: dict[str, Any] = dict(zip(FIELDS, values, strict=True))
                self._lines.write(step=step, group=name, **record)
        self._steps.clear()
        self._rows.clear()

    def _read(self) -> list[int]:
        return [getattr(counts, field, 0) for counts in self._counters for field in FIELDS]
