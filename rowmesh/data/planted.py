"""PlantedModel: click samples whose true probabilities are known.

Ids follow a power law in every table: the id of popularity r has a share ∝ (r + 1)^−s, with an exponent s of
the table's own. The logit of a sample is

    b + signal · (√0.5 · ids + √0.45 · dense + √0.05 · pairs)

where each term has mean 0 and deviation 1 over samples:

- ids: an effect of every id among the `head` most popular of its table, and of a missing id; none of others;
- dense: a weight for each log(1 + x), and a product of the first two;
- pairs: the product of two ids' effects, for `NUM_PAIRS` pairs of tables.

All effects are normal and functions of (seed, table, popularity) alone; b gives the base rate. Since rare ids
carry no effect, a model that has learnt the frequent ones is as good as any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rowmesh.errors import ConfigurationError

CRITEO_ROWS = (
    1460,
    583,
    10131227,
    2202608,
    305,
    24,
    12517,
    633,
    3,
    93145,
    5683,
    8351593,
    3194,
    27,
    14992,
    5461306,
    10,
    5652,
    2173,
    4,
    7046547,
    18,
    15,
    286181,
    105,
    142572,
)
"""Distinct values of C1 … C26 in Criteo's Kaggle data."""

NUM_DENSE = 13
CURVATURE = 0.25
NUM_PAIRS = 4
TERM_SHARES = {"ids": 0.5, "dense": 0.45, "pairs": 0.05}
_CALIBRATION_SAMPLES = 100_000
_DENSE_MISSING = (0.45, 0, 0.22, 0.22, 0.03, 0.22, 0.04, 0, 0.04, 0.45, 0.04, 0.77, 0.22)
_ID_MISSING = {18: 0.44, 19: 0.44, 21: 0.76, 24: 0.44, 25: 0.44}  # C19, C20, C22, C25, C26
_MISSING = -1


