"""Turning timings into the numbers that are quoted."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any


def slowest(answers: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Seconds of each step, of the rank that took longest: a step is over when its last rank is.

    >>> slowest([{"seconds": {"step": [1.0, 4.0]}}, {"seconds": {"step": [2.0, 3.0]}}], "step")
    [2.0, 4.0]
    """
    return [max(step) for step in zip(*(answer["seconds"][name] for answer in answers), strict=True)]


def summarize(seconds: Sequence[float], name: str = "step") -> dict[str, float | int]:
    """Median, 10th and 90th percentile in milliseconds.

    >>> summarize([0.003, 0.001, 0.002])
    {'step_ms': 2.0, 'step_ms_p10': 1.0, 'step_ms_p90': 3.0, 'timed_steps': 3}
    """
    ordered = sorted(second * 1e3 for second in seconds)
    count = len(ordered)
    return {
        f"{name}_ms": round(statistics.median(ordered), 4),
        f"{name}_ms_p10": round(ordered[count // 10], 4),
        f"{name}_ms_p90": round(ordered[min(count * 9 // 10, count - 1)], 4),
        "timed_steps": count,
    }


def median(values: Sequence[float], digits: int = 3) -> float:
    """The median, rounded."""
    return round(statistics.median(values), digits)


def cores() -> int:
    """Cores of this machine that processes may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
