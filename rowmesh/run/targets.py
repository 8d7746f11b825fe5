"""Targets: what a run predicts, one for each label of its data, and the loss of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh._support.suggest import hint
from rowmesh.data.data_set import DataSet
from rowmesh.errors import ConfigurationError
from rowmesh.run.config import Config

Loss = Literal["binary", "mse", "softmax"]


@dataclass(frozen=True)
class Target:
    """A label, as models are trained on it.

    Attributes:
        name: the label.
        loss: "binary": the model's output is the logit of the probability of label 1, and the loss the binary cross
            entropy; "mse": the output is the value itself, and the loss its squared error; "softmax": the output is a
            score that ranks items, and the label the weight of the sample in the softmax over items.
        loss_weight: the factor of its loss in the sum over labels.
        mean: of the training labels, by sample weights where there are any: what a model has to beat.
    """

    name: str
    loss: Loss = "binary"
    loss_weight: float = 1.0
    mean: float = 0.5

    def predictions(self, outputs: Tensor) -> Tensor:
        """Probabilities of label 1, values or scores, from the outputs of a model for this label."""
        return torch.sigmoid(outputs) if self.loss == "binary" else outputs


def is_click(targets: Sequence[Target]) -> bool:
    """Whether a run has one label, of 0 and 1, so that its loss is a log-loss."""
    return [(target.loss, target.loss_weight) for target in targets] == [("binary", 1.0)]


def targets_of(config: Config, data: DataSet) -> tuple[Target, ...]:
    """The targets of a run, in the order of the labels.

    Raises:
        ConfigurationError: a binary loss meets a label that is not of 0 and 1, or a loss weight names no label.
    """
    weights, wanted, labels = config.train.loss_weights, config.train.loss, data.schema.labels
    for name in weights:
        if name not in data.schema.label_names:
            suggestion = hint(name, data.schema.label_names) or f"; known: {', '.join(data.schema.label_names)}"
            raise ConfigurationError(f"train.loss_weights.{name}: {data.place} has no label of this name{suggestion}")
    if labels and not any(weights.get(label.name, 1.0) for label in labels):
        raise ConfigurationError("train.loss_weights are all 0; give at least one label a weight above 0")
    mean = _training_means(config, data)
    targets = []
    for label in labels:
        if wanted == "binary" and label.kind == "value":
            raise ConfigurationError(
                f'train.loss = "binary" is for labels of 0 and 1, and label {label.name!r} of {data.place} is of kind '
                f'"value" (its mean in training is {mean[label.name]:g}); leave train.loss out, which takes the '
                'squared error for it, or prepare the data with a label of kind "binary"'
            )
        by_kind: Loss = "binary" if label.kind == "binary" else "mse"
        loss: Loss = by_kind if wanted == "auto" else wanted
        if config.model.objective == "retrieval":
            loss = "softmax"
        targets.append(Target(label.name, loss, weights.get(label.name, 1.0), mean[label.name]))
    return tuple(targets)


def _training_means(config: Config, data: DataSet) -> dict[str, float]:
    """The training mean of each label; 0 without a training split, which is refused elsewhere."""
    split = data.splits.get(config.data.train)
    return {name: split.label_means[name] if split else 0.0 for name in data.schema.label_names}


def total_loss(targets: tuple[Target, ...], outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Σ_l factor_l Σ_b w_b loss_l(b): what a rank's samples add to the loss, before it is divided by Σ w of all ranks.

    Args:
        targets: one a label.
        outputs: `[B]`, or `[B, L]` of several labels.
        labels: as `outputs`, of the same dtype.
        weights: `[B]`; None: 1 each.
    """
    total = outputs.new_zeros(())
    for number, target in enumerate(targets):
        z, y = (outputs, labels) if len(targets) == 1 else (outputs[:, number], labels[:, number])
        summed = _summed(target.loss, z, y, weights)
        if len(targets) == 1 and target.loss_weight == 1:
            return summed
        total = total + target.loss_weight * summed
    return total


def _summed(loss: Loss, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    assert loss != "softmax", "it is over the items of a batch, not a function of logits"
    function = F.binary_cross_entropy_with_logits if loss == "binary" else F.mse_loss
    if weights is None:
        return function(outputs, labels, reduction="sum")
    return (weights * function(outputs, labels, reduction="none")).sum()