@dataclass(frozen=True, kw_only=True)
class PlantedConfig:
    """The parameters of a planted model.

    Attributes:
        seed: of everything.
        num_rows: distinct ids of each table.
        max_rows: cap on each of them; None for none.
        exponents: (lowest, highest) exponent of the tables' power laws.
        signal: deviation of the logits; higher is easier (0.8: AUC about 0.70, 1.3: 0.79, 2: 0.87).
        head: how many ids of each table have an effect; more is harder to learn.
        base_rate: share of positive labels.
        bag_sizes: table → mean number of ids a sample, for multi-hot tables (0 to twice the mean).
    """

    seed: int = 0
    num_rows: tuple[int, ...] = CRITEO_ROWS
    max_rows: int | None = None
    exponents: tuple[float, float] = (1.05, 1.35)
    signal: float = 1.3
    head: int = 50
    base_rate: float = 0.25
    bag_sizes: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        low, high = self.exponents
        if self.seed < 0:
            raise ConfigurationError(f"seed must be 0 or more, got {self.seed}")
        if not 0 < low <= high < math.inf:
            raise ConfigurationError(f"exponents must be positive and in order, got {self.exponents}")
        if not 0 < self.base_rate < 1:
            raise ConfigurationError(f"base rate must lie between 0 and 1, got {self.base_rate}")
        if not 0 <= self.signal < math.inf or self.head < 1:
            raise ConfigurationError(f"signal must be 0 or more and head 1 or more, got {self.signal} and {self.head}")
        if (self.max_rows is not None and self.max_rows < 1) or min(self.num_rows, default=0) < 1:
            raise ConfigurationError("tables need one row or more; check num_rows and max_rows")
        if any(not 0 <= table < len(self.num_rows) or size < 1 for table, size in self.bag_sizes.items()):
            raise ConfigurationError(
                f"bag sizes must be 1 or more, for tables 0 to {len(self.num_rows) - 1}, got {dict(self.bag_sizes)}"
            )

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Distinct ids of each table after the cap."""
        return tuple(min(rows, self.max_rows or rows) for rows in self.num_rows)


@dataclass(frozen=True)
class Samples:
    """Drawn samples.

    Attributes:
        labels: int8 `[n]`.
        probabilities: float64 `[n]`, of label 1.
        dense: int64 `[NUM_DENSE, n]`, −1 where missing.
        ids: int64 ids of each table, −1 where missing: `[n]`, or all bags back to back.
        bag_lengths: int64 `[n]` for each multi-hot table.
    """

    labels: NDArray[np.int8]
    probabilities: NDArray[np.float64]
    dense: NDArray[np.int64]
    ids: tuple[NDArray[np.int64], ...]
    bag_lengths: Mapping[int, NDArray[np.int64]]

    def first(self, count: int) -> Samples:
        """The first `count` samples."""
        ids = tuple(
            column[: self.bag_lengths[table][:count].sum() if table in self.bag_lengths else count]
            for table, column in enumerate(self.ids)
        )
        bag_lengths = {table: lengths[:count] for table, lengths in self.bag_lengths.items()}
        return Samples(self.labels[:count], self.probabilities[:count], self.dense[:, :count], ids, bag_lengths)


@dataclass(frozen=True)
class _Features:
    """The inputs of the logit, with popularity ranks in place of ids."""

    dense: NDArray[np.int64]
    ranks: tuple[NDArray[np.int64], ...]
    bag_lengths: Mapping[int, NDArray[np.int64]]


class PlantedModel:
    """Draws samples; see the module.

    Example:
        >>> model = PlantedModel(PlantedConfig(num_rows=(100, 50)))
        >>> samples = model.draw(1000, stream=(0, 0))
        >>> bool(abs(samples.probabilities.mean() - 0.25) < 0.05)
        True
    """

    def __init__(self, config: PlantedConfig) -> None:
        self.config = config
        rows = config.table_rows
        low, high = config.exponents
        self.exponents = low + (high - low) * self._rng(0).random(len(rows))
        # An effect for each popular id, then 0 for the tail, then an effect for missing ids, which index −1 finds.
        self._effects = [self._table_effects(table) for table in range(len(rows))]
        self._dense_weights = self._rng(1).standard_normal(NUM_DENSE)
        self._dense_shape = self._rng(2).uniform([[0.5], [0.5]], [[3.0], [1.5]], (2, NUM_DENSE))
        self._pairs = self._choose_pairs()
        self._calibrate()

    def draw(self, num_samples: int, stream: tuple[int, ...]) -> Samples:
        """Draws samples; equal streams give equal samples.

        Args:
            num_samples: how many.
            stream: numbers that name the stream, such as (split, chunk).
        """
        rng = self._rng(5, *stream)
        features = self._draw_features(rng, num_samples)
        logits = self._intercept + self._scores(features)
        probabilities = 1 / (1 + np.exp(-logits))
        labels = (rng.random(num_samples) < probabilities).astype(np.int8)
        ids = tuple(self._ids(table, ranks) for table, ranks in enumerate(features.ranks))
        return Samples(labels, probabilities, features.dense, ids, features.bag_lengths)

    def _rng(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.config.seed, *key])

    def _table_effects(self, table: int) -> NDArray[np.float64]:
        head = self._rng(3, table).standard_normal(self.config.head + 1)
        return np.concatenate([head[1:], [0.0], head[:1]])

    def _choose_pairs(self) -> list[tuple[int, int]]:
        one_hot = [t for t in range(len(self.config.num_rows)) if t not in self.config.bag_sizes]
        pairs = [(a, b) for i, a in enumerate(one_hot) for b in one_hot[i + 1 :]]
        chosen = self._rng(6).permutation(len(pairs))[:NUM_PAIRS]
        return [pairs[i] for i in chosen]

    def _draw_features(self, rng: np.random.Generator, num_samples: int) -> _Features:
        ranks, bag_lengths = [], {}
        for table, num_rows in enumerate(self.config.table_rows):
            num_ids = num_samples
            if table in self.config.bag_sizes:
                lengths = rng.integers(0, 2 * self.config.bag_sizes[table] + 1, num_samples)
                bag_lengths[table], num_ids = lengths, int(lengths.sum())
            drawn = power_law(rng.random(num_ids), num_rows, float(self.exponents[table]))
            if table in _ID_MISSING and table not in bag_lengths:
                drawn[rng.random(num_ids) < _ID_MISSING[table]] = _MISSING
            ranks.append(drawn)
        dense = np.empty((NUM_DENSE, num_samples), np.int64)
        for i, (mean, deviation) in enumerate(self._dense_shape.T):
            latent = mean + deviation * rng.standard_normal(num_samples)
            dense[i] = np.rint(np.expm1(np.clip(latent, 0, 15)))
            dense[i, rng.random(num_samples) < _DENSE_MISSING[i]] = _MISSING
        return _Features(dense, tuple(ranks), bag_lengths)

    def _terms(self, features: _Features) -> dict[str, NDArray[np.float64]]:
        """The three terms, not yet standardised."""
        num_samples = features.dense.shape[1]
        effects = [self._effect(table, features) for table in range(len(features.ranks))]
        values = np.log1p(np.maximum(features.dense, 0))
        dense = self._dense_weights @ values + CURVATURE * (values[0] - 1) * (values[1] - 1)
        pairs = np.zeros(num_samples)
        for first, second in self._pairs:
            pairs += effects[first] * effects[second]
        return {"ids": np.sum(effects, axis=0), "dense": dense, "pairs": pairs}

    def _effect(self, table: int, features: _Features) -> NDArray[np.float64]:
        """The effect of a table on each sample; that of a bag is the sum over its ids, scaled down."""
        effects = self._effects[table][np.minimum(features.ranks[table], self.config.head)]
        if table not in features.bag_lengths:
            return effects
        num_samples = features.dense.shape[1]
        samples = np.repeat(np.arange(num_samples), features.bag_lengths[table])
        return np.bincount(samples, effects, num_samples) / np.sqrt(self.config.bag_sizes[table])

    def _scores(self, features: _Features) -> NDArray[np.float64]:
        total = np.zeros(features.dense.shape[1])
        for name, values in self._terms(features).items():
            mean, deviation = self._moments[name]
            if deviation > 0:
                total += (TERM_SHARES[name] ** 0.5 * self.config.signal / deviation) * (values - mean)
        return total

    def _calibrate(self) -> None:
        """Standardises the terms and finds the intercept, on samples of a stream of their own."""
        features = self._draw_features(self._rng(7), _CALIBRATION_SAMPLES)
        self._moments = {name: (v.mean(), v.std()) for name, v in self._terms(features).items()}
        scores = self._scores(features)
        low, high = -30.0, 30.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            rate = (1 / (1 + np.exp(-(scores + middle)))).mean()
            low, high = (middle, high) if rate < self.config.base_rate else (low, middle)
        self._intercept = low

    def _ids(self, table: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Popularities as ids that look like hashes: a bijection of 32 bits, another one for every table."""
        key = np.uint32(self._rng(8, table).integers(2**32))
        return np.where(ranks < 0, _MISSING, _scramble(ranks.astype(np.uint32) ^ key).astype(np.int64))


def power_law(uniform: NDArray[np.float64], num_rows: int, exponent: float) -> NDArray[np.int64]:
    """Popularity ranks from uniform numbers, by inverting the distribution function.

    P(rank ≤ r) = ∫₁^{r+2} x^−s dx / ∫₁^{n+1} x^−s dx, so that a rank's share is near (r + 1)^−s.

    >>> power_law(np.array([0.0, 0.5, 0.999999]), num_rows=1000, exponent=1.1).tolist()
    [0, 16, 999]
    """
    if abs(exponent - 1) < 1e-9:
        x = (num_rows + 1.0) ** uniform
    else:
        power = 1 - exponent
        x = (1 + uniform * ((num_rows + 1.0) ** power - 1)) ** (1 / power)
    return np.clip(x.astype(np.int64) - 1, 0, num_rows - 1)


def _scramble(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The 32-bit finalizer of MurmurHash3, a bijection."""
    values = (values ^ (values >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    values = (values ^ (values >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return values ^ (values >> np.uint32(16))
