"""Paired differences: what a change does where everything else of a run, its seed and its data, is the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, and Student's confidence interval: mean ± half.

    Attributes:
        mean: of the differences.
        half: half the width; infinite where there is one difference only.
        count: how many there are.

    Example:
        >>> interval = Interval.of([1.0, 2.0, 3.0])
        >>> str(interval), interval.excludes_zero
        ('2.000 ± 2.484', False)
    """

    mean: float
    half: float
    count: int

    @staticmethod
    def of(differences: Sequence[float]) -> Interval:
        """Of one difference a seed."""
        count = len(differences)
        if count < 2:
            return Interval(float(differences[0]), math.inf, count)
        quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1))
        return Interval(float(np.mean(differences)), quantile * float(np.std(differences, ddof=1)) / count**0.5, count)

    @property
    def excludes_zero(self) -> bool:
        """Whether the differences are significant."""
        return abs(self.mean) > self.half

    def as_record(self) -> dict[str, float | int | bool | None]:
        """For JSON, which has no infinity."""
        half = round(self.half, 5) if math.isfinite(self.half) else None
        return {"mean": round(self.mean, 5), "half": half, "seeds": self.count, "excludes_zero": self.excludes_zero}

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"


def relative_gaps(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """How many percent each value lies above the base of the same seed.

    >>> [round(gap, 6) for gap in relative_gaps([1.01, 0.98], [1.0, 1.0])]
    [1.0, -2.0]
    """
    return [100 * (value / of - 1) for value, of in zip(values, base, strict=True)]
