"""Score bins: samples and positives by score, few enough to be kept with a run, for ROC curves and calibration.

Bins hold about equally many samples. They are cut between different scores, so that the points that they give lie on
the exact ROC curve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Labels = npt.NDArray[np.uint8]
Keys = npt.NDArray[np.uint64]

MAX_BINS = 200
_SIGN = np.uint32(1 << 31)
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class ScoreBins:
    """Bins of scores, from the lowest scores up; empty without samples.

    Attributes:
        highest: the highest logit in each bin.
        samples: how many samples each bin has.
        positives: how many of them have label 1.
        predicted: the sum of their predicted probabilities.
    """

    highest: tuple[float, ...]
    samples: tuple[int, ...]
    positives: tuple[int, ...]
    predicted: tuple[float, ...]

    @classmethod
    def of(cls, keys: Keys, most: int = MAX_BINS) -> Self:
        """At most so many bins of sorted keys.

        >>> bins = ScoreBins.of(sorted_keys(np.float32([0, 0, 0, 2]), np.uint8([0, 1, 0, 1])), most=2)
        >>> bins.samples, bins.positives, bins.highest
        ((3, 1), (1, 1), (0.0, 2.0))
        """
        wanted = np.arange(1, most + 1, dtype=np.int64) * len(keys) // most
        highest = keys[np.maximum(wanted, 1) - 1] | np.uint64(1) if len(keys) else keys
        stops = np.unique(np.searchsorted(keys, highest, "right"))  # behind all of the same score
        parts = [part for part in np.split(keys, stops) if len(part)]
        return cls(
            highest=tuple(float(_logits(part[-1:])[0]) for part in parts),
            samples=tuple(len(part) for part in parts),
            positives=tuple(int((part & np.uint64(1)).sum()) for part in parts),
            predicted=tuple(float(_probabilities(_logits(part)).sum()) for part in parts),
        )

    @classmethod
    def from_plain(cls, values: Any) -> Self:
        """From what was sent or written; raises where it is something else."""
        names = ("highest", "samples", "positives", "predicted")
        bins = cls(**{name: tuple(values[name]) for name in names})
        if len({len(getattr(bins, name)) for name in names}) > 1:
            raise ValueError("score bins have lists of different lengths")
        if not all(abs(float(value)) <= _LARGEST for name in names for value in getattr(bins, name)):
            raise ValueError("score bins have numbers that no evaluation gives")
        return bins


def sorted_keys(scores: Logits, labels: Labels) -> Keys:
    """A number for each sample, its score's bits in an order-preserving form with its label below, in ascending order.

    >>> [int(key & 1) for key in sorted_keys(np.float32([3, -1, 2]), np.uint8([1, 0, 1]))]
    [0, 1, 1]
    """
    bits = (scores + np.float32(0.0)).view(np.uint32)  # −0.0 + 0.0 is 0.0, its equal
    keys = np.where(bits & _SIGN, ~bits, bits | _SIGN).astype(np.uint64)  # flips the sign of positives, else all bits
    keys <<= np.uint64(1)
    keys |= labels
    keys.sort()
    return keys


def _logits(keys: Keys) -> Logits:
    """The scores that keys are of."""
    ordered = (keys >> np.uint64(1)).astype(np.uint32)
    return np.where(ordered & _SIGN, ordered ^ _SIGN, ~ordered).view(np.float32)


def _probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    values = logits.astype(np.float64)
    return np.exp(values - np.logaddexp(0.0, values))
