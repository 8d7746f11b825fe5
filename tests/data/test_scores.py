"""Scores against torchmetrics and against counting pairs."""

import numpy as np
import torch
from torchmetrics.functional.classification import binary_auroc

from rowmesh.data.scores import Scores


def test_against_an_oracle():
    rng = np.random.default_rng(0)
    probabilities = 1 / (1 + np.exp(-rng.normal(-1, 1.3, 50_000)))
    labels = (rng.random(50_000) < probabilities).astype(np.int8)
    scores = Scores()
    for part in np.array_split(np.arange(50_000), 7):
        scores.add(probabilities[part], labels[part])
    p, y = torch.from_numpy(probabilities), torch.from_numpy(labels.astype(np.int64))
    assert abs(scores.auc - float(binary_auroc(p, y))) < 1e-5
    loss = torch.nn.functional.binary_cross_entropy(p, y.double())
    assert abs(scores.log_loss - float(loss)) < 1e-12
    assert scores.positive_rate == labels.mean()


def test_ties_count_half():
    scores = Scores()
    probabilities, labels = np.array([0.2, 0.2, 0.7, 0.2]), np.array([0, 1, 1, 0])
    scores.add(probabilities, labels)
    pairs = [(p > n) + (p == n) / 2 for p in (0.2, 0.7) for n in (0.2, 0.2)]
    assert scores.auc == np.mean(pairs)
    assert Scores().auc == 0.5
