import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch.nn import functional as F
from torchmetrics.functional.classification import binary_auroc

from rowmesh.errors import DataError
from rowmesh.train.metrics import Predictions, area_under_roc, binary_entropy, compute
from rowmesh.train.score_bins import sorted_keys

LENGTHS = st.integers(1, 60)


@st.composite
def scores_and_labels(draw):
    length = draw(LENGTHS)
    coarse = st.sampled_from([-3.5, -1.0, -0.0, 0.0, 1e-30, 1.0, 7.25])
    fine = st.floats(-30, 30, width=32)
    scores = draw(npst.arrays(np.float32, length, elements=draw(st.sampled_from([coarse, fine]))))
    labels = draw(npst.arrays(np.uint8, length, elements=st.integers(0, 1)))
    return scores, labels


def auc_by_pairs(scores, labels):
    positive, negative = scores[labels == 1][:, None], scores[labels == 0][None, :]
    return float(((positive > negative) + 0.5 * (positive == negative)).mean())


@given(scores_and_labels())
@settings(max_examples=200, deadline=None)
def test_auc_is_the_share_of_ordered_pairs(data):
    scores, labels = data
    area = area_under_roc(sorted_keys(scores, labels), int(labels.sum()))
    if labels.all() or not labels.any():
        assert math.isnan(area)
    else:
        assert area == pytest.approx(auc_by_pairs(scores, labels), abs=1e-12)


def test_metrics_match_torchmetrics_and_torch():
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(20_000, generator=generator) - 1).mul(8).round().div(8)  # many ties
    labels = torch.bernoulli(torch.sigmoid(logits * 0.7), generator=generator)
    predictions = Predictions()
    for part in range(0, 20_000, 3_000):
        predictions.add(logits[part : part + 3_000], labels[part : part + 3_000])
    metrics = predictions.metrics()
    loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double()).item()
    rate = labels.double().mean().item()
    assert metrics.samples == 20_000
    assert metrics.base_rate == pytest.approx(rate)
    assert metrics.auc == pytest.approx(binary_auroc(logits, labels.long()).item(), abs=1e-6)
    assert metrics.log_loss == pytest.approx(loss, rel=1e-12)
    assert metrics.normalized_entropy == pytest.approx(loss / binary_entropy(rate), rel=1e-12)
    expected = (torch.sigmoid(logits.double()).sum() / labels.sum()).item()
    assert metrics.calibration == pytest.approx(expected, rel=1e-12)


def test_one_class_only_is_undefined_and_valid_json():
    metrics = compute(np.float32([0.0, 1.0]), np.uint8([0, 0]))
    assert math.isnan(metrics.auc)
    assert math.isnan(metrics.calibration)
    assert metrics.as_record()["auc"] is None
    assert metrics.as_record()["log_loss"] == metrics.log_loss


def test_extreme_logits_stay_finite():
    metrics = compute(np.float32([1e30, -1e30, 500.0]), np.uint8([1, 0, 1]))
    assert metrics.log_loss == pytest.approx(0.0, abs=1e-12)
    assert metrics.auc == 1.0


def no_samples(mesh):
    try:
        Predictions().metrics(mesh)
    except DataError as error:
        return str(error)
    return None


def test_an_error_of_the_metrics_is_raised_on_every_rank(ranks):
    assert ranks.run(no_samples, world_size=3) == ["no samples to evaluate: the split is empty"] * 3


def test_what_cannot_be_evaluated():
    with pytest.raises(DataError, match="no samples"):
        Predictions().metrics()
    with pytest.raises(DataError, match="1 of 2 logits are not finite"):
        Predictions().add(torch.tensor([0.0, math.nan]), torch.zeros(2))
    with pytest.raises(DataError, match=r"1 of 2 logits are not finite or past ±3.4e38, the first of them -1e\+300"):
        Predictions().add(torch.tensor([0.0, -1e300], dtype=torch.float64), torch.zeros(2))
    with pytest.raises(DataError, match=r"neither 0 nor 1, the first of them 2.0 at sample 1"):
        Predictions().add(torch.zeros(2), torch.tensor([0.0, 2.0]))
