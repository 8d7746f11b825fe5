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
from rowmesh.run.metrics import Predictions, area_under_roc, binary_entropy, compute
from rowmesh.run.score_bins import sorted_keys
from rowmesh.run.value_metrics import ValuePredictions

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


SHAPES = {
    "other lengths": ([3], [2], None),
    "a label for all": ([4], [1], None),
    "a column": ([3, 1], [3], None),
    "columns": ([3, 1], [3, 1], None),
    "no dimension": ([], [], None),
    "other weights": ([3], [3], [2]),
    "a weight for all": ([3], [3], [1]),
    "a column of weights": ([3], [3], [3, 1]),
}


@pytest.mark.parametrize("make", [Predictions, lambda: ValuePredictions(baseline=0.0)])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_batch_has_one_of_each_for_every_sample(make, shapes):
    predictions = make()
    predictions.add(torch.zeros(2), torch.tensor([0.0, 1.0]))
    before = predictions.metrics()
    with pytest.raises(DataError, match=r"they must be \[B\] each"):
        predictions.add(*(None if shape is None else torch.ones(shape) for shape in shapes))
    assert predictions.metrics() == before


def test_a_column_of_logits_comes_with_the_way_out():
    with pytest.raises(DataError, match=r"logits are \[3, 1\], labels are \[3\]: .*squeeze\(1\)"):
        Predictions().add(torch.zeros(3, 1), torch.zeros(3))


@pytest.mark.parametrize("make", [Predictions, lambda: ValuePredictions(baseline=0.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight", [-1.0, math.inf, math.nan])
def test_weights_are_finite_and_not_below_0(make, dtype, weight):
    predictions = make()
    predictions.add(torch.zeros(2), torch.tensor([0.0, 1.0]))
    before = predictions.metrics()
    with pytest.raises(DataError, match=r"1 of 2 sample weights are below 0 or not finite, the first .* sample 1"):
        predictions.add(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, weight], dtype=dtype))
    assert predictions.metrics() == before


def test_a_weight_past_float32_is_refused():
    with pytest.raises(DataError, match="below 0 or not finite"):
        Predictions().add(torch.zeros(1), torch.zeros(1), torch.tensor([1e300], dtype=torch.float64))


@pytest.mark.parametrize("weights", [None, torch.ones(4)])
def test_logits_of_float64_are_compared_as_such(weights):
    logits = 1.0 + torch.arange(4, dtype=torch.float64) * 1e-12  # all one number in float32
    predictions = Predictions()
    predictions.add(logits, torch.tensor([0, 1, 0, 1]), weights)
    assert predictions.metrics().auc == 0.75
    assert sum(predictions.metrics().score_bins.samples) == 4


def test_values_of_float64_and_whole_labels_are_not_rounded():
    predictions = ValuePredictions(baseline=0.0)
    predictions.add(torch.tensor([2.0**30 + 1], dtype=torch.float64), torch.tensor([2**30]))
    assert predictions.metrics().mae == 1.0


def of_two_dtypes(mesh):
    predictions, dtype = Predictions(), torch.float32 if mesh.rank else torch.float64
    predictions.add(torch.tensor([1 + 1e-12 * (1 - mesh.rank), -1.0], dtype=dtype), torch.tensor([1 - mesh.rank, 0]))
    return predictions.metrics(mesh).auc


def test_ranks_may_have_logits_of_other_dtypes(ranks):
    assert ranks.run(of_two_dtypes, world_size=2) == [1.0, 1.0]
