"""Metrics of values, and metrics by weight: a weight of k is the sample k times, on any number of ranks."""

import math

import numpy as np
import pytest
import torch

from rowmesh.errors import DataError
from rowmesh.mesh import Mesh
from rowmesh.run.metrics import Predictions, compute
from rowmesh.run.value_metrics import ValuePredictions, compute_values

NUMBERS = ("base_rate", "auc", "log_loss", "normalized_entropy", "calibration")


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores with ties, labels of 0 and 1, and whole weights, some of them 0."""
    draw = np.random.default_rng(seed)
    size = int(draw.integers(2, 200))
    scores = np.round(draw.normal(size=size), int(draw.integers(0, 3))).astype(np.float32)
    return scores, draw.integers(2, size=size).astype(np.uint8), draw.integers(4, size=size)


@pytest.mark.parametrize("seed", range(20))
def test_a_weight_is_a_number_of_samples(seed):
    scores, labels, weights = drawn(seed)
    found = compute(scores, labels, weights.astype(np.float32))
    expected = compute(scores.repeat(weights), labels.repeat(weights))
    for name in NUMBERS:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12, nan_ok=True), name
    assert found.samples == len(scores)
    values = compute_values(scores, labels.astype(np.float32), weights.astype(np.float32), 0.25)
    again = compute_values(
        scores.repeat(weights), labels.astype(np.float32).repeat(weights), np.ones(weights.sum(), np.float32), 0.25
    )
    for name in ("mean_label", "mean_prediction", "rmse", "mae", "baseline_rmse", "baseline_mae"):
        assert getattr(values, name) == pytest.approx(getattr(again, name), rel=1e-12), name
    assert values.rmse == pytest.approx(math.sqrt(np.average((scores - labels.astype(float)) ** 2, weights=weights)))


@pytest.mark.parametrize("seed", range(5))
def test_weights_of_one_change_nothing(seed):
    scores, labels, _ = drawn(seed)
    found, expected = compute(scores, labels, np.ones(len(scores), np.float32)), compute(scores, labels)
    for name in NUMBERS:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12, nan_ok=True), name


def test_samples_without_weight_are_refused():
    predictions, values = Predictions(), ValuePredictions(baseline=0.0)
    for each in (predictions, values):
        each.add(torch.zeros(3), torch.zeros(3), torch.zeros(3))
        with pytest.raises(DataError, match="the weights of all samples are 0"):
            each.metrics()
    with pytest.raises(DataError, match="no samples to evaluate"):
        ValuePredictions(baseline=0.0).metrics()
    with pytest.raises(DataError, match=r"1 of 2 predictions are not finite .* training diverged"):
        values.add(torch.tensor([0.0, math.inf]), torch.zeros(2))
    with pytest.raises(DataError, match="1 of 2 labels are not finite"):
        values.add(torch.zeros(2), torch.tensor([0.0, math.nan]))


def on_rank(mesh: Mesh) -> list[float]:
    """The first rank has one sample of four, and nearly all the weight."""
    part = slice(0, 1) if mesh.rank == 0 else slice(1, 4)
    values, labels = torch.tensor([1.0, 2.0, 3.0, 4.0])[part], torch.tensor([1.0, 0.0, 1.0, 1.0])[part]
    weights = torch.tensor([9.0, 1.0, 2.0, 0.0])[part]
    predictions, numbers = Predictions(), ValuePredictions(baseline=0.5)
    predictions.add(values, labels, weights)
    numbers.add(values, labels, weights)
    click, value = predictions.metrics(mesh), numbers.metrics(mesh)
    return [click.auc, click.log_loss, value.rmse, value.mae]


def test_ranks_find_what_one_process_finds(ranks):
    values, labels = np.float32([1, 2, 3, 4]), np.uint8([1, 0, 1, 1])
    weights = np.float32([9, 1, 2, 0])
    click, value = compute(values, labels, weights), compute_values(values, labels.astype(np.float32), weights, 0.5)
    for each in ranks.run(on_rank):
        assert each == pytest.approx([click.auc, click.log_loss, value.rmse, value.mae], rel=1e-12)
