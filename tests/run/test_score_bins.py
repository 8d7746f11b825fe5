import json

import numpy as np
import pytest
import torch

from rowmesh.run.metrics import Metrics, Predictions
from rowmesh.run.score_bins import MAX_BINS, ScoreBins, sorted_keys


def sample(count, levels, seed=0):
    generator = np.random.default_rng(seed)
    scores = generator.integers(-levels, levels, count) * np.float32(5 / levels)
    scores = scores.astype(np.float32)
    labels = (generator.random(count) < 1 / (1 + np.exp(-scores))).astype(np.uint8)
    return scores, labels


@pytest.mark.parametrize("count, levels", [(1, 3), (150, 40), (5_000, 4), (5_000, 10_000)])
def test_bins_are_sums_over_samples_between_two_scores(count, levels):
    scores, labels = sample(count, levels)
    bins = ScoreBins.of(sorted_keys(scores, labels))
    assert 1 <= len(bins.samples) <= MAX_BINS
    low = -np.inf
    for high, samples, positives, predicted in zip(
        bins.highest, bins.samples, bins.positives, bins.predicted, strict=True
    ):
        inside = (scores > low) & (scores <= high)
        assert (inside.sum(), labels[inside].sum()) == (samples, positives)
        assert predicted == pytest.approx((1 / (1 + np.exp(-scores[inside].astype(np.float64)))).sum())
        low = high
    assert low == scores.max()


def test_points_lie_on_the_exact_roc_curve():
    scores, labels = sample(5_000, 10_000)
    bins = ScoreBins.of(sorted_keys(scores, labels), most=10)
    assert max(bins.samples) < 1.2 * min(bins.samples)
    above = np.cumsum(bins.positives[::-1])[:-1] / labels.sum()
    expected = [((scores > high) & (labels == 1)).sum() / labels.sum() for high in bins.highest[-2::-1]]
    assert above.tolist() == expected


def test_no_samples_make_no_bins():
    assert ScoreBins.of(sorted_keys(np.empty(0, np.float32), np.empty(0, np.uint8))).samples == ()


def test_bins_travel_with_the_metrics_and_stay_out_of_their_record():
    predictions = Predictions()
    predictions.add(torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([0.0, 1.0, 1.0]))
    metrics = predictions.metrics()
    assert metrics.score_bins.positives == (0, 1, 1)
    assert "score_bins" not in metrics.as_record()
    assert Metrics.from_plain(json.loads(json.dumps(metrics.to_plain()))) == metrics


def test_bins_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="different lengths"):
        ScoreBins.from_plain({"highest": [1.0], "samples": [1, 2], "positives": [1], "predicted": [0.5]})
