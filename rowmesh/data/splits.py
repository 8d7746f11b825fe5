"""Splitter: which of train, validation and test a sample belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rowmesh.data.prepared import SPLITS
from rowmesh.errors import ConfigurationError

_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Splitter:
    """Cuts the samples of a data set into splits.

    Attributes:
        validation, test: their shares of all samples.
        how: "order": the last samples are the test split and those before them validation, for logs
            that are in order of time; "random": by a hash of (seed, position of the sample).
        seed: of the hash.

    Example:
        >>> Splitter(validation=0.2, test=0.2).assign(0, 5, total=5).tolist()
        [0, 0, 0, 1, 2]
    """

    validation: float = 0.1
    test: float = 0.1
    how: Literal["order", "random"] = "order"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.how not in ("order", "random"):
            raise ConfigurationError(f"split by must be 'order' or 'random', got {self.how!r}")
        if not (self.validation >= 0 and self.test >= 0 and self.validation + self.test < 1):
            raise ConfigurationError(
                f"validation share {self.validation} and test share {self.test} must be 0 or more "
                "and leave something for training"
            )

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that are not empty by definition."""
        return tuple(name for name, share in zip(SPLITS, (1, self.validation, self.test), strict=True) if share)

    def sizes(self, total: int) -> dict[str, int]:
        """How many of `total` samples each split has."""
        counts = np.zeros(len(SPLITS), np.int64)
        for start in range(0, total, _CHUNK):
            assigned = self.assign(start, min(start + _CHUNK, total), total=total)
            counts += np.bincount(assigned, minlength=len(SPLITS))
        return dict(zip(SPLITS, counts.tolist(), strict=True))

    def assign(self, start: int, stop: int, *, total: int) -> NDArray[np.int8]:
        """Index in `SPLITS` of each sample from `start` to `stop` of `total`."""
        positions = np.arange(start, stop, dtype=np.uint64)
        num_validation, num_test = round(total * self.validation), round(total * self.test)
        if self.how == "order":
            bounds = [total - num_validation - num_test, total - num_test]
            return np.searchsorted(bounds, positions, side="right").astype(np.int8)
        uniform = _mix(positions + np.uint64((self.seed * 0x9E3779B97F4A7C15) % 2**64)) / 2.0**64
        bounds = [1 - self.validation - self.test, 1 - self.test]
        return np.searchsorted(bounds, uniform, side="right").astype(np.int8)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
