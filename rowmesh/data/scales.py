"""Standardising dense features: which columns get a logarithm, and their means and deviations in training.

A column is heavy-tailed where it is never negative and its skewness is above SKEWED, of which a logarithm takes at
least half. Counts, prices and durations are; a share, an age or a flag is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

SKEWED = 1.0


@dataclass(frozen=True, kw_only=True)
class DenseScale:
    """How one dense column is standardised.

    Attributes:
        name: the feature.
        log1p: whether log(1 + max(x, 0)) comes first.
        mean, std: of the training split, after the logarithm; std is 1 where all values are one.
        missing: the share of samples without a value, by split.

    Example:
        >>> price = DenseScale(name="price", log1p=False, mean=3.0, std=2.0, missing={})
        >>> price.apply(np.array([3.0, 5.0, np.nan])).tolist()
        [0.0, 1.0, 0.0]
    """

    name: str
    log1p: bool
    mean: float
    std: float
    missing: Mapping[str, float]

    def apply(self, values: NDArray[np.floating]) -> NDArray[np.float32]:
        """Raw values `[n]` as the model sees them; NaN, which stands for missing, becomes 0."""
        wide = values.astype(np.float64)
        scaled = ((np.log1p(np.maximum(wide, 0)) if self.log1p else wide) - self.mean) / self.std
        return np.where(np.isnan(wide), 0.0, scaled).astype(np.float32)


def scale_columns(
    columns: Iterable[NDArray[np.floating]], scales: Sequence[DenseScale] | None
) -> list[NDArray[np.float32]]:
    """Checked dense columns `[n]` as the model sees them; NaN, which stands for missing, becomes 0.

    Args:
        columns: of a reader's blocks, in the schema's order.
        scales: one a column; None where the columns are not standardised.
    """
    if scales is None:
        return [np.nan_to_num(values, nan=0.0).astype(np.float32, copy=False) for values in columns]
    return [scale.apply(values) for scale, values in zip(scales, columns, strict=True)]


@dataclass
class _Moments:
    """Count, mean, and sums of squared and cubed distances from it, of `[K]` columns, over any number of blocks."""

    count: NDArray[np.float64]
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]
    cubes: NDArray[np.float64]

    @staticmethod
    def of(columns: NDArray[np.float64]) -> _Moments:
        """The moments of columns `[K, n]`, without NaN."""
        known = ~np.isnan(columns)
        count = known.sum(axis=1).astype(np.float64)
        mean = np.where(known, columns, 0).sum(axis=1) / np.maximum(count, 1)
        distance = np.where(known, columns - mean[:, None], 0)
        squares = distance**2
        return _Moments(count, mean, squares.sum(axis=1), (squares * distance).sum(axis=1))

    def add(self, other: _Moments) -> None:
        """Adds those of more rows: Chan, Golub and LeVeque's update, with Pébay's for the cubes."""
        a, b = self.count, other.count
        total = np.maximum(a + b, 1)
        delta = other.mean - self.mean
        self.cubes += other.cubes + delta**3 * a * b * (a - b) / total**2
        self.cubes += 3 * delta * (a * other.squares - b * self.squares) / total
        self.squares += other.squares + delta**2 * a * b / total
        self.mean += delta * b / total
        self.count = a + b

    @property
    def std(self) -> NDArray[np.float64]:
        """The standard deviation over all rows, 0 where there are none."""
        return np.sqrt(self.squares / np.maximum(self.count, 1))

    @property
    def skewness(self) -> NDArray[np.float64]:
        """0 where a column is a constant."""
        spread = self.std**3
        return np.divide(self.cubes / np.maximum(self.count, 1), spread, out=np.zeros_like(spread), where=spread > 0)


@dataclass
class DenseStatistics:
    """The statistics that scales of columns follow from: moments of training rows, missing values of every split.

    Args:
        names: of the columns.

    Example:
        >>> statistics = DenseStatistics(["age"])
        >>> statistics.add("train", np.array([[20.0, 40.0, np.nan, 60.0]]))
        >>> (scale,) = statistics.scales()
        >>> scale.log1p, scale.mean, scale.missing
        (False, 40.0, {'train': 0.25})
    """

    names: Sequence[str]
    _samples: dict[str, int] = field(default_factory=dict, init=False)
    _missing: dict[str, NDArray[np.int64]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        zeros = np.zeros((2, len(self.names)))
        self._least, self._most = (np.full(len(self.names), bound) for bound in (np.inf, -np.inf))
        self._first = np.full(len(self.names), np.nan)
        self._plain, self._logged = (_Moments(*zeros.copy(), *zeros.copy()) for _ in range(2))

    def add(self, split: str, columns: NDArray[np.floating]) -> None:
        """Adds a block `[K, n]` of a split, in which NaN stands for missing."""
        missing = np.isnan(columns).sum(axis=1)
        self._samples[split] = self._samples.get(split, 0) + columns.shape[1]
        self._missing[split] = self._missing.get(split, np.zeros(len(self.names), np.int64)) + missing
        if split == "train":
            wide = columns.astype(np.float64)
            self._least = np.fmin(self._least, np.fmin.reduce(wide, axis=1, initial=np.inf))
            self._most = np.fmax(self._most, np.fmax.reduce(wide, axis=1, initial=-np.inf))
            # [Note: distances from the first value] Squares of values that are large beside their spread, times or ids,
            # would leave nothing of the spread. Distances from a value of the column are exact where they are small.
            self._first = np.where(np.isnan(self._first), _first_known(wide), self._first)
            first = self._first[:, None]
            self._plain.add(_Moments.of(wide - first))
            self._logged.add(_Moments.of(_log_distance(np.maximum(wide, 0), np.maximum(first, 0))))

    def scales(self) -> tuple[DenseScale, ...]:
        """The scale of each column."""
        raw, logged = self._plain.skewness, self._logged.skewness
        logs = (self._least >= 0) & (raw > SKEWED) & (np.abs(logged) <= raw / 2)
        first = np.nan_to_num(self._first)
        means = np.where(logs, np.log1p(np.maximum(first, 0)) + self._logged.mean, first + self._plain.mean)
        stds = np.where(logs, self._logged.std, self._plain.std)
        stds = np.where(self._most > self._least, stds, 1.0)
        return tuple(
            DenseScale(
                name=name,
                log1p=bool(logs[i]),
                mean=float(means[i]),
                std=float(stds[i]),
                missing={split: int(self._missing[split][i]) / total for split, total in self._samples.items()},
            )
            for i, name in enumerate(self.names)
        )


def _first_known(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """The first value of each column `[K, n]` that is not NaN; NaN where there is none."""
    if not columns.shape[1]:
        return np.full(len(columns), np.nan)
    return np.take_along_axis(columns, np.argmin(np.isnan(columns), axis=1)[:, None], axis=1)[:, 0]


def _log_distance(values: NDArray[np.float64], first: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(1 + values) − log(1 + first), exact where they are close to each other."""
    relative = (values - first) / (1 + first)
    is_close = np.abs(relative) < 0.5
    return np.where(is_close, np.log1p(np.where(is_close, relative, 0)), np.log1p(values) - np.log1p(first))
