"""Counters of every step and group, summed over ranks now and then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rowmesh._support.json_lines import JsonLines

ROUNDS = "all_to_all_rounds"
TRAFFIC = ("ids", "unique_ids", ROUNDS, "bytes_sent", "bytes_received")


@dataclass(frozen=True)
class Source:
    """Counters on this rank, growing from step to step.

    Attributes:
        name: what they are written as.
        counts: has them as attributes; one that it lacks is written as 0.
        fields: their names.
    """

    name: str
    counts: object
    fields: tuple[str, ...] = TRAFFIC

    def read(self) -> list[int]:
        """All of them, now."""
        return [getattr(self.counts, field, 0) for field in self.fields]


class CounterLog:
    """Writes what every step added to the counters, one line for each step and source.

    A step costs no communication: each rank keeps its numbers until `flush` sums them over ranks.
    Rounds are the same on every rank and are not summed.

    Args:
        sources: read after every step.
        lines: where to write; only the writer of rank 0 writes.
        group: the process group; None for a single process.
    """

    def __init__(self, sources: Sequence[Source], lines: JsonLines, group: dist.ProcessGroup | None = None) -> None:
        self._sources, self._lines, self._group = tuple(sources), lines, group
        are_rounds = [field == ROUNDS for source in sources for field in source.fields]
        self._are_rounds = torch.tensor(are_rounds, device="cpu")
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

    def flush(self) -> dict[str, dict[str, int]]:
        """Sums the noted steps over ranks and writes them. Collective: every rank calls it.

        Returns:
            By source and field: the sum over these steps; empty where there are none.
        """
        added: dict[str, dict[str, int]] = {}
        if not self._rows:
            return added
        own = torch.tensor(self._rows, dtype=torch.int64, device="cpu")
        counts = own.clone()
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        for step, row in zip(self._steps, torch.where(self._are_rounds, own, counts).tolist(), strict=True):
            values = iter(row)
            for source in self._sources:
                record: dict[str, Any] = {field: next(values) for field in source.fields}
                self._lines.write(step=step, group=source.name, **record)
                total = added.setdefault(source.name, dict.fromkeys(source.fields, 0))
                for field, value in record.items():
                    total[field] += value
        self._steps.clear()
        self._rows.clear()
        return added

    def _read(self) -> list[int]:
        return [value for source in self._sources for value in source.read()]
