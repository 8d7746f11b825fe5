"""Traffic: what `counters.jsonl` of a run adds up to, read once from the beginning to the end."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rowmesh.run.run_log import ALL_GROUPS, FAST_MEMORY, REPLICAS

_NO_COUNTS = ("step", "group", "time")


@dataclass
class Traffic:
    """Counts over all ranks.

    Attributes:
        groups: group of tables → counter → sum over all steps.
        shared: the same of messages that serve all groups, and of what keeps replicas together.
        tiers: tiered group → counter → sum.
        steps: of the file, in order.
        received: bytes that ranks received in each of them, of rows, gradients and requests.
    """

    groups: dict[str, dict[str, int]] = field(default_factory=dict)
    shared: dict[str, dict[str, int]] = field(default_factory=dict)
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    steps: array[int] = field(default_factory=lambda: array("q"))
    received: array[int] = field(default_factory=lambda: array("q"))

    @property
    def bytes_per_step(self) -> float | None:
        """The median of a step: a smaller last batch of an epoch does not count; None without counters."""
        return float(median(self.received)) if self.received else None

    def unique_share(self, group: str) -> float | None:
        """The share of a group's ids that are distinct within their batch; None without ids."""
        counts = self.groups[group]
        return counts["unique_ids"] / counts["ids"] if counts.get("ids") else None


def read_traffic(lines: Iterable[Mapping[str, Any]]) -> Traffic:
    """Adds the lines up."""
    traffic = Traffic()
    for line in lines:
        name, step = str(line.get("group")), line["step"]
        sums = _kind(traffic, name).setdefault(name.removesuffix(f", {FAST_MEMORY}"), {})
        for counter, value in line.items():
            if counter not in _NO_COUNTS and isinstance(value, int):
                sums[counter] = sums.get(counter, 0) + value
        if not traffic.steps or traffic.steps[-1] != step:
            traffic.steps.append(step)
            traffic.received.append(0)
        if name not in (ALL_GROUPS,) and isinstance(line.get("bytes_received"), int):
            traffic.received[-1] += line["bytes_received"]
    return traffic


def hit_rate(counts: Mapping[str, int]) -> float | None:
    """The share of pinned rows that were in fast memory, or were never written and so need not be read.

    >>> hit_rate({"rows_found": 90, "rows_read": 5, "rows_initialized": 5})
    0.95
    """
    found = counts.get("rows_found", 0) + counts.get("rows_initialized", 0)
    total = found + counts.get("rows_read", 0)
    return found / total if total else None


def _kind(traffic: Traffic, name: str) -> dict[str, dict[str, int]]:
    if name.endswith(f", {FAST_MEMORY}"):
        return traffic.tiers
    return traffic.shared if name == ALL_GROUPS or name.endswith(f", {REPLICAS}") else traffic.groups
