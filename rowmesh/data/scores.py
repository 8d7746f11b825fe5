"""Scores of known probabilities: the AUC and log-loss that no model can beat, in bounded memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_NUM_BINS = 1 << 20


class Scores:
    """AUC and log-loss of a stream of probabilities and the labels drawn from them.

    The AUC counts pairs within bins of 2⁻²⁰ as ties, so it is exact to about 1e-6.

    Example:
        >>> scores = Scores()
        >>> scores.add(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
        >>> scores.auc
        0.75
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._log_loss = 0.0
        self._bins = np.zeros((2, _NUM_BINS), np.int64)

    def add(self, probabilities: NDArray[np.float64], labels: NDArray) -> None:
        """Takes in some samples."""
        chosen = np.where(labels == 1, probabilities, 1 - probabilities)
        self._log_loss -= float(np.log(chosen).sum())
        self.num_samples += len(labels)
        bins = np.minimum((probabilities * _NUM_BINS).astype(np.int64), _NUM_BINS - 1)
        for label in (0, 1):
            np.add.at(self._bins[label], bins[labels == label], 1)

    @property
    def positive_rate(self) -> float:
        """The share of label 1."""
        return float(self._bins[1].sum() / max(self.num_samples, 1))

    @property
    def log_loss(self) -> float:
        """Mean negative log-likelihood, in nats."""
        return self._log_loss / max(self.num_samples, 1)

    @property
    def auc(self) -> float:
        """The probability that a positive sample has a higher score than a negative one, ties half."""
        negatives, positives = self._bins
        below = negatives.cumsum() - negatives
        pairs = int(negatives.sum()) * int(positives.sum())
        return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else 0.5
