"""The planted model: shapes, power laws, and probabilities that are the truth."""

from itertools import pairwise

import numpy as np
import pytest

from rowmesh.data.planted import CRITEO_ROWS, PlantedConfig, PlantedModel, power_law
from rowmesh.data.synthetic import Scores
from rowmesh.errors import ConfigurationError


@pytest.fixture(scope="module")
def samples():
    return PlantedModel(PlantedConfig(seed=3)).draw(200_000, stream=(0, 0))


def test_shape(samples):
    assert len(samples.ids) == len(CRITEO_ROWS) == 26
    assert samples.dense.shape == (13, 200_000)
    assert samples.dense.min() == -1
    for ids, rows in zip(samples.ids, CRITEO_ROWS, strict=True):
        assert len(np.unique(ids[ids >= 0])) <= rows
        assert ids.max() < 2**32
    assert len(np.unique(samples.ids[8])) == 3


def test_probabilities_are_true(samples):
    """Among samples of nearly equal probability, that share of the labels is positive."""
    order = np.argsort(samples.probabilities)
    for part in np.array_split(order, 20):
        expected = samples.probabilities[part].mean()
        deviation = (expected * (1 - expected) / len(part)) ** 0.5
        assert abs(samples.labels[part].mean() - expected) < 4 * deviation


def test_base_rate_and_difficulty():
    aucs = []
    for signal in (0.8, 1.3, 2.0):
        scores = Scores()
        drawn = PlantedModel(PlantedConfig(signal=signal, base_rate=0.1)).draw(100_000, (0, 0))
        scores.add(drawn.probabilities, drawn.labels)
        assert abs(scores.positive_rate - 0.1) < 0.005
        aucs.append(scores.auc)
    assert aucs == sorted(aucs)
    np.testing.assert_allclose(aucs, [0.70, 0.80, 0.87], atol=0.025)


def test_nothing_scores_above_the_truth(samples):
    """Scoring by anything but the true probabilities, here without one of the features, is worse."""
    best, noisy = Scores(), Scores()
    best.add(samples.probabilities, samples.labels)
    logits = np.log(samples.probabilities / (1 - samples.probabilities))
    noise = np.random.default_rng(0).normal(0, 0.3, len(logits))
    noisy.add(1 / (1 + np.exp(-(logits + noise))), samples.labels)
    assert noisy.auc < best.auc
    assert noisy.log_loss > best.log_loss


def test_streams_are_reproducible_and_independent():
    model, again = (PlantedModel(PlantedConfig(num_rows=(50, 1000), seed=1)) for _ in range(2))
    one, same, other = model.draw(100, (0, 1)), again.draw(100, (0, 1)), model.draw(100, (0, 2))
    for a, b in ((one.labels, same.labels), (one.dense, same.dense), *zip(one.ids, same.ids, strict=True)):
        np.testing.assert_array_equal(a, b)
    assert (one.dense != other.dense).any()


def test_max_rows_caps_tables():
    drawn = PlantedModel(PlantedConfig(max_rows=20)).draw(20_000, (0, 0))
    assert max(len(np.unique(ids[ids >= 0])) for ids in drawn.ids) == 20


def test_bags():
    config = PlantedConfig(num_rows=(1000, 50), bag_sizes={0: 4})
    drawn = PlantedModel(config).draw(10_000, (0, 0))
    lengths = drawn.bag_lengths[0]
    assert (lengths.min(), lengths.max()) == (0, 8)
    assert len(drawn.ids[0]) == lengths.sum()
    first = drawn.first(10)
    assert len(first.ids[0]) == lengths[:10].sum()
    assert len(first.ids[1]) == len(first.labels) == 10


@pytest.mark.parametrize("exponent", [0.7, 1.0, 1.2])
def test_power_law(exponent):
    ranks = power_law(np.random.default_rng(0).random(400_000), 10_000, exponent)
    assert (ranks.min(), ranks.max() < 10_000) == (0, True)
    shares = np.bincount(ranks, minlength=10_000) / len(ranks)
    groups = [(5, 10), (10, 100), (100, 1000)]
    weights = np.arange(1, 10_001) ** -exponent
    for (a, b), (c, d) in pairwise(groups):
        expected = weights[a:b].sum() / weights[c:d].sum()
        assert abs(shares[a:b].sum() / shares[c:d].sum() / expected - 1) < 0.06


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"base_rate": 1.0}, "base rate"),
        ({"signal": -1}, "signal must be 0 or more"),
        ({"signal": float("inf")}, "signal must be 0 or more"),
        ({"signal": float("nan")}, "signal must be 0 or more"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"head": 0}, "head 1 or more"),
        ({"max_rows": 0}, "one row or more"),
        ({"exponents": (1.2, 1.1)}, "exponents"),
        ({"bag_sizes": {26: 3}}, "for tables 0 to 25"),
        ({"bag_sizes": {0: 0}}, "bag sizes must be 1 or more"),
    ],
)
def test_mistakes(mistake, message):
    with pytest.raises(ConfigurationError, match=message):
        PlantedConfig(**mistake)
